package pvenode

import (
	"crypto/rand"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"time"
)

// access is users, tokens, roles and access control lists. Node.mu guards it.
type access struct {
	users map[string]*user
	roles map[string]map[string]bool // role -> privileges
	acl   []aclEntry
	v9    bool
}

type user struct {
	enabled bool
	expire  int64
	comment string
	tokens  map[string]*token
}

type token struct {
	secret, comment string
	privsep         bool
	expire          int64
}

// aclEntry gives a role to a user or token (with "!") on a path and, when it
// propagates, below it.
type aclEntry struct {
	path, who, role string
	propagate       bool
}

// privileges of both versions; version 8 has VM.Monitor, version 9 the
// VM.GuestAgent ones and VM.Replicate.
var (
	vmAdmin = []string{
		"VM.Config.Disk", "VM.Config.CPU", "VM.Config.Memory", "VM.Config.Network", "VM.Config.HWType", "VM.Config.Options",
		"VM.Allocate", "VM.Clone", "VM.Migrate", "VM.Snapshot", "VM.Snapshot.Rollback",
	}
	vmUser     = []string{"VM.Config.CDROM", "VM.Config.Cloudinit", "VM.Console", "VM.Backup", "VM.PowerMgmt", "VM.Audit"}
	otherPrivs = []string{
		"Sys.PowerMgmt", "Sys.Modify", "Sys.Incoming", "Sys.AccessNetwork", "Sys.Console", "Sys.Syslog", "Sys.Audit",
		"Datastore.Allocate", "Datastore.AllocateTemplate", "Datastore.AllocateSpace", "Datastore.Audit",
		"SDN.Allocate", "SDN.Audit", "SDN.Use", "Realm.Allocate", "User.Modify", "Group.Allocate", "Realm.AllocateUser",
		"Pool.Allocate", "Pool.Audit", "Mapping.Modify", "Mapping.Use", "Mapping.Audit", "Permissions.Modify",
	}
	agent9 = []string{"VM.GuestAgent.Audit", "VM.GuestAgent.FileRead", "VM.GuestAgent.FileSystemMgmt", "VM.GuestAgent.FileWrite", "VM.GuestAgent.Unrestricted", "VM.Replicate"}
)

func (a *access) init(v9 bool) {
	a.v9 = v9
	a.users = map[string]*user{"root@pam": {enabled: true, tokens: map[string]*token{}}}
	a.roles = map[string]map[string]bool{"NoAccess": {}, "Administrator": setOf(a.privileges()...)}
	a.roles["PVEVMUser"] = setOf(vmUser...)
	a.roles["PVEVMAdmin"] = setOf(append(append([]string{}, vmAdmin...), vmUser...)...)
	if v9 {
		a.roles["PVEVMUser"] = setOf(append([]string{"VM.GuestAgent.Audit"}, vmUser...)...)
		for _, p := range agent9 {
			a.roles["PVEVMAdmin"][p] = true
		}
	} else {
		a.roles["PVEVMAdmin"]["VM.Monitor"] = true
	}
	a.roles["PVETemplateUser"] = setOf("VM.Clone", "VM.Audit")
	a.roles["PVEDatastoreUser"] = setOf("Datastore.AllocateSpace", "Datastore.Audit")
	a.roles["PVEDatastoreAdmin"] = setOf("Datastore.Allocate", "Datastore.AllocateTemplate", "Datastore.AllocateSpace", "Datastore.Audit")
	a.roles["PVESDNUser"] = setOf("SDN.Use", "SDN.Audit")
	a.roles["PVEPoolUser"] = setOf("Pool.Audit")
	a.roles["PVEPoolAdmin"] = setOf("Pool.Allocate", "Pool.Audit")
	a.roles["PVEAuditor"] = setOf("VM.Audit", "Sys.Audit", "Datastore.Audit", "SDN.Audit", "Pool.Audit", "Mapping.Audit")
	if v9 {
		a.roles["PVEAuditor"]["VM.GuestAgent.Audit"] = true
	}
}

