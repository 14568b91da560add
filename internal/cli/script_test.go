package cli_test

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/agentlab-vm/agentlab/internal/cli/commands"
	"github.com/agentlab-vm/agentlab/internal/lock"
	"github.com/agentlab-vm/agentlab/test/guard"
	"github.com/agentlab-vm/agentlab/test/mcpclient"
	"github.com/agentlab-vm/agentlab/test/testdaemon"
)

func TestMain(m *testing.M) {
	testscript.Main(guarded{m}, map[string]func(){
		"agentlab":  func() { os.Exit(commands.Main(os.Args)) },
		"agentlabd": func() { os.Exit(testdaemon.Main(os.Args[1:])) },
		// The qemu backend opens only where it is; no VM of these scripts runs it.
		"agent-runner": func() {},
	})
}

// guarded kills what scripts leave behind when they time out.
type guarded struct{ m *testing.M }

func (g guarded) Run() int { return guard.Run(g.m) }

// The scripts drive the real command line against a real daemon, which each
// script starts by its first command, on the fake backend.
func TestScripts(t *testing.T) {
	testscript.Run(t, scriptParams(t, "testdata/script"))
}

// The scripts of seed 001's acceptance criteria, which test/e2e runs with real VMs.
func TestAcceptance(t *testing.T) {
	testscript.Run(t, scriptParams(t, "../../test/e2e/testdata/acceptance"))
}

// scriptParams are the parameters of the scripts in dir.
func scriptParams(t *testing.T, dir string) testscript.Params {
	return testscript.Params{
		Dir: dir,
		Setup: func(env *testscript.Env) error {
			home := filepath.Join(env.WorkDir, "home")
			env.Setenv("AGENTLAB_HOME", home)
			env.Setenv("GIT_CONFIG_GLOBAL", "/dev/null")
			// Under the race detector every command would linger for a second.
			env.Setenv("GORACE", "atexit_sleep_ms=0 "+os.Getenv("GORACE"))
			for _, who := range []string{"AUTHOR", "COMMITTER"} {
				env.Setenv("GIT_"+who+"_NAME", "Test")
				env.Setenv("GIT_"+who+"_EMAIL", "test@example.com")
			}
			env.Defer(func() { stopDaemon(t, home) })
			if err := os.MkdirAll(filepath.Join(home, "config"), 0o700); err != nil {
				return err
			}
			return os.WriteFile(filepath.Join(home, "config", "config.yaml"), []byte("backend: fake\n"), 0o600)
		},
		Condition: func(cond string) (bool, error) {
			name, ok := strings.CutPrefix(cond, "backend:")
			if !ok {
				return false, fmt.Errorf("unknown condition %q", cond)
			}
			return name == "fake", nil
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"capture":    capture,
			"freeports":  freePorts,
			"killdaemon": killDaemon,
			"mcp":        mcpCall,
		},
	}
}

// capture VAR REGEXP sets VAR to the first group of REGEXP in the last
// standard output.
func capture(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 2 {
		ts.Fatalf("usage: capture VAR REGEXP")
	}
	m := regexp.MustCompile(args[1]).FindStringSubmatch(ts.ReadFile("stdout"))
	if len(m) < 2 {
		ts.Fatalf("no match for %s", args[1])
	}
	ts.Setenv(args[0], m[1])
}

// mcpCall [-FLAG...] TOOL [ARGUMENTS] starts 'agentlab mcp' with the flags and calls a
// tool. The text of its result is standard output and the progress standard error; with
// !, the call must fail. The tool "tools" lists the tools with their parameters.
func mcpCall(ts *testscript.TestScript, neg bool, args []string) {
	split := slices.IndexFunc(args, func(a string) bool { return !strings.HasPrefix(a, "-") })
	if split < 0 {
		ts.Fatalf("usage: mcp [-FLAG...] TOOL [ARGUMENTS]")
	}
	flags, tool, object := args[:split], args[split], "{}"
	if len(args) > split+1 {
		object = args[split+1]
	}
	ctx, cancel := context.WithTimeout(context.Background(), guard.Patience)
	defer cancel()
	program, err := exec.LookPath("agentlab")
	ts.Check(err)
	server := exec.Command(program, append([]string{"mcp"}, flags...)...)
	server.Dir = ts.MkAbs(".")
	server.Env = os.Environ()
	for _, name := range []string{"AGENTLAB_HOME", "GIT_CONFIG_GLOBAL", "HOME", "PATH"} {
		server.Env = append(server.Env, name+"="+ts.Getenv(name))
	}
	s, err := mcpclient.Start(ctx, server, ts.Stderr())
	ts.Check(err)
	defer func() { _ = s.Close() }()
	if tool == "tools" {
		for t, err := range s.Tools(ctx, nil) {
			ts.Check(err)
			schema, _ := json.Marshal(t.InputSchema)
			fmt.Fprintf(ts.Stdout(), "%s readonly=%v destructive=%v %s\n", t.Name, t.Annotations.ReadOnlyHint, *t.Annotations.DestructiveHint, schema)
		}
		return
	}
	r, err := s.Call(ctx, tool, object)
	ts.Check(err)
	fmt.Fprint(ts.Stdout(), mcpclient.Text(r))
	if r.IsError != neg {
		ts.Fatalf("isError is %v: %s", r.IsError, mcpclient.Text(r))
	}
}

// freePorts VAR... sets the variables to TCP ports on which no process listens, in
// ascending order.
func freePorts(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) == 0 {
		ts.Fatalf("usage: freeports VAR...")
	}
	var ports []int
	for range args {
		port, err := guard.FreePort(ports...)
		ts.Check(err)
		ports = append(ports, port)
	}
	slices.Sort(ports)
	for i, name := range args {
		ts.Setenv(name, strconv.Itoa(ports[i]))
	}
}

// daemonPID reads the pid that the daemon noted in its lock file.
func daemonPID(home string) int {
	pid, _ := lock.Holder(filepath.Join(home, "state", "agentlabd.lock"))
	return pid
}

// killDaemon kills the daemon with SIGKILL and waits until it is gone.
func killDaemon(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 0 {
		ts.Fatalf("usage: killdaemon")
	}
	pid := daemonPID(filepath.Join(ts.Getenv("WORK"), "home")) // AGENTLAB_HOME may be unset
	if pid == 0 {
		ts.Fatalf("no daemon is running")
	}
	ts.Check(syscall.Kill(pid, syscall.SIGKILL))
	if !gone(pid) {
		ts.Fatalf("daemon %d did not die", pid)
	}
}

func stopDaemon(t *testing.T, home string) {
	pid := daemonPID(home)
	if pid == 0 || syscall.Kill(pid, syscall.SIGTERM) != nil {
		return
	}
	if !gone(pid) {
		t.Errorf("daemon %d did not stop", pid)
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
}

// gone waits for a process that is not our child to end.
func gone(pid int) bool {
	for deadline := time.Now().Add(guard.Patience); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
		if !guard.Alive(pid) {
			return true
		}
	}
	return false
}
