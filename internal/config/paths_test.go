package config

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/agentlab-vm/agentlab"
)

func env(kv map[string]string) func(string) string { return func(k string) string { return kv[k] } }

func TestResolvePaths(t *testing.T) {
	tmp := fmt.Sprintf("/tmp/agentlab-%d", os.Geteuid())
	for _, tc := range []struct {
		name   string
		env    map[string]string
		system bool
		want   Paths
	}{
		{"home of its own", map[string]string{"AGENTLAB_HOME": "/x/y", "XDG_STATE_HOME": "/s"}, false,
			Paths{Home: "/x/y", Config: "/x/y/config", State: "/x/y/state", Cache: "/x/y/cache", Run: "/x/y/run", Log: "/x/y/state/logs"}},
		{"home of its own beats system", map[string]string{"AGENTLAB_HOME": "/x"}, true,
			Paths{Home: "/x", Config: "/x/config", State: "/x/state", Cache: "/x/cache", Run: "/x/run", Log: "/x/state/logs"}},
		{"xdg", map[string]string{"HOME": "/h", "XDG_CONFIG_HOME": "/c", "XDG_STATE_HOME": "/s", "XDG_CACHE_HOME": "/k", "XDG_RUNTIME_DIR": "/r"}, false,
			Paths{Config: "/c/agentlab", State: "/s/agentlab", Cache: "/k/agentlab", Run: "/r/agentlab", Log: "/s/agentlab/logs"}},
		{"home only", map[string]string{"HOME": "/h"}, false,
			Paths{Config: "/h/.config/agentlab", State: "/h/.local/state/agentlab", Cache: "/h/.cache/agentlab", Run: tmp, Log: "/h/.local/state/agentlab/logs"}},
		{"relative xdg is ignored", map[string]string{"HOME": "/h", "XDG_STATE_HOME": "rel", "XDG_RUNTIME_DIR": "rel"}, false,
			Paths{Config: "/h/.config/agentlab", State: "/h/.local/state/agentlab", Cache: "/h/.cache/agentlab", Run: tmp, Log: "/h/.local/state/agentlab/logs"}},
		{"system", map[string]string{"HOME": "/h"}, true,
			Paths{System: true, Config: "/etc/agentlab", State: "/var/lib/agentlab", Cache: "/var/cache/agentlab", Run: "/run/agentlab", Log: "/var/log/agentlab"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, err := ResolvePaths(env(tc.env), tc.system)
			if err != nil || got != tc.want {
				t.Errorf("got  %+v, %v\nwant %+v", got, err, tc.want)
			}
		})
	}
	if _, err := ResolvePaths(env(nil), false); agentlab.CodeOf(err) != agentlab.CodeInvalid || agentlab.HintOf(err) == "" {
		t.Errorf("no home: got %v", err)
	}
	got, err := ResolvePaths(env(map[string]string{"AGENTLAB_HOME": "rel"}), false)
	if err != nil || !filepath.IsAbs(got.State) {
		t.Errorf("relative AGENTLAB_HOME: %+v, %v", got, err)
	}
}

func TestEnsure(t *testing.T) {
	home := filepath.Join(t.TempDir(), "deep", "home")
	p, err := ResolvePaths(env(map[string]string{"AGENTLAB_HOME": home}), false)
	if err != nil {
		t.Fatal(err)
	}
	for range 2 { // again over what is there, after someone opened a directory
		if err := p.Ensure(); err != nil {
			t.Fatal(err)
		}
		for _, dir := range []string{p.Home, p.Config, p.State, p.Cache, p.Run, p.Log, p.Profiles(), p.Secrets(), p.Sandboxes(), p.Artifacts(), p.Bundles(), p.Images()} {
			st, err := os.Stat(dir)
			if err != nil || st.Mode().Perm() != 0o700 {
				t.Errorf("%s: %v, %v", dir, st, err)
			}
		}
		if err := os.Chmod(p.Secrets(), 0o755); err != nil {
			t.Fatal(err)
		}
	}
}