func setOf(list ...string) map[string]bool {
	out := map[string]bool{}
	for _, s := range list {
		out[s] = true
	}
	return out
}

// privileges are all that the version knows.
func (a *access) privileges() []string {
	all := append(append(append([]string{}, vmAdmin...), vmUser...), otherPrivs...)
	if a.v9 {
		return append(all, agent9...)
	}
	return append(all, "VM.Monitor")
}

// rolesOn returns the roles of a user or token on a path, with whether they
// propagate from there.
func (a *access) rolesOn(who, path string) map[string]bool {
	got := map[string]bool{}
	prefixes := []string{"/"}
	if path != "/" {
		at := ""
		for _, seg := range strings.Split(strings.Trim(path, "/"), "/") {
			at += "/" + seg
			prefixes = append(prefixes, at)
		}
	}
	for i, p := range prefixes {
		var here map[string]bool
		for _, e := range a.acl {
			if e.path == p && e.who == who && (e.propagate || i == len(prefixes)-1) {
				if here == nil {
					here = map[string]bool{}
				}
				here[e.role] = e.propagate
			}
		}
		if here != nil {
			got = here
		}
	}
	if p, none := got["NoAccess"]; none {
		return map[string]bool{"NoAccess": p}
	}
	return got
}

// privsOf returns the privileges on a path and whether they propagate;
// Node.mu is held.
func (n *Node) privsOf(name, tok, path string) map[string]bool {
	if name == "root@pam" && tok == "" {
		out := map[string]bool{}
		for p := range n.acc.roles["Administrator"] {
			out[p] = true
		}
		return out
	}
	if tok == "" {
		return n.ownPrivs(name, path)
	}
	u := n.acc.users[name]
	if u == nil || u.tokens[tok] == nil {
		return nil
	}
	of := n.privsOf(name, "", path)
	if !u.tokens[tok].privsep {
		return of
	}
	own := n.ownPrivs(name+"!"+tok, path)
	out := map[string]bool{}
	for p, prop := range own {
		if userProp, ok := of[p]; ok {
			out[p] = prop && userProp
		}
	}
	return out
}

func (n *Node) ownPrivs(who, path string) map[string]bool {
	roles := n.acc.rolesOn(who, path)
	if _, none := roles["NoAccess"]; !none {
		for _, p := range n.pools {
			if !p.gives(path) {
				continue
			}
			for r := range n.acc.rolesOn(who, "/pool/"+p.id) {
				if _, has := roles[r]; !has {
					roles[r] = false
				}
			}
		}
	}
	out := map[string]bool{}
	for r, prop := range roles {
		for p := range n.acc.roles[r] {
			out[p] = out[p] || prop
		}
	}
	return out
}

// may reports whether the caller has a privilege on a path.
func (c *call) may(path, priv string) bool {
	c.n.mu.Lock()
	defer c.n.mu.Unlock()
	_, ok := c.n.privsOf(c.user, c.tok, path)[priv]
	return ok
}

// need demands all of the privileges on a path.
func (c *call) need(path string, privs ...string) *Error {
	for _, p := range privs {
		if !c.may(path, p) {
			return denied(path + ", " + p)
		}
	}
	return nil
}

// needAny demands one of them.
func (c *call) needAny(path string, privs ...string) *Error {
	for _, p := range privs {
		if c.may(path, p) {
			return nil
		}
	}
	return denied(path + ", " + strings.Join(privs, "|"))
}

// needVM demands privileges on a VM, or on the pool that it goes into.
func (c *call) needVM(vmid int, pool string, privs ...string) *Error {
	if pool != "" && c.need("/pool/"+pool, privs...) == nil {
		return nil
	}
	return c.need("/vms/"+itoa(vmid), privs...)
}

// User describes a user of the node for tests.
type User struct {
	ID     string // user@realm
	Tokens []Token
}

// Token is an API token.
type Token struct {
	ID      string
	Privsep bool
	Secret  string // "" draws one
}

