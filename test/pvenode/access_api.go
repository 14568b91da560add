package pvenode

import (
	"errors"
	"regexp"
	"slices"
	"strings"
)

var (
	userIDRe  = regexp.MustCompile(`^[^\s:/]+@[A-Za-z][A-Za-z0-9.\-_]+$`)
	tokenIDRe = regexp.MustCompile(`^[A-Za-z][A-Za-z0-9.\-_]+$`)
	roleIDRe  = regexp.MustCompile(`^[A-Za-z0-9.\-_]+$`)
	aclPathRe = regexp.MustCompile(`^(/|/access|/access/groups(/[[:alnum:]._-]+)?|/access/realm(/[[:alnum:]._-]+)?|/nodes(/[[:alnum:]._-]+)?` +
		`|/pool(/[A-Za-z0-9._-]+){0,3}|/sdn|/sdn/zones(/[[:alnum:]._-]+){0,2}|/storage(/[[:alnum:]._-]+)?|/vms(/[1-9][0-9]{2,})?` +
		`|/mapping(/[[:alnum:]._-]+){0,2})$`)
)

func formatUserID(_ *Node, s string) string {
	if !userIDRe.MatchString(s) {
		return "value '" + s + "' does not look like a valid user name\n"
	}
	return ""
}

func formatRoleID(_ *Node, s string) string {
	if !roleIDRe.MatchString(s) {
		return "role name '" + s + "' contains invalid characters\n"
	}
	return ""
}

func formatPrivs(n *Node, s string) string {
	known := setOf(n.acc.privileges()...)
	for _, p := range splitList(s) {
		if !known[p] {
			return "invalid privilege '" + p + "'\n"
		}
	}
	return ""
}

var (
	pUser     = param{name: "userid", need: true, format: formatUserID, maxLen: 64}
	pToken    = param{name: "tokenid", need: true, pattern: tokenIDRe}
	pRole     = param{name: "roleid", need: true, format: formatRoleID}
	pComment  = param{name: "comment"}
	pExpire   = param{name: "expire", kind: kInt, min: f64(0)}
	pPrivsep  = param{name: "privsep", kind: kBool}
	pPrivs    = param{name: "privs", format: formatPrivs}
	tokenInfo = []param{pUser, pToken, pComment, pExpire, pPrivsep}
)

func userModify(c *call) *Error { return c.need("/access/groups", "User.Modify") }

// specialRole reports whether a role comes with the node.
func specialRole(name string) bool {
	return name == "NoAccess" || name == "Administrator" || strings.HasPrefix(name, "PVE")
}

// mayModify reports whether the caller may change access rights on a path.
func (c *call) mayModify(path string) bool {
	own := map[string]string{"/vms/": "VM.Allocate", "/storage/": "Datastore.Allocate", "/pool/": "Pool.Allocate"}
	for prefix, priv := range own {
		if strings.HasPrefix(path, prefix) && c.may(path, priv) {
			return true
		}
	}
	return c.may(path, "Permissions.Modify")
}

// forget removes the entries of a user or a token; mu is held.
func (a *access) forget(who string) {
	a.acl = slices.DeleteFunc(a.acl, func(e aclEntry) bool { return e.who == who })
}

// take removes one entry; mu is held.
func (a *access) take(path, who, role string) {
	a.acl = slices.DeleteFunc(a.acl, func(e aclEntry) bool { return e.path == path && e.who == who && e.role == role })
}

func ownToken(c *call) *Error {
	if c.tok == "" && c.p.str("userid") == c.user {
		return nil
	}
	return userModify(c)
}

func roleModify(c *call) *Error { return c.need("/access", "Sys.Modify") }

