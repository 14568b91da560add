//go:build linux

package control_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/guest/guestd"
	"github.com/agentlab-vm/agentlab/test/guard"
)

// runnerArg makes this program a runner that notes its progress in a directory: a line
// "NAME PID" in "log" for each step.
const runnerArg = "test-runner"

func testRunner(t *testing.T, dir string) []string {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return []string{exe, runnerArg, dir}
}

func runAsRunner(dir string) int {
	note := func(step string) {
		f, err := os.OpenFile(filepath.Join(dir, "log"), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
		if err == nil {
			_, _ = fmt.Fprintf(f, "%s %d\n", step, os.Getpid())
			_ = f.Close()
		}
	}
	if !guestd.LockRunner() {
		return guestd.ExitLocked
	}
	staged, ok := guestd.AwaitGate(func() { note("parks") }, func() error { note("wipes"); return nil })
	if !ok {
		note("unneeded")
		return 0
	}
	note("begins")
	if _, err := os.Stat(filepath.Join(dir, "run")); err == nil { // until it is killed
		staged()
		time.Sleep(guard.Patience)
		return 1
	}
	for began := time.Now(); time.Since(began) < guard.Patience; time.Sleep(time.Millisecond) {
		if _, err := os.Stat(filepath.Join(dir, "hold")); err != nil {
			staged()
			note("staged")
			return 0
		}
	}
	return 1
}

// steps returns the steps of the runners in dir, and the PID of the last one.
func steps(dir string) (names string, pid int) {
	b, _ := os.ReadFile(filepath.Join(dir, "log"))
	f := strings.Fields(string(b))
	for i := 0; i+1 < len(f); i += 2 {
		names += f[i] + " "
		pid, _ = strconv.Atoi(f[i+1])
	}
	return strings.TrimSpace(names), pid
}

// The runner of a template waits in the same process until its copy has an identity,
// and commands of the agent's user wait for what it stages.
func TestParkedRunner(t *testing.T) {
	dir := t.TempDir()
	g := newGuest(t, func(c *guestd.Config) { c.Runner, c.StagedWait = testRunner(t, dir), time.Hour })
	if err := os.WriteFile(filepath.Join(dir, "hold"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := g.Prepare(guard.Context(t), guestapi.PrepareRequest{}); err != nil {
		t.Fatal(err)
	}
	got, parked := steps(dir)
	if got != "parks" {
		t.Fatalf("a template's runner: %q", got)
	}
	id := identity()
	id.Bootstrap = &guestapi.Bootstrap{Token: "t", Controller: "c", VMID: 1}
	if _, err := g.SetIdentity(guard.Context(t), id); err != nil {
		t.Fatal(err)
	}
	guard.Until(t, "the runner's begin", func() bool { names, _ := steps(dir); return names == "parks begins" })
	ctx, cancel := context.WithTimeout(guard.Context(t), 50*time.Millisecond)
	defer cancel()
	if conn, err := g.Exec(ctx, sh("true")); err == nil {
		_ = conn.Close()
		t.Error("a command did not wait for the secrets")
	}
	g.put(t, "run/agentlab/secrets/bootstrap.json", `{"env":{"API_KEY":"sk-1"}}`)
	if err := os.Remove(filepath.Join(dir, "hold")); err != nil {
		t.Fatal(err)
	}
	if out, _, _ := g.exec(t, sh("echo $API_KEY")).result(t); out != "sk-1\n" {
		t.Errorf("the environment: %q", out)
	}
	guard.Until(t, "the runner's end", func() bool { names, _ := steps(dir); return names == "parks begins staged" })
	if _, pid := steps(dir); pid != parked {
		t.Errorf("another process than the parked one, %d: %d", parked, pid)
	}
}

// A parked runner ends with its guestd, and is replaced if it has ended.
func TestParkedRunnerEnds(t *testing.T) {
	withBootstrap := identity()
	withBootstrap.Bootstrap = &guestapi.Bootstrap{Token: "t", Controller: "c", VMID: 1}
	for _, tc := range []struct {
		name string
		do   func(t *testing.T, g *guest, pid int)
		want string
	}{
		{"the end of guestd", func(t *testing.T, g *guest, _ int) { g.stop(); g.start(t) }, "parks"},
		{"a second template", func(t *testing.T, g *guest, _ int) {
			if err := g.Prepare(guard.Context(t), guestapi.PrepareRequest{}); err != nil {
				t.Fatal(err)
			}
		}, "parks parks"},
		// Users of the first sandbox can have stopped the process.
		{"a fork of a sandbox that did not need it", func(t *testing.T, g *guest, pid int) {
			if _, err := g.SetIdentity(guard.Context(t), identity()); err != nil {
				t.Fatal(err)
			}
			if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
				t.Fatal(err)
			}
			g.put(t, "run/agentlab/secrets/left", "")
			if _, err := g.SetIdentity(guard.Context(t), withBootstrap); err != nil {
				t.Fatal(err)
			}
		}, "parks wipes begins staged"},
		{"its own end", func(t *testing.T, g *guest, pid int) {
			if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
			if _, err := g.SetIdentity(guard.Context(t), withBootstrap); err != nil {
				t.Fatal(err)
			}
		}, "parks begins staged"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			dir := t.TempDir()
			g := newGuest(t, func(c *guestd.Config) { c.Runner = testRunner(t, dir) })
			if err := g.Prepare(guard.Context(t), guestapi.PrepareRequest{}); err != nil {
				t.Fatal(err)
			}
			_, pid := steps(dir)
			tc.do(t, g, pid)
			guard.Until(t, "the end of the process", func() bool { return dead(pid) })
			guard.Until(t, "the steps "+tc.want, func() bool { names, _ := steps(dir); return names == tc.want })
		})
	}
}

// A runner that waits ends when guestd was killed.
func TestParkedRunnerOfKilledServer(t *testing.T) {
	dir := t.TempDir()
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	ours, theirs := os.NewFile(uintptr(fds[0]), "ours"), os.NewFile(uintptr(fds[1]), "theirs")
	args := testRunner(t, dir)
	cmd := exec.CommandContext(guard.Context(t), args[0], args[1:]...)
	cmd.Env, cmd.ExtraFiles = []string{"AGENTLAB_RUNNER_GATE_FD=3"}, []*os.File{theirs}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	_ = theirs.Close()
	if n, err := ours.Read(make([]byte, 1)); n != 1 || err != nil {
		t.Errorf("it does not wait: %v", err)
	}
	_ = ours.Close()
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
	if got, _ := steps(dir); got != "parks unneeded" {
		t.Errorf("steps %q", got)
	}
}
