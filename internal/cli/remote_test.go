package cli

import (
	"encoding/base64"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
)

// TestRemoteEnvironment checks that each variable for the connection to a
// daemon is read, and that an invalid value is rejected before anything is
// sent.
func TestRemoteEnvironment(t *testing.T) {
	dir := t.TempDir()
	file := func(name, text string, mode os.FileMode) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), mode); err != nil {
			t.Fatal(err)
		}
		return path
	}
	good := file("good", "agentlab_token\n", 0o600)
	open := file("open", "agentlab_token\n", 0o644)
	empty := file("empty", "\n", 0o600)
	huge := file("huge", strings.Repeat("x", maxTokenFileBytes+1), 0o600)
	noCA := file("ca", "no certificate", 0o644)
	pin := "sha256/" + base64.StdEncoding.EncodeToString(make([]byte, 32))
	for name, c := range map[string]struct {
		env  map[string]string
		flag string // --token-file
		want agentlab.Code
	}{
		"token":              {env: map[string]string{"AGENTLAB_TOKEN": "t"}},
		"file":               {env: map[string]string{"AGENTLAB_TOKEN_FILE": good}},
		"flag":               {flag: good},
		"flag before token":  {env: map[string]string{"AGENTLAB_TOKEN": "t"}, flag: open, want: agentlab.CodeDenied},
		"token before file":  {env: map[string]string{"AGENTLAB_TOKEN": "t", "AGENTLAB_TOKEN_FILE": open}},
		"nothing":            {want: agentlab.CodeInvalid},
		"others can read it": {env: map[string]string{"AGENTLAB_TOKEN_FILE": open}, want: agentlab.CodeDenied},
		"empty":              {flag: empty, want: agentlab.CodeInvalid},
		"huge":               {flag: huge, want: agentlab.CodeInvalid},
		"gone":               {flag: filepath.Join(dir, "none"), want: agentlab.CodeInvalid},
		"a folder":           {flag: dir, want: agentlab.CodeDenied},
		"pin":                {env: map[string]string{"AGENTLAB_TOKEN": "t", "AGENTLAB_PIN": pin}},
		"bad pin":            {env: map[string]string{"AGENTLAB_TOKEN": "t", "AGENTLAB_PIN": "x"}, want: agentlab.CodeInvalid},
		"bad authorities":    {env: map[string]string{"AGENTLAB_TOKEN": "t", "AGENTLAB_CA_FILE": noCA}, want: agentlab.CodeInvalid},
		"no authorities":     {env: map[string]string{"AGENTLAB_TOKEN": "t", "AGENTLAB_CA_FILE": noCA + "x"}, want: agentlab.CodeInvalid},
	} {
		t.Run(name, func(t *testing.T) {
			for _, v := range []string{"AGENTLAB_TOKEN", "AGENTLAB_TOKEN_FILE", "AGENTLAB_PIN", "AGENTLAB_CA_FILE"} {
				t.Setenv(v, c.env[v])
			}
			if _, err := (&App{TokenFile: c.flag}).remote("https://lab.example:8843"); agentlab.CodeOf(err) != c.want {
				t.Errorf("got %v", err)
			}
		})
	}
}

// TestSameDaemon checks that another run of this program gets the address of
// the daemon, and never the token.
func TestSameDaemon(t *testing.T) {
	t.Setenv("AGENTLAB_HOST", "https://lab.example:8843")
	t.Setenv("AGENTLAB_TOKEN", "agentlab_secret")
	words, err := (&App{}).DaemonFlags()
	if got := strings.Join(words, " "); err != nil || got != "--host https://lab.example:8843" {
		t.Errorf("%q, %v", got, err)
	}
	words, err = (&App{Host: "https://other", TokenFile: "rel/token"}).DaemonFlags()
	wd, _ := os.Getwd()
	if got := strings.Join(words, " "); err != nil || got != "--host https://other --token-file "+filepath.Join(wd, "rel/token") {
		t.Errorf("%q, %v", got, err)
	}
	words, err = (&App{Socket: "/run/a.sock"}).DaemonFlags()
	if got := strings.Join(words, " "); err != nil || got != "--socket /run/a.sock" {
		t.Errorf("%q, %v", got, err)
	}
}