var accessTable = []endpoint{
	{method: "GET", path: "/access/users", params: []param{{name: "enabled", kind: kBool}, {name: "full", kind: kBool}}, run: apiUsers},
	{method: "POST", path: "/access/users", perm: userModify, run: apiUserAdd, params: []param{pUser, pComment, pExpire,
		{name: "enable", kind: kBool}, {name: "email"}, {name: "firstname"}, {name: "lastname"}, {name: "groups"}, {name: "keys"},
		{name: "password", minLen: 5, maxLen: 64}}},
	{method: "PUT", path: "/access/users/{userid}", perm: userModify, run: apiUserSet, params: []param{pUser, pComment, pExpire,
		{name: "enable", kind: kBool}, {name: "append", kind: kBool}, {name: "email"}, {name: "firstname"}, {name: "lastname"},
		{name: "groups"}, {name: "keys"}}},
	{method: "DELETE", path: "/access/users/{userid}", perm: userModify, run: apiUserDelete, params: []param{pUser}},
	{method: "GET", path: "/access/users/{userid}/token", perm: ownToken, run: apiTokens, params: []param{pUser}},
	{method: "GET", path: "/access/users/{userid}/token/{tokenid}", perm: ownToken, run: apiTokenRead, params: []param{pUser, pToken}},
	{method: "POST", path: "/access/users/{userid}/token/{tokenid}", perm: ownToken, run: apiTokenAdd, params: tokenInfo},
	{method: "PUT", path: "/access/users/{userid}/token/{tokenid}", perm: ownToken, run: apiTokenSet, params: append(
		[]param{{name: "regenerate", kind: kBool, only9: true}, {name: "delete", only9: true}}, tokenInfo...)},
	{method: "DELETE", path: "/access/users/{userid}/token/{tokenid}", perm: ownToken, run: apiTokenDelete, params: []param{pUser, pToken}},
	{method: "GET", path: "/access/roles", run: apiRoles},
	{method: "POST", path: "/access/roles", perm: roleModify, run: apiRoleAdd, params: []param{pRole, pPrivs}},
	{method: "GET", path: "/access/roles/{roleid}", run: apiRoleRead, params: []param{pRole}},
	{method: "PUT", path: "/access/roles/{roleid}", perm: roleModify, run: apiRoleSet, params: []param{pRole, pPrivs, {name: "append", kind: kBool}}},
	{method: "DELETE", path: "/access/roles/{roleid}", perm: roleModify, run: apiRoleDelete, params: []param{pRole}},
	{method: "GET", path: "/access/acl", run: apiACL},
	{method: "PUT", path: "/access/acl", run: apiACLSet, params: []param{
		{name: "path", need: true}, {name: "roles", need: true}, {name: "users"}, {name: "groups"}, {name: "tokens"},
		{name: "propagate", kind: kBool}, {name: "delete", kind: kBool}}},
}

func bit(b bool) int {
	if b {
		return 1
	}
	return 0
}

func (u *user) entry() map[string]any {
	e := map[string]any{"enable": bit(u.enabled), "expire": u.expire}
	if u.comment != "" {
		e["comment"] = u.comment
	}
	return e
}

func (t *token) entry() map[string]any {
	e := map[string]any{"privsep": bit(t.privsep), "expire": t.expire}
	if t.comment != "" {
		e["comment"] = t.comment
	}
	return e
}

func apiUsers(c *call) (any, *Error) {
	all := c.may("/access/groups", "User.Modify") || c.may("/access/groups", "Sys.Audit")
	c.n.mu.Lock()
	defer c.n.mu.Unlock()
	out := []map[string]any{}
	for _, id := range sortedKeys(c.n.acc.users) {
		u := c.n.acc.users[id]
		if (!all && id != c.user) || (c.p.has("enabled") && c.p.yes("enabled") != u.enabled) {
			continue
		}
		e := u.entry()
		e["userid"] = id
		e["realm-type"] = id[strings.LastIndex(id, "@")+1:]
		if c.p.yes("full") && len(u.tokens) > 0 {
			tokens := []map[string]any{}
			for _, name := range sortedKeys(u.tokens) {
				t := u.tokens[name].entry()
				t["tokenid"] = name
				tokens = append(tokens, t)
			}
			e["tokens"], e["groups"] = tokens, ""
		}
		out = append(out, e)
	}
	return out, nil
}

func apiUserAdd(c *call) (any, *Error) {
	c.n.mu.Lock()
	defer c.n.mu.Unlock()
	id := c.p.str("userid")
	if c.n.acc.users[id] != nil {
		return nil, dief("create user failed: user '%s' already exists", id).exit(2)
	}
	if realm := id[strings.LastIndex(id, "@")+1:]; realm != "pve" && realm != "pam" {
		return nil, dief("create user failed: domain '%s' does not exist", realm)
	}
	c.n.acc.users[id] = &user{
		enabled: !c.p.has("enable") || c.p.yes("enable"), expire: int64(c.p.num("expire")),
		comment: c.p.str("comment"), tokens: map[string]*token{},
	}
	return nil, nil
}

// userNamed is the user that a call names; mu is held.
func (c *call) userNamed() (*user, *Error) {
	id := c.p.str("userid")
	if u := c.n.acc.users[id]; u != nil {
		return u, nil
	}
	return nil, dief("no such user ('%s')", id)
}

func (c *call) tokenNamed() (*token, *Error) {
	u, err := c.userNamed()
	if err != nil {
		return nil, err
	}
	if t := u.tokens[c.p.str("tokenid")]; t != nil {
		return t, nil
	}
	return nil, dief("no such token '%s' for user '%s'", c.p.str("tokenid"), c.p.str("userid"))
}

