package runner

import (
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab/guestapi"
)

// Package managers get the cache as their default, once, and a setting of the user
// stays.
func TestUseCache(t *testing.T) {
	home := t.TempDir()
	read := func(name string) string {
		text, err := os.ReadFile(filepath.Join(home, name))
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	if err := os.WriteFile(filepath.Join(home, ".npmrc"), []byte("@corp:registry=https://npm.corp/"), 0o600); err != nil {
		t.Fatal(err)
	}
	r := &Runner{cfg: Config{Home: home}, dir: dir(t.TempDir()), log: slog.New(slog.DiscardHandler), api: newAPI("http://10.77.0.1:8844", Timing{})}
	r.useCache(t.Context()) // there is none
	r.resp.Cache = &guestapi.RegistryCache{URL: "http://10.77.0.1:8844", Kinds: []string{"npm", "go", "pypi", "a newer one"}}
	for range 2 {
		r.useCache(t.Context())
	}
	for name, want := range map[string]string{
		".npmrc":               "@corp:registry=https://npm.corp/\nregistry=http://10.77.0.1:8844/cache/npm/\n",
		".config/go/env":       "GOPROXY=http://10.77.0.1:8844/cache/go|https://proxy.golang.org,direct\n",
		".config/pip/pip.conf": "[global]\nindex-url = http://10.77.0.1:8844/cache/pypi/simple/\ntrusted-host = 10.77.0.1:8844\n",
	} {
		if got := read(name); got != want {
			t.Errorf("%s is %q, want %q", name, got, want)
		}
	}
	r.resp.Cache = nil // as in a copy of the sandbox with another profile
	r.useCache(t.Context())
	if got := read(".npmrc"); got != "@corp:registry=https://npm.corp/\n" {
		t.Errorf("without the cache .npmrc is %q", got)
	}
	for _, name := range []string{".config/go/env", ".config/pip/pip.conf"} {
		if _, err := os.Stat(filepath.Join(home, name)); err == nil {
			t.Errorf("without the cache there is %s", name)
		}
	}
	r.resp.Cache = &guestapi.RegistryCache{URL: "http://10.77.0.1:8844", Kinds: []string{"npm"}}
	home = t.TempDir()
	r.cfg.Home = home
	if err := os.WriteFile(filepath.Join(home, ".npmrc"), []byte("# mine\n registry = https://npm.corp/\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	r.useCache(t.Context())
	if got := read(".npmrc"); strings.Contains(got, "10.77.0.1") {
		t.Errorf("the user's registry is replaced: %q", got)
	}
}
