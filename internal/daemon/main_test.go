package daemon

import (
	"bufio"
	"bytes"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/internal/config"
	"github.com/agentlab-vm/agentlab/test/guard"
)

// envProgram makes the test binary the program agentlabd.
const envProgram = "AGENTLAB_TEST_IS_DAEMON"

func TestMain(m *testing.M) {
	if os.Getenv(envProgram) == "1" {
		os.Exit(Main(os.Args[1:], known...))
	}
	os.Exit(guard.Run(m))
}

func pid() string { return strconv.Itoa(os.Getpid()) }

// program returns a command that runs agentlabd for the home.
func (h *home) program(t *testing.T, args ...string) (*exec.Cmd, *bytes.Buffer) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), os.Args[0], args...)
	cmd.Env = append(os.Environ(), envProgram+"=1", "AGENTLAB_HOME="+h.paths.Home)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	return cmd, &stderr
}

// spawn starts agentlabd as a process and waits until it answers.
func (h *home) spawn(t *testing.T) *exec.Cmd {
	t.Helper()
	cmd, stderr := h.program(t, "run")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	for deadline := time.Now().Add(guard.Patience); ; time.Sleep(5 * time.Millisecond) {
		if _, err := h.client.Health(t.Context()); err == nil {
			return cmd
		}
		if time.Now().After(deadline) {
			t.Fatalf("agentlabd does not answer: %s", stderr)
		}
	}
}

// TestKill kills the process and starts the next one: sandboxes go on, and
// what was asked for but not done yet is done.
func TestKill(t *testing.T) {
	h := newHome(t)
	first := h.spawn(t)
	if _, err := h.client.CreateSandbox(t.Context(), api.SandboxCreate{Name: "survivor"}); err != nil {
		t.Fatal(err)
	}
	h.await(t, "survivor", agentlab.SandboxReady)
	if _, err := h.client.CreateSandbox(t.Context(), api.SandboxCreate{Name: "underway"}); err != nil {
		t.Fatal(err)
	}
	if err := first.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = first.Wait()
	if _, err := h.client.Status(t.Context()); agentlab.CodeOf(err) != agentlab.CodeUnavailable {
		t.Errorf("%v", err)
	}
	second := h.spawn(t)
	h.await(t, "underway", agentlab.SandboxReady)
	if out, code := h.exec(t, "survivor", "echo", "still here"); code != 0 || out != "still here\n" {
		t.Errorf("%q, %d", out, code)
	}
	list, err := h.client.Sandboxes(t.Context(), client.SandboxQuery{})
	if err != nil || len(list.Items) != 2 {
		t.Errorf("%+v, %v", list, err)
	}

	if err := second.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := second.Wait(); err != nil {
		t.Errorf("after SIGTERM: %v", err)
	}
}

func TestSecondProcess(t *testing.T) {
	h := newHome(t)
	first := h.spawn(t)
	cmd, stderr := h.program(t, "run", "--home", h.paths.Home)
	err := cmd.Run()
	if cmd.ProcessState.ExitCode() != config.ExitLocked {
		t.Errorf("%v", err)
	}
	sc := bufio.NewScanner(stderr)
	if !sc.Scan() || !strings.HasPrefix(sc.Text(), "agentlabd: a daemon is already running") || !strings.Contains(sc.Text(), strconv.Itoa(first.Process.Pid)) {
		t.Errorf("%q", sc.Text())
	}
	if !sc.Scan() || !strings.HasPrefix(sc.Text(), "  ") {
		t.Errorf("no hint: %q", sc.Text())
	}
}

func TestArguments(t *testing.T) {
	h := newHome(t)
	for _, c := range []struct {
		args   []string
		code   int
		stdout string
		stderr string
	}{
		{[]string{"--version"}, 0, "agentlabd ", ""},
		{[]string{"--help"}, 0, "Usage:", ""},
		{[]string{"run", "--help"}, 0, "Usage:", ""},
		{[]string{"db", "-h"}, 0, "agentlabd db list", ""},
		{nil, 2, "", "Usage:"},
		{[]string{"walk"}, 2, "", "Usage:"},
		{[]string{"run", "--nonsense"}, 2, "", "agentlabd: flag provided but not defined: -nonsense\n  see agentlabd --help\n"},
		{[]string{"run", "now"}, 2, "", `unknown argument "now"`},
		{[]string{"run", "--home"}, 2, "", "flag needs an argument: -home"},
		{[]string{"db", "restore", "one", "two"}, 2, "", "agentlabd db list"},
		{[]string{"network"}, 2, "", "agentlabd network render"},
		{[]string{"image"}, 2, "", "agentlabd image stage"},
		{[]string{"run", "--home=/x", "--system"}, 2, "", "cannot be used together"},
		{[]string{"run", "--home", "/dev/null/x"}, 1, "", "agentlabd: "},
		{[]string{"vmm", "/nonexistent"}, 1, "", "agentlabd: "},
	} {
		cmd, stderr := h.program(t, c.args...)
		out, err := cmd.Output()
		if code := cmd.ProcessState.ExitCode(); code != c.code || !strings.Contains(string(out), c.stdout) || !strings.Contains(stderr.String(), c.stderr) {
			t.Errorf("%q: code %d (%v), stdout %q, stderr %q", c.args, code, err, out, stderr)
		}
	}
}