func apiUserSet(c *call) (any, *Error) {
	c.n.mu.Lock()
	defer c.n.mu.Unlock()
	u, err := c.userNamed()
	if err != nil {
		return nil, dief("update user failed: %s", err.Message)
	}
	if c.p.has("enable") {
		u.enabled = c.p.yes("enable")
	}
	if c.p.has("expire") {
		u.expire = int64(c.p.num("expire"))
	}
	if c.p.has("comment") {
		u.comment = c.p.str("comment")
	}
	return nil, nil
}

func apiUserDelete(c *call) (any, *Error) {
	c.n.mu.Lock()
	defer c.n.mu.Unlock()
	id := c.p.str("userid")
	u := c.n.acc.users[id]
	switch {
	case u == nil:
		return nil, dief("delete user failed: user '%s' does not exist", id)
	case id == "root@pam":
		return nil, dief("delete user failed: unable to delete '%s'", id)
	}
	for name := range u.tokens {
		c.n.acc.forget(id + "!" + name)
	}
	c.n.acc.forget(id)
	delete(c.n.acc.users, id)
	return nil, nil
}

func apiTokens(c *call) (any, *Error) {
	c.n.mu.Lock()
	defer c.n.mu.Unlock()
	u, err := c.userNamed()
	if err != nil {
		return nil, err
	}
	out := []map[string]any{}
	for _, name := range sortedKeys(u.tokens) {
		e := u.tokens[name].entry()
		e["tokenid"] = name
		out = append(out, e)
	}
	return out, nil
}

func apiTokenRead(c *call) (any, *Error) {
	c.n.mu.Lock()
	defer c.n.mu.Unlock()
	t, err := c.tokenNamed()
	if err != nil {
		return nil, err
	}
	return t.entry(), nil
}

func apiTokenAdd(c *call) (any, *Error) {
	c.n.mu.Lock()
	defer c.n.mu.Unlock()
	u, err := c.userNamed()
	if err != nil {
		return nil, err
	}
	name := c.p.str("tokenid")
	if u.tokens[name] != nil {
		return nil, badParam("tokenid", "Token already exists.")
	}
	t := &token{secret: newUUID(), privsep: !c.p.has("privsep") || c.p.yes("privsep"), expire: int64(c.p.num("expire")), comment: c.p.str("comment")}
	u.tokens[name] = t
	// What is answered is what was given, as the string that it was given as.
	info := map[string]any{"privsep": "1"}
	if c.p.has("privsep") {
		info["privsep"] = c.p.str("privsep")
	}
	for _, k := range []string{"expire", "comment"} {
		if c.p.str(k) != "" {
			info[k] = c.p.str(k)
		}
	}
	return map[string]any{"full-tokenid": c.p.str("userid") + "!" + name, "info": info, "value": t.secret}, nil
}

func apiTokenSet(c *call) (any, *Error) {
	c.n.mu.Lock()
	defer c.n.mu.Unlock()
	t, err := c.tokenNamed()
	if err != nil {
		return nil, err
	}
	if c.p.has("privsep") {
		t.privsep = c.p.yes("privsep")
	}
	if c.p.has("expire") {
		t.expire = int64(c.p.num("expire"))
	}
	if c.p.str("comment") != "" {
		t.comment = c.p.str("comment")
	}
	out := t.entry()
	if c.p.yes("regenerate") {
		t.secret = newUUID()
		out["value"], out["full-tokenid"] = t.secret, c.p.str("userid")+"!"+c.p.str("tokenid")
	}
	return out, nil
}

func apiTokenDelete(c *call) (any, *Error) {
	c.n.mu.Lock()
	defer c.n.mu.Unlock()
	if _, err := c.tokenNamed(); err != nil {
		return nil, err
	}
	id, name := c.p.str("userid"), c.p.str("tokenid")
	delete(c.n.acc.users[id].tokens, name)
	c.n.acc.forget(id + "!" + name) // its rights go with it
	return nil, nil
}

func apiRoles(c *call) (any, *Error) {
	c.n.mu.Lock()
	defer c.n.mu.Unlock()
	out := []map[string]any{}
	for _, id := range sortedKeys(c.n.acc.roles) {
		out = append(out, map[string]any{
			"roleid": id, "privs": strings.Join(sortedKeys(c.n.acc.roles[id]), ","), "special": bit(specialRole(id)),
		})
	}
	return out, nil
}

func apiRoleRead(c *call) (any, *Error) {
	c.n.mu.Lock()
	defer c.n.mu.Unlock()
	privs, ok := c.n.acc.roles[c.p.str("roleid")]
	if !ok {
		return nil, dief("role '%s' does not exist", c.p.str("roleid"))
	}
	out := map[string]any{}
	for p := range privs {
		out[p] = 1
	}
	return out, nil
}

