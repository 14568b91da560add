package hostscripts

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
)

// pveState is the part of /etc/pve/user.cfg that matters here.
type pveState struct {
	Version string
	Roles   map[string][]string
	Users   []string
	Tokens  map[string]string   // USER!TOKEN: secret
	Pools   map[string][]string // members
	ACL     []pveACL
	Configs map[string]map[string]any // VMID: configuration
}

type pveACL struct {
	Path      string `json:"path"`
	Type      string `json:"type"`
	UGID      string `json:"ugid"`
	Role      string `json:"roleid"`
	Propagate int    `json:"propagate"`
}

const pveFile = "/etc/pve/state.json"

func loadPVE() (*pveState, error) {
	s := &pveState{}
	text, err := os.ReadFile(pveFile)
	if err == nil {
		err = json.Unmarshal(text, s)
	}
	return s, err
}

func (s *pveState) save() error {
	text, err := json.MarshalIndent(s, "", " ")
	return errors.Join(err, os.WriteFile(pveFile, text, 0o600))
}

// privileges are those of a version: version 9 has split VM.Monitor.
func (s *pveState) privileges() []string {
	all := strings.Fields(`VM.Config.Disk VM.Config.CPU VM.Config.Memory VM.Config.Network VM.Config.HWType VM.Config.Options VM.Allocate VM.Clone
VM.Migrate VM.Snapshot VM.Snapshot.Rollback VM.Config.CDROM VM.Config.Cloudinit VM.Console VM.Backup VM.PowerMgmt VM.Audit Sys.PowerMgmt
Sys.Modify Sys.Incoming Sys.AccessNetwork Sys.Console Sys.Syslog Sys.Audit Datastore.Allocate Datastore.AllocateTemplate
Datastore.AllocateSpace Datastore.Audit SDN.Allocate SDN.Audit SDN.Use Pool.Allocate Pool.Audit Permissions.Modify`)
	if strings.HasPrefix(s.Version, "9") {
		return append(all, "VM.GuestAgent.Audit", "VM.GuestAgent.FileRead", "VM.GuestAgent.FileWrite", "VM.GuestAgent.FileSystemMgmt", "VM.GuestAgent.Unrestricted")
	}
	return append(all, "VM.Monitor")
}

func printJSON(v any) error {
	out, err := json.Marshal(v)
	fmt.Println(string(out))
	return err
}

// options takes --name value pairs, all of which must be known.
func options(args []string, known ...string) (map[string]string, error) {
	out := map[string]string{}
	for len(args) > 0 {
		name, ok := strings.CutPrefix(args[0], "--")
		if !ok || len(args) < 2 || !slices.Contains(known, name) {
			return nil, fmt.Errorf("Unknown option: %s\n400 unable to parse option", args[0])
		}
		out[name], args = args[1], args[2:]
	}
	return out, nil
}

var userID = regexp.MustCompile(`^[^\s:/]+@[A-Za-z][A-Za-z0-9.\-_]+$`)

// pveum is 'pveum' of Proxmox VE 8 and 9: commands, options and refusals.
func pveum(args []string) error {
	s, err := loadPVE()
	if err != nil {
		return err
	}
	if err := s.pveum(args); err != nil || slices.Contains(args, "list") {
		return err
	}
	return s.save()
}

func (s *pveState) pveum(args []string) error {
	if len(args) == 4 && args[1] == "list" && args[2] == "--output-format" && args[3] == "json" {
		return s.list(args[0])
	}
	if is(args, "user", "token", "list", "*", "--output-format", "json") {
		if !slices.Contains(s.Users, args[3]) {
			return fmt.Errorf("no such user ('%s')", args[3])
		}
		out := []map[string]any{}
		for _, id := range slices.Sorted(maps.Keys(s.Tokens)) {
			if user, token, _ := strings.Cut(id, "!"); user == args[3] {
				out = append(out, map[string]any{"tokenid": token, "privsep": 1, "expire": 0})
			}
		}
		return printJSON(out)
	}
	if len(args) >= 5 && args[0] == "user" && args[1] == "token" {
		return s.token(args[2], args[3], args[4], args[5:])
	}
	if len(args) < 3 {
		return unknown(args)
	}
	switch verb, name, rest := args[0]+" "+args[1], args[2], args[3:]; verb {
	case "role add", "role modify", "role delete":
		return s.role(args[1], name, rest)
	case "user add", "user delete":
		return s.user(args[1], name, rest)
	case "pool add", "pool delete":
		return s.pool(args[1], name, rest)
	case "acl modify":
		return s.grant(name, rest)
	}
	return unknown(args)
}

func (s *pveState) list(what string) error {
	switch what {
	case "role":
		out := []map[string]any{{"roleid": "PVETemplateUser", "privs": "VM.Audit,VM.Clone", "special": 1}}
		for name, privs := range s.Roles {
			out = append(out, map[string]any{"roleid": name, "privs": strings.Join(slices.Sorted(slices.Values(privs)), ","), "special": 0})
		}
		return printJSON(out)
	case "user":
		out := []map[string]any{{"userid": "root@pam", "enable": 1, "expire": 0}}
		for _, u := range s.Users {
			out = append(out, map[string]any{"userid": u, "enable": 1, "expire": 0, "comment": "agentlabd"})
		}
		return printJSON(out)
	case "pool":
		out := []map[string]any{}
		for name := range s.Pools {
			out = append(out, map[string]any{"poolid": name})
		}
		return printJSON(out)
	case "acl":
		return printJSON(append([]pveACL{}, s.ACL...))
	}
	return unknown([]string{what, "list"})
}

