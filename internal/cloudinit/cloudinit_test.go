package cloudinit

import (
	"bytes"
	"encoding/base64"
	"io/fs"
	"maps"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/goccy/go-yaml"
	"pgregory.net/rapid"

	"github.com/agentlab-vm/agentlab"
)

const testKey = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIBdEDKlEZqHUWrL9MGzjnqWmnSKdZnJWRyvMNDM4xRUd"

func TestUserData(t *testing.T) {
	got, err := UserData(Seed{
		Hostname: "box-1", SSHKeys: []string{testKey + " me@example.com"},
		Files: []File{{Path: "/etc/agentlab/control.json", Content: []byte("{}\n")}},
	})
	if err != nil {
		t.Fatal(err)
	}
	want := `#cloud-config
{
  "hostname": "box-1",
  "manage_etc_hosts": true,
  "user": {
    "name": "agent"
  },
  "ssh_authorized_keys": [
    "` + testKey + `"
  ],
  "ssh_pwauth": false,
  "package_update": false,
  "package_upgrade": false,
  "write_files": [
    {
      "path": "/etc/agentlab/control.json",
      "owner": "root:root",
      "permissions": "0644",
      "encoding": "b64",
      "content": "e30K"
    }
  ]
}
`
	if string(got) != want {
		t.Errorf("got:\n%s\nwant:\n%s", got, want)
	}
}

func TestUserDataRefuses(t *testing.T) {
	for name, s := range map[string]Seed{
		"hostname":   {Hostname: "a b"},
		"no name":    {},
		"user":       {Hostname: "box", User: "agent\nroot"},
		"root":       {Hostname: "box", User: "root"},
		"options":    {Hostname: "box", SSHKeys: []string{`command="reboot" ` + testKey}},
		"two lines":  {Hostname: "box", SSHKeys: []string{testKey + "\n" + testKey}},
		"other type": {Hostname: "box", SSHKeys: []string{strings.Replace(testKey, "ssh-ed25519", "ssh-rsa", 1)}},
		"no base64":  {Hostname: "box", SSHKeys: []string{"ssh-ed25519 AAAA\"]"}},
		"relative":   {Hostname: "box", Files: []File{{Path: "etc/x"}}},
		"dots":       {Hostname: "box", Files: []File{{Path: "/etc/../x"}}},
		"quote":      {Hostname: "box", Files: []File{{Path: `/etc/x"`}}},
		"setuid":     {Hostname: "box", Files: []File{{Path: "/x", Mode: fs.ModeSetuid | 0o755}}},
		"too large":  {Hostname: "box", Files: []File{{Path: "/x", Content: make([]byte, MaxSize)}}},
	} {
		t.Run(name, func(t *testing.T) {
			if out, err := UserData(s); agentlab.CodeOf(err) != agentlab.CodeInvalid {
				t.Errorf("got %v:\n%s", err, out)
			}
		})
	}
}

// With any values, cloud-init reads exactly what was requested.
func TestUserDataHasNothingElse(t *testing.T) {
	keys := []string{"hostname", "manage_etc_hosts", "package_update", "package_upgrade", "ssh_authorized_keys", "ssh_pwauth", "user", "write_files"}
	text := rapid.OneOf(rapid.String(), rapid.StringMatching(`[a-z0-9]{1,12}`), rapid.StringMatching(`[a-z0-9:"'\n#{}\[\]%*&!|>-]{1,12}`),
		rapid.Just(testKey), rapid.StringMatching(`/[a-z/.]{1,10}`))
	rapid.Check(t, func(t *rapid.T) {
		s := Seed{
			Hostname: text.Draw(t, "hostname"), User: text.Draw(t, "user"), SSHKeys: rapid.SliceOfN(text, 0, 3).Draw(t, "keys"),
			Files: rapid.SliceOfN(rapid.Custom(func(t *rapid.T) File {
				return File{text.Draw(t, "path"), fs.FileMode(rapid.Uint32Range(0, 0o777).Draw(t, "mode")), rapid.SliceOf(rapid.Byte()).Draw(t, "content")}
			}), 0, 3).Draw(t, "files"),
		}
		out, err := UserData(s)
		if err != nil {
			return
		}
		if bytes.ContainsFunc(out, func(r rune) bool { return r != '\n' && (r < ' ' || r > '~') || r == '\\' }) {
			t.Fatalf("an escape, or what would need one:\n%s", out)
		}
		var doc map[string]any
		if err := yaml.Unmarshal(out, &doc); err != nil {
			t.Fatalf("%v:\n%s", err, out)
		}
		for _, k := range slices.Collect(maps.Keys(doc)) {
			if !slices.Contains(keys, k) {
				t.Fatalf("a key %q:\n%s", k, out)
			}
		}
		if doc["hostname"] != s.Hostname {
			t.Fatalf("hostname %v, asked %q", doc["hostname"], s.Hostname)
		}
		files, _ := doc["write_files"].([]any)
		if len(files) != len(s.Files) {
			t.Fatalf("%d files, asked %d", len(files), len(s.Files))
		}
		for i, f := range files {
			m, _ := f.(map[string]any)
			text, _ := m["content"].(string)
			content, err := base64.StdEncoding.DecodeString(text)
			if err != nil || !bytes.Equal(content, s.Files[i].Content) || m["path"] != s.Files[i].Path {
				t.Fatalf("file %d: %v", i, m)
			}
		}
	})
}

// What cloud-init reads with is not our YAML library.
func TestUserDataInPython(t *testing.T) {
	python, err := exec.LookPath("python3")
	if err != nil || exec.Command(python, "-c", "import yaml").Run() != nil {
		t.Skip("python3 with yaml is not on this machine; the real cloud-init reads it in test/cloudimage")
	}
	out, err := UserData(Seed{Hostname: "box-1", SSHKeys: []string{testKey}, Files: []File{{Path: "/etc/x", Content: []byte("a: b\n")}}})
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(python, "-c", "import sys,yaml; d=yaml.safe_load(sys.stdin); print(d['hostname'], d['write_files'][0]['path'], len(d))")
	cmd.Stdin = bytes.NewReader(out)
	got, err := cmd.Output()
	if err != nil || string(got) != "box-1 /etc/x 8\n" {
		t.Errorf("%q %v", got, err)
	}
}