// A daemon that was started with another runtime directory is found by its lock file, and
// the error for a second one says how to reach the first.
func TestRunningDaemonWithAnotherRuntimeDirectory(t *testing.T) {
	first := Paths{State: t.TempDir(), Run: t.TempDir()}
	second := Paths{State: first.State, Run: t.TempDir()}
	l, err := first.TryLock()
	if err != nil {
		t.Fatal(err)
	}
	want := func(hint string, running Paths) {
		t.Helper()
		_, err := second.TryLock()
		if agentlab.CodeOf(err) != agentlab.CodeExists || agentlab.HintOf(err) != hint {
			t.Errorf("got %v with hint %q, want %q", err, agentlab.HintOf(err), hint)
		}
		if got := second.Running(); got != running {
			t.Errorf("Running = %+v, want %+v", got, running)
		}
	}
	want("stop it first: agentlab daemon stop", second) // a lock file of an earlier version
	l.Note(first.Socket())
	want(fmt.Sprintf("its socket %s has been deleted; stop it first: kill %d", first.Socket(), os.Getpid()), second)
	if err := os.WriteFile(first.Socket(), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	want("stop it first: agentlab --socket "+first.Socket()+" daemon stop", first)
	if err := l.Unlock(); err != nil {
		t.Fatal(err)
	}
	if got := second.Running(); got != second {
		t.Errorf("Running after the end = %+v, want %+v", got, second)
	}
}

func TestEnsureRefuses(t *testing.T) {
	home := t.TempDir()
	p, _ := ResolvePaths(env(map[string]string{"AGENTLAB_HOME": home}), false)
	if err := os.WriteFile(p.State, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := p.Ensure(); agentlab.CodeOf(err) != agentlab.CodeDenied {
		t.Errorf("a file in the way: got %v, want denied", err)
	}
	if os.Geteuid() == 0 {
		if err := os.Remove(p.State); err != nil {
			t.Fatal(err)
		}
		if err := os.Mkdir(p.State, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.Chown(p.State, 12345, -1); err != nil {
			t.Fatal(err)
		}
		if err := p.Ensure(); agentlab.CodeOf(err) != agentlab.CodeDenied {
			t.Errorf("another user's directory: got %v, want denied", err)
		}
	}
	link := fmt.Sprintf("/tmp/agentlab-test-%d", os.Getpid())
	if err := os.Symlink(home, link); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.Remove(link) })
	if err := ensureDir(link, 0o700); agentlab.CodeOf(err) != agentlab.CodeDenied {
		t.Errorf("a link under /tmp: got %v, want denied", err)
	}
}

func TestCheckRun(t *testing.T) {
	p := Paths{Run: filepath.Join(t.TempDir(), "run")}
	want := func(what string, code agentlab.Code) {
		t.Helper()
		if err := p.CheckRun(); agentlab.CodeOf(err) != code {
			t.Errorf("%s: got %v, want %q", what, err, code)
		}
	}
	do := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	none := agentlab.CodeOf(nil)
	want("nothing there", none)
	do(os.Mkdir(p.Run, 0o700))
	want("our own", none)
	do(os.Chmod(p.Run, 0o750))
	want("open to the group", agentlab.CodeDenied)
	if os.Geteuid() == 0 {
		p.System = true
		want("the system's", none)
		do(os.Chown(p.Run, 12345, -1))
		want("the system's, but not root's", agentlab.CodeDenied)
		p.System = false
		do(os.Chmod(p.Run, 0o700))
		want("another user's", agentlab.CodeDenied)
	}
	do(os.Remove(p.Run))
	do(os.Symlink(t.TempDir(), p.Run))
	want("a link", agentlab.CodeDenied)
	do(os.Remove(p.Run))
	do(os.WriteFile(p.Run, nil, 0o600))
	want("a file", agentlab.CodeDenied)
}
