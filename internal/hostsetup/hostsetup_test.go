package hostsetup_test

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/hostsetup"
)

func unpack(t *testing.T) (*hostsetup.Kit, string) {
	t.Helper()
	parent := t.TempDir()
	k, err := hostsetup.Unpack(parent)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := k.Close(); err != nil {
			t.Error(err)
		}
		if left, err := os.ReadDir(parent); err != nil || len(left) > 0 {
			t.Errorf("left: %v %v", left, err)
		}
	})
	dirs, err := os.ReadDir(parent)
	if err != nil || len(dirs) != 1 {
		t.Fatal(dirs, err)
	}
	if info, err := dirs[0].Info(); err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("others see the scripts: %v %v", info.Mode(), err)
	}
	return k, filepath.Join(parent, dirs[0].Name())
}

// forDevelopers are the scripts that a host does not get.
var forDevelopers = []string{"affected.sh", "demo.sh", "deps.sh", "fuzz.sh", "in-memory.sh", "mutation.sh", "stats.sh"}

// Whatever script of the repository a host needs is carried, with all that it
// reads.
func TestUnpack(t *testing.T) {
	k, dir := unpack(t)
	for _, dev := range forDevelopers {
		if k.Has(dev) {
			t.Errorf("%s is for developers", dev)
		}
	}
	for _, pattern := range []string{"*.sh", "net/*", "systemd/*"} {
		found, err := filepath.Glob("../../scripts/" + pattern)
		if err != nil || len(found) == 0 {
			t.Fatal(found, err)
		}
		for _, path := range found {
			name, _ := filepath.Rel("../../scripts", path)
			if slices.Contains(forDevelopers, name) {
				continue
			}
			want, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			got, err := os.ReadFile(filepath.Join(dir, "scripts", name))
			if err != nil || !bytes.Equal(got, want) {
				t.Errorf("%s is not carried: %v", name, err)
			}
		}
	}
	for _, name := range []string{"skills/agentlab/SKILL.md", "profiles/yolo-ephemeral.yaml"} {
		if _, err := os.Stat(filepath.Join(dir, name)); err != nil {
			t.Error(err)
		}
	}
}

func TestRun(t *testing.T) {
	k, _ := unpack(t)
	ctx := context.Background()
	var live bytes.Buffer
	r, err := k.Run(ctx, &live, nil, "net/apply.sh", "--nonsense")
	if err != nil || r.Code != 2 || !strings.Contains(r.Notes, "unknown argument --nonsense") || live.String() != r.Notes {
		t.Errorf("%+v, %v", r, err)
	}
	if r, err := k.Run(ctx, nil, nil, "net/smoke_test.sh", "--dry-run"); err != nil || r.Code != 0 || !strings.Contains(r.Output, "lan ") {
		t.Errorf("%+v, %v", r, err)
	}
	if _, err := k.Run(ctx, nil, nil, "nosuch.sh"); agentlab.CodeOf(err) != agentlab.CodeNotFound {
		t.Error(err)
	}
	ended, cancel := context.WithCancel(ctx)
	cancel()
	if _, err := k.Run(ended, nil, nil, "net/smoke_test.sh"); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

// Without the internet, the host does not resolve the name either: that is no fault of the
// sandbox.
func TestSmokeTestWithoutTheInternet(t *testing.T) {
	k, _ := unpack(t)
	bin := t.TempDir()
	fake := "#!/bin/sh\ncase \"$*\" in *status*) echo '  \"version\": \"1\",' ;; *'echo works'*) echo works ;; *getent* | *curl*) exit 2 ;; *for\\ port*) echo none ;; esac\n"
	if err := os.WriteFile(filepath.Join(bin, "agentlab"), []byte(fake), 0o755); err != nil {
		t.Fatal(err)
	}
	for site, want := range map[string]string{"nosuch.invalid": "skip\tdns", "localhost": "fail\tdns"} {
		r, err := k.Run(t.Context(), nil, []string{"AGENTLAB_BIN=" + bin}, "net/smoke_test.sh", "--tabs", "--site", site)
		if err != nil || !strings.Contains(r.Output, want) || !strings.Contains(r.Output, "skip\tinternet") || r.Code != map[bool]int{true: 1}[site == "localhost"] {
			t.Errorf("%s: %+v, %v", site, r, err)
		}
	}
}

// Every script tells what it is for, and takes no argument that it ignores.
func TestUsage(t *testing.T) {
	k, dir := unpack(t)
	for _, path := range []string{"install_host.sh", "create_api_token.sh", "create_template.sh", "net/setup_vmbr1.sh", "net/apply.sh", "net/setup_tailscale_router.sh", "net/smoke_test.sh"} {
		r, err := k.Run(context.Background(), nil, nil, path, "--help")
		if err != nil || r.Code != 0 || !strings.Contains(r.Output, filepath.Base(path)) || strings.Contains(r.Output, "shellcheck") {
			t.Errorf("%s --help: %+v, %v", path, r, err)
		}
		for _, arg := range []string{"--nosuch", "extra"} {
			if r, err := k.Run(context.Background(), nil, nil, path, arg); err != nil || r.Code != 2 {
				t.Errorf("%s %s: %+v, %v", path, arg, r, err)
			}
		}
		if out, err := exec.Command("bash", "-n", filepath.Join(dir, "scripts", path)).CombinedOutput(); err != nil {
			t.Errorf("%s: %s", path, out)
		}
	}
}

func TestScriptOutput(t *testing.T) {
	r := hostsetup.Result{
		Output: "+ write /etc/x 0644\n    + no command\n+ ifup vmbr1\n",
		Notes:  "a.sh: something before\n  advice before\nb.sh: it is broken\n  mend it\n",
	}
	if got := r.Commands(); !slices.Equal(got, []string{"write /etc/x 0644", "ifup vmbr1"}) {
		t.Errorf("%q", got)
	}
	if what, remedy := r.Complaint(); what != "it is broken" || remedy != "mend it" {
		t.Errorf("%q %q", what, remedy)
	}
	if what, remedy := (hostsetup.Result{}).Complaint(); what != "" || remedy != "" {
		t.Errorf("%q %q", what, remedy)
	}
}
