package hostscripts

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab/internal/backend/proxmox/pve"
)

// pveNode is a node of Proxmox VE with two templates.
func pveNode(t *testing.T, version string) *host {
	h := newHost(t, "pveum", "pvesh")
	h.savePVE(&pveState{
		Version: version, Roles: map[string][]string{"Admins": {"VM.Audit"}}, Users: []string{"joe@pve"}, Tokens: map[string]string{}, Pools: map[string][]string{"other": {"100"}},
		ACL:     []pveACL{{Path: "/", Type: "user", UGID: "joe@pve", Role: "Admins", Propagate: 1}},
		Configs: map[string]map[string]any{"9000": {"name": "tmpl", "scsi0": "local-zfs:base-9000-disk-0,size=4G", "net0": "virtio=BC:24:11:00:00:01,bridge=vmbr1"}},
	})
	return h
}

func (h *host) savePVE(s *pveState) {
	h.Helper()
	text, err := json.Marshal(s)
	if err != nil {
		h.Fatal(err)
	}
	h.write(pveFile, string(text))
}

func (h *host) pve() *pveState {
	h.Helper()
	s := &pveState{}
	if err := json.Unmarshal([]byte(h.read(pveFile)), s); err != nil {
		h.Fatal(err)
	}
	return s
}

// has reports whether a user or token has a privilege on a path by the entries
// of that path.
func (s *pveState) has(who, path, privilege string) bool {
	return slices.ContainsFunc(s.ACL, func(a pveACL) bool {
		return a.UGID == who && a.Path == path && slices.Contains(s.Roles[a.Role], privilege)
	})
}