func apiRoleAdd(c *call) (any, *Error) {
	id := c.p.str("roleid")
	if strings.HasPrefix(strings.ToUpper(id), "PVE") {
		return nil, badParam("roleid", "cannot use role ID starting with the (case-insensitive) 'PVE' namespace")
	}
	c.n.mu.Lock()
	defer c.n.mu.Unlock()
	if c.n.acc.roles[id] != nil {
		return nil, dief("create role failed: role '%s' already exists", id).exit(2)
	}
	set := map[string]bool{}
	for _, p := range c.p.list("privs") {
		set[p] = true
	}
	c.n.acc.roles[id] = set
	return nil, nil
}

func apiRoleSet(c *call) (any, *Error) {
	id := c.p.str("roleid")
	if specialRole(id) {
		return nil, dief("auto-generated role '%s' cannot be modified", id)
	}
	c.n.mu.Lock()
	defer c.n.mu.Unlock()
	set, ok := c.n.acc.roles[id]
	switch {
	case !ok:
		return nil, dief("update role failed: role '%s' does not exist", id)
	case c.p.yes("append") && !c.p.has("privs"):
		return nil, badParam("append", "missing property - 'append' requires this property: privs")
	case !c.p.yes("append"):
		set = map[string]bool{}
	}
	for _, p := range c.p.list("privs") {
		set[p] = true
	}
	c.n.acc.roles[id] = set
	return nil, nil
}

func apiRoleDelete(c *call) (any, *Error) {
	id := c.p.str("roleid")
	if specialRole(id) {
		return nil, dief("auto-generated role '%s' cannot be deleted", id)
	}
	c.n.mu.Lock()
	defer c.n.mu.Unlock()
	if c.n.acc.roles[id] == nil {
		return nil, dief("delete role failed: role '%s' does not exist", id)
	}
	delete(c.n.acc.roles, id)
	// An unknown role is dropped when the file is next read.
	c.n.acc.acl = slices.DeleteFunc(c.n.acc.acl, func(e aclEntry) bool { return e.role == id })
	return nil, nil
}

func apiACL(c *call) (any, *Error) {
	audit := c.may("/access", "Sys.Audit")
	c.n.mu.Lock()
	entries := slices.Clone(c.n.acc.acl)
	c.n.mu.Unlock()
	slices.SortStableFunc(entries, func(a, b aclEntry) int { return strings.Compare(a.path, b.path) })
	out := []map[string]any{}
	for _, e := range entries {
		if !audit && !c.mayModify(e.path) {
			continue
		}
		kind := "user"
		if strings.Contains(e.who, "!") {
			kind = "token"
		}
		out = append(out, map[string]any{"path": e.path, "type": kind, "ugid": e.who, "roleid": e.role, "propagate": bit(e.propagate)})
	}
	return out, nil
}

func apiACLSet(c *call) (any, *Error) {
	path := "/" + strings.Trim(c.p.str("path"), "/")
	if !c.mayModify(path) {
		return nil, denied(path + ", Permissions.Modify")
	}
	if !c.p.has("users") && !c.p.has("groups") && !c.p.has("tokens") {
		text := "either 'users', 'groups' or 'tokens' is required."
		return nil, &Error{Status: 400, Message: "Parameter verification failed.", Params: map[string]string{"users": text, "groups": text, "tokens": text}}
	}
	if !c.p.yes("delete") && !aclPathRe.MatchString(path) {
		return nil, badParam("path", "invalid ACL path '"+c.p.str("path")+"'")
	}
	c.n.mu.Lock()
	defer c.n.mu.Unlock()
	a := &c.n.acc
	for _, role := range c.p.list("roles") {
		if a.roles[role] == nil {
			return nil, dief("ACL update failed: role '%s' does not exist", role)
		}
		if g := c.p.list("groups"); len(g) > 0 {
			return nil, dief("ACL update failed: group '%s' does not exist", g[0])
		}
		who, err := c.grantees()
		if err != nil {
			return nil, dief("ACL update failed: %v", err)
		}
		for _, w := range who {
			a.take(path, w, role)
			if !c.p.yes("delete") {
				a.acl = append(a.acl, aclEntry{path, w, role, !c.p.has("propagate") || c.p.yes("propagate")})
			}
		}
	}
	return nil, nil
}

// grantees are the users and tokens that a call names; mu is held.
func (c *call) grantees() ([]string, error) {
	users := c.p.list("users")
	for _, u := range users {
		if c.n.acc.users[u] == nil {
			return nil, errors.New("user '" + u + "' does not exist")
		}
	}
	tokens := c.p.list("tokens")
	for _, id := range tokens {
		name, tok, _ := strings.Cut(id, "!")
		switch u := c.n.acc.users[name]; {
		case u == nil:
			return nil, errors.New("no such user ('" + name + "')")
		case u.tokens[tok] == nil:
			return nil, errors.New("no such token '" + tok + "' for user '" + name + "'")
		}
	}
	return append(users, tokens...), nil
}