func (s *pveState) token(verb, user, token string, rest []string) error {
	id := user + "!" + token
	switch verb {
	case "add":
		o, err := options(rest, "privsep", "comment", "expire", "output-format")
		if err != nil {
			return err
		}
		if !slices.Contains(s.Users, user) {
			return fmt.Errorf("no such user ('%s')", user)
		}
		if s.Tokens[id] != "" {
			return errors.New("Token already exists.")
		}
		s.Tokens[id] = fmt.Sprintf("85e95062-0ddf-4253-b7dd-%012d", os.Getpid())
		return printJSON(map[string]any{"full-tokenid": id, "info": map[string]string{"privsep": o["privsep"]}, "value": s.Tokens[id]})
	case "remove":
		if s.Tokens[id] == "" || len(rest) > 0 {
			return fmt.Errorf("no such token '%s' for user '%s'", token, user)
		}
		delete(s.Tokens, id)
		s.ACL = slices.DeleteFunc(s.ACL, func(a pveACL) bool { return a.UGID == id })
		return nil
	}
	return unknown([]string{"user", "token", verb})
}

func (s *pveState) role(verb, name string, rest []string) error {
	o, err := options(rest, "privs", "append")
	if err != nil {
		return err
	}
	_, there := s.Roles[name]
	switch {
	case strings.HasPrefix(strings.ToUpper(name), "PVE"):
		return fmt.Errorf("auto-generated role '%s' cannot be modified", name)
	case verb == "add" && there:
		return fmt.Errorf("create role failed: role '%s' already exists", name)
	case verb != "add" && !there:
		return fmt.Errorf("update role failed: role '%s' does not exist", name)
	case verb == "delete":
		delete(s.Roles, name)
		return nil
	}
	privs := strings.Split(o["privs"], ",")
	for _, p := range privs {
		if !slices.Contains(s.privileges(), p) {
			return fmt.Errorf("create role failed: invalid privilege '%s'", p)
		}
	}
	s.Roles[name] = privs
	return nil
}

func (s *pveState) user(verb, name string, rest []string) error {
	if _, err := options(rest, "comment"); err != nil {
		return err
	}
	there := slices.Contains(s.Users, name)
	switch {
	case !userID.MatchString(name):
		return fmt.Errorf("value '%s' does not look like a valid user name", name)
	case verb == "add" && there:
		return fmt.Errorf("create user failed: user '%s' already exists", name)
	case verb == "add":
		s.Users = append(s.Users, name)
		return nil
	case !there:
		return fmt.Errorf("delete user failed: user '%s' does not exist", name)
	}
	s.Users = slices.DeleteFunc(s.Users, func(u string) bool { return u == name })
	for id := range s.Tokens {
		if strings.HasPrefix(id, name+"!") {
			delete(s.Tokens, id)
		}
	}
	s.ACL = slices.DeleteFunc(s.ACL, func(a pveACL) bool { return a.UGID == name || strings.HasPrefix(a.UGID, name+"!") })
	return nil
}

func (s *pveState) pool(verb, name string, rest []string) error {
	if _, err := options(rest, "comment"); err != nil {
		return err
	}
	members, there := s.Pools[name]
	switch {
	case verb == "add" && there:
		return fmt.Errorf("create pool failed: pool '%s' already exists", name)
	case verb == "add":
		s.Pools[name] = []string{}
		return nil
	case !there:
		return fmt.Errorf("delete pool failed: pool '%s' does not exist", name)
	case len(members) > 0:
		return fmt.Errorf("delete pool failed: pool '%s' is not empty (contains VMs)", name)
	}
	delete(s.Pools, name)
	return nil
}

func (s *pveState) grant(path string, rest []string) error {
	o, err := options(rest, "users", "tokens", "roles", "propagate")
	if err != nil {
		return err
	}
	a := pveACL{Path: path, Type: "user", UGID: o["users"], Role: o["roles"], Propagate: 1}
	if o["tokens"] != "" {
		a.Type, a.UGID = "token", o["tokens"]
		if s.Tokens[a.UGID] == "" {
			return fmt.Errorf("no such API token '%s'", a.UGID)
		}
	} else if !slices.Contains(s.Users, a.UGID) {
		return fmt.Errorf("user '%s' does not exist", a.UGID)
	}
	if _, ok := s.Roles[a.Role]; !ok {
		return fmt.Errorf("role '%s' does not exist", a.Role)
	}
	if !slices.Contains(s.ACL, a) {
		s.ACL = append(s.ACL, a)
	}
	return nil
}

// pvesh is the few calls that scripts make by it.
func pvesh(args []string) error {
	s, err := loadPVE()
	if err != nil {
		return err
	}
	if len(args) != 4 || args[0] != "get" || args[2] != "--output-format" || args[3] != "json" {
		return unknown(args)
	}
	if args[1] == "/version" {
		release, _, _ := strings.Cut(s.Version, ".")
		return printJSON(map[string]string{"release": release + strings.TrimPrefix(s.Version, release), "version": s.Version + ".21", "repoid": "2606ac8511111111"})
	}
	if name, ok := strings.CutPrefix(args[1], "/pools/"); ok && s.Pools[name] != nil {
		members := []map[string]any{}
		for _, id := range s.Pools[name] {
			members = append(members, map[string]any{"vmid": id, "type": "qemu"})
		}
		return printJSON(map[string]any{"poolid": name, "members": members})
	}
	if of, ok := strings.CutPrefix(args[1], "/nodes/localhost/qemu/"); ok {
		id, rest, _ := strings.Cut(of, "/")
		if rest == "config" {
			if c := s.Configs[id]; c != nil {
				return printJSON(c)
			}
			return fmt.Errorf("Configuration file 'nodes/pve/qemu-server/%s.conf' does not exist", id)
		}
	}
	return fmt.Errorf("No '%s' handler defined for '%s'", args[0], args[1])
}