// The token can do all that the driver's preflight asks for, on both versions,
// and as little more as there is.
func TestToken(t *testing.T) {
	const secretFile = "/etc/agentlab/proxmox.token"
	for _, version := range []string{"8.4", "9.2"} {
		t.Run(version, func(t *testing.T) {
			h := pveNode(t, version)
			h.savePVE(h.pve())
			before := h.pve()
			if r := h.script("create_api_token.sh"); r.code != 0 {
				t.Fatalf("%+v", r)
			}
			dry := h.pve()
			if len(dry.Roles) != len(before.Roles) || len(dry.Users) != 1 || len(dry.Tokens) > 0 || len(dry.ACL) != 1 || h.has(secretFile) {
				t.Errorf("changed without --apply: %+v", dry)
			}
			r := h.script("create_api_token.sh", "--node", "pve", "--apply")
			if r.code != 0 {
				t.Fatalf("%+v", r)
			}
			s := h.pve()
			secret := s.Tokens["agentlab@pve!ctl"]
			if secret == "" || h.read(secretFile) != secret+"\n" {
				t.Fatalf("the secret is not kept: %q", h.read(secretFile))
			}
			if info, err := os.Stat(filepath.Join(h.dir, secretFile)); err != nil || info.Mode().Perm() != 0o600 {
				t.Errorf("%v %v", info.Mode(), err)
			}
			if strings.Contains(r.stdout+r.stderr, secret) {
				t.Error("the secret is printed")
			}
			h.settled("create_api_token.sh", "--node", "pve")

			v := pve.Version{Major: 8, Minor: 4}
			if version == "9.2" {
				v = pve.Version{Major: 9, Minor: 2}
			}
			needs := pve.Needs{
				TokenID: "agentlab@pve!ctl", Nodes: []string{"pve"}, Templates: []int{9000, 9001}, Pool: "agentlab", Storages: []string{"local-zfs"},
				Bridges: []string{"vmbr1"}, FreeMemory: true,
			}
			wanted := map[string][]string{}
			for _, g := range needs.Grants(v) {
				wanted[g.Path] = append(wanted[g.Path], g.Privileges...)
				for _, p := range g.Privileges {
					for _, who := range []string{"agentlab@pve", "agentlab@pve!ctl"} {
						if !s.has(who, g.Path, p) {
							t.Errorf("%s lacks %s on %s", who, p, g.Path)
						}
					}
				}
			}
			for _, a := range s.ACL {
				if a.UGID == "joe@pve" {
					continue
				}
				for _, p := range s.Roles[a.Role] {
					if !slices.Contains(wanted[a.Path], p) {
						t.Errorf("%s has %s on %s, which nothing needs", a.UGID, p, a.Path)
					}
				}
			}

			// The role was changed, and lacks a privilege.
			s.Roles["AgentLabSandbox"] = []string{"VM.Audit", "VM.Console"}
			s.ACL = slices.DeleteFunc(s.ACL, func(a pveACL) bool { return a.Path == "/vms/9000" && a.Type == "token" })
			h.savePVE(s)
			if got := h.script("create_api_token.sh", "--node", "pve", "--apply").commands(); len(got) != 2 || !strings.HasPrefix(got[0], "pveum role modify AgentLabSandbox ") || got[1] != "pveum acl modify /vms/9000 --tokens agentlab@pve!ctl --roles AgentLabTemplate" {
				t.Errorf("%q", got)
			}

			// A lost secret is created again only on request.
			h.ok("rm", secretFile)
			if r := h.script("create_api_token.sh", "--node", "pve", "--apply"); r.code != 1 || !strings.Contains(r.stderr, "--rotate") {
				t.Errorf("%+v", r)
			}
			if r := h.script("create_api_token.sh", "--node", "pve", "--rotate", "--show", "--apply"); r.code != 0 || !strings.Contains(r.stdout, h.pve().Tokens["agentlab@pve!ctl"]) || h.pve().Tokens["agentlab@pve!ctl"] == secret {
				t.Errorf("%+v", r)
			}
			h.settled("create_api_token.sh", "--node", "pve")

			// A sandbox is left in the pool.
			s = h.pve()
			s.Pools["agentlab"] = []string{"1000"}
			h.savePVE(s)
			if r := h.script("create_api_token.sh", "--remove", "--apply"); r.code != 0 || !strings.Contains(r.stderr, "not empty") {
				t.Errorf("%+v", r)
			}
			s = h.pve()
			s.Pools["agentlab"] = []string{}
			h.savePVE(s)
			if r := h.script("create_api_token.sh", "--remove", "--apply"); r.code != 0 {
				t.Errorf("%+v", r)
			}
			after := h.pve()
			if len(after.Roles) != 1 || !slices.Equal(after.Users, []string{"joe@pve"}) || len(after.Tokens) > 0 || len(after.Pools) != 1 || len(after.ACL) != 1 || h.has(secretFile) {
				t.Errorf("left: %+v", after)
			}
		})
	}
}

func TestTokenRefused(t *testing.T) {
	h := pveNode(t, "7.4")
	for _, tc := range []struct {
		want string
		code int
		args []string
	}{
		{"version '7'", 1, nil},
		{"realm pve", 2, []string{"--user", "root@pam"}},
		{"not a VMID", 2, []string{"--template", "9000;reboot"}},
		{"not a valid name", 2, []string{"--pool", "a/b c"}},
		{"absolute", 2, []string{"--out", "token"}},
		{"needs a value", 2, []string{"--storage"}},
	} {
		if r := h.script(append([]string{"create_api_token.sh"}, tc.args...)...); r.code != tc.code || !strings.Contains(r.stderr, tc.want) {
			t.Errorf("%q: %+v", tc.args, r)
		}
	}
	s := h.pve()
	s.Version, s.Configs = "8.4", nil
	h.savePVE(s)
	if r := h.script("create_api_token.sh"); r.code != 1 || !strings.Contains(r.stderr, "cannot determine the storage of template 9000") {
		t.Errorf("%+v", r)
	}
	h.applied("create_api_token.sh", "--storage", "local-zfs", "--out", "/root/token")
}