// AddUser creates a user with its tokens and returns the header values that
// authenticate the tokens: "PVEAPIToken=…".
func (n *Node) AddUser(u User) []string {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.acc.users[u.ID] == nil {
		n.acc.users[u.ID] = &user{enabled: true, tokens: map[string]*token{}}
	}
	var out []string
	for _, t := range u.Tokens {
		if t.Secret == "" {
			t.Secret = newUUID()
		}
		n.acc.users[u.ID].tokens[t.ID] = &token{secret: t.Secret, privsep: t.Privsep}
		out = append(out, "PVEAPIToken="+u.ID+"!"+t.ID+"="+t.Secret)
	}
	return out
}

// RootToken returns the id and the secret of a token of root@pam without
// privilege separation, which it makes.
func (n *Node) RootToken() (id, secret string) {
	h := n.AddUser(User{ID: "root@pam", Tokens: []Token{{ID: "t1"}}})
	id, secret, _ = strings.Cut(strings.TrimPrefix(h[0], "PVEAPIToken="), "=")
	return id, secret
}

// AddRole makes or replaces a role. A privilege that the version does not
// know is an error.
func (n *Node) AddRole(name string, privs ...string) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	known := setOf(n.acc.privileges()...)
	for _, p := range privs {
		if !known[p] {
			return fmt.Errorf("invalid privilege '%s'", p)
		}
	}
	n.acc.roles[name] = setOf(privs...)
	return nil
}

// Grant gives a role to a user or token ("user@realm!token") on a path; it
// propagates.
func (n *Node) Grant(path, who, role string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.acc.acl = append(n.acc.acl, aclEntry{path: path, who: who, role: role, propagate: true})
}

// authenticate finds who sends a request; its error is a reason phrase of
// status 401.
func (n *Node) authenticate(h http.Header) (name, tok, fault string) {
	v := h.Get("Authorization")
	if dec, err := url.PathUnescape(v); err == nil {
		v = dec
	}
	rest, ok := strings.CutPrefix(v, "PVEAPIToken")
	if !ok || rest == "" || (rest[0] != '=' && rest[0] != ' ') {
		return "", "", "No ticket"
	}
	id, secret, ok := strings.Cut(rest[1:], "=")
	if !ok {
		return "", "", "No ticket"
	}
	name, tok, ok = strings.Cut(id, "!")
	if !ok {
		return "", "", "No ticket"
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	u := n.acc.users[name]
	if u == nil || !u.enabled || (u.expire > 0 && u.expire < time.Now().Unix()) {
		return "", "", "Authentication failed!"
	}
	t := u.tokens[tok]
	if t == nil || t.secret != secret || (t.expire > 0 && t.expire < time.Now().Unix()) {
		return "", "", "Authentication failed!"
	}
	return name, tok, ""
}

func newUUID() string {
	b := make([]byte, 16)
	_, _ = rand.Read(b)
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}

// apiPermissions is GET /access/permissions.
func apiPermissions(c *call) (any, *Error) {
	n := c.n
	name, tok := c.user, c.tok
	if of := c.p.str("userid"); of != "" {
		name, tok, _ = strings.Cut(of, "!")
		if of != c.authUser() {
			if err := c.need("/access", "Sys.Audit"); err != nil {
				return nil, err
			}
		}
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	paths := map[string]bool{}
	if p := c.p.str("path"); p != "" {
		paths[p] = true
	} else {
		for _, p := range []string{"/", "/access", "/access/groups", "/nodes", "/pool", "/sdn", "/storage", "/vms"} {
			paths[p] = true
		}
		for _, e := range n.acc.acl {
			paths[e.path] = true
		}
		for _, p := range n.pools {
			for vmid := range p.vms {
				paths["/vms/"+itoa(vmid)] = true
			}
			for s := range p.storages {
				paths["/storage/"+s] = true
			}
		}
	}
	out := map[string]any{}
	for p := range paths {
		privs := n.privsOf(name, tok, p)
		if len(privs) == 0 && c.p.str("path") == "" {
			continue
		}
		m := map[string]any{}
		for k, prop := range privs {
			m[k] = 0
			if prop {
				m[k] = 1
			}
		}
		out[p] = m
	}
	return out, nil
}
