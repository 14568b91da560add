// Package e2e runs the real programs on the real backend: real VMs from the
// real image, with a fake internet behind the one place where packets leave.
// It needs QEMU and mmdebstrap (scripts/deps.sh); without KVM it runs under
// emulation.
package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/test/guard"
	"github.com/agentlab-vm/agentlab/test/netlab"
)

// Limits that only end a test that hangs, even under emulation on a busy machine.
// The first command that needs an image also builds it.
const (
	commandLimit = time.Hour
	// terminalLimit ends a command on a terminal, which is open during several steps of
	// a test. Each step has a limit of its own.
	terminalLimit = 2 * commandLimit
	settleLimit   = guard.Patience
)

// parallelTests is how many tests run at once at least: most of them wait for a
// guest half of the time, some for a deadline of a minute.
const parallelTests = 3

// programs returns the directory of the shipped programs; those in its directory test have
// the agentlabd of the tests. The agent-runner has the bytes of other tests' builds, so that
// they share a template's disk.
var programs = sync.OnceValues(func() (string, error) {
	return guard.Once(strings.Join(append([]string{"e2e"}, buildFlags...), ""), func(dir string) error {
		if err := guard.Build("../..", dir, buildFlags, "./cmd/..."); err != nil {
			return err
		}
		if err := guard.Build("../..", filepath.Join(dir, "test"), buildFlags, "./test/agentlabd"); err != nil {
			return err
		}
		for _, p := range []string{"agentlab", "agent-runner"} { // a symbolic link would lead back to the shipped agentlabd
			if err := os.Link(filepath.Join(dir, p), filepath.Join(dir, "test", p)); err != nil {
				return err
			}
		}
		return nil
	})
})

func TestMain(m *testing.M) {
	netlab.Main()
	if unit := os.Getenv(envConfine); unit != "" {
		fmt.Fprintln(os.Stderr, "cannot confine:", confine(unit, os.Args[1:]))
		os.Exit(126)
	}
	flag.Parse()
	if f := flag.Lookup("test.parallel"); f.Value.String() == f.DefValue { // no option -parallel
		_ = f.Value.Set(strconv.Itoa(max(parallelTests, runtime.GOMAXPROCS(0))))
	}
	os.Exit(guard.Run(m))
}

// cacheDir holds images between runs; a fresh machine builds them once.
func cacheDir(t testing.TB) string {
	dir := os.Getenv("AGENTLAB_TEST_CACHE")
	if dir == "" {
		dir = "../../.cache/test"
	}
	dir, err := filepath.Abs(dir)
	if err == nil {
		err = os.MkdirAll(dir, 0o700)
	}
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// lab is one home of AgentLab with its own daemon.
type lab struct {
	testing.TB
	home, bin string
	env       []string
	attr      *syscall.SysProcAttr // of agentlab, and so of the daemon that it starts
}

// newLab makes a home. When the test ends, the daemon is stopped and nothing
// may be left of it: no process, no sandbox folder.
func newLab(t testing.TB, env ...string) *lab {
	t.Helper()
	templates := prepare(t)
	l := newLabIn(t, newHome(t), env...)
	if _, bench := t.(*testing.B); !bench { // a benchmark measures boots, too
		l.useTemplates(templates)
	}
	return l
}

// newHome makes the directory of a lab.
func newHome(t testing.TB) string {
	t.Helper()
	home, err := os.MkdirTemp("", "agentlab-e2e-*")
	if err != nil {
		t.Fatal(err)
	}
	return home
}

// testDaemon makes l run the agentlabd of the tests.
func (l *lab) testDaemon() {
	l.bin = filepath.Join(l.bin, "test")
	l.env = append(l.env, "PATH="+l.bin+":"+os.Getenv("PATH"))
}

// newLabIn is newLab in an empty directory.
func newLabIn(t testing.TB, home string, env ...string) *lab {
	t.Helper()
	bin, err := programs()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(home, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(cacheDir(t), filepath.Join(home, "cache")); err != nil {
		t.Fatal(err)
	}
	l := &lab{TB: t, home: home, bin: bin}
	l.env = append(os.Environ(), "AGENTLAB_HOME="+home, "PATH="+bin+":"+os.Getenv("PATH"),
		"GIT_CONFIG_GLOBAL=/dev/null", "GIT_AUTHOR_NAME=Test", "GIT_AUTHOR_EMAIL=test@example.com",
		"GIT_COMMITTER_NAME=Test", "GIT_COMMITTER_EMAIL=test@example.com")
	l.env = append(l.env, env...)
	t.Cleanup(l.close)
	return l
}

func (l *lab) close() {
	if l.Failed() {
		if log, err := os.ReadFile(filepath.Join(l.home, "state", "logs", "agentlabd.log")); err == nil {
			l.Logf("daemon log:\n%s", tail(string(log), 60))
		}
	}
	if list, err := l.client().Sandboxes(context.Background(), client.SandboxQuery{}); err == nil {
		for _, sb := range list.Items {
			l.run("", "sandbox", "destroy", "--force", strconv.Itoa(sb.VMID))
		}
	}
	l.run("", "daemon", "stop")
	l.nothingLeft()
	for _, pid := range l.processes() { // only after a failure
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
	_ = os.RemoveAll(l.home)
}

func tail(s string, n int) string {
	lines := strings.Split(strings.TrimRight(s, "\n"), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}

// nothingLeft fails the test when a process or a file of a sandbox of this
// home remains.
func (l *lab) nothingLeft() {
	l.Helper()
	if !eventually(settleLimit, func() bool { return len(l.processes()) == 0 }) {
		for _, pid := range l.processes() {
			l.Errorf("process %d is left: %s", pid, cmdline(pid))
		}
	}
	l.noSandboxFiles()
}

func (l *lab) noSandboxFiles() {
	l.Helper()
	dir := filepath.Join(l.home, "state", "sandboxes")
	left := func() []os.DirEntry { e, _ := os.ReadDir(dir); return e }
	if !eventually(settleLimit, func() bool { return len(left()) == 0 }) {
		for _, e := range left() {
			l.Errorf("left in %s: %s", dir, e.Name())
		}
	}
}

// eventually polls a condition of the outside world, less and less often: most
// conditions start a program.
func eventually(limit time.Duration, ok func() bool) bool {
	const longest = 300 * time.Millisecond
	pause := 20 * time.Millisecond
	for deadline := time.Now().Add(limit); ; time.Sleep(pause) {
		if ok() {
			return true
		}
		if time.Now().After(deadline) {
			return false
		}
		pause = min(pause*3/2, longest)
	}
}

// processes are those whose arguments, environment or working folder name
// this home; the test itself and its git are not among them.
func (l *lab) processes(words ...string) []int {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		l.Fatal(err)
	}
	var pids []int
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == os.Getpid() || !guard.Alive(pid) {
			continue
		}
		args := cmdline(pid)
		cwd, _ := os.Readlink(filepath.Join("/proc", e.Name(), "cwd"))
		environ, _ := os.ReadFile(filepath.Join("/proc", e.Name(), "environ"))
		ours := strings.Contains(args, l.home) || strings.HasPrefix(cwd, l.home) ||
			bytes.Contains(environ, []byte("AGENTLAB_HOME="+l.home+"\x00"))
		for _, w := range words {
			ours = ours && strings.Contains(args, w)
		}
		if ours && args != "" {
			pids = append(pids, pid)
		}
	}
	return pids
}

func cmdline(pid int) string {
	b, _ := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "cmdline"))
	return strings.TrimSpace(strings.ReplaceAll(string(b), "\x00", " "))
}

// result is what one command did.
type result struct {
	code           int
	stdout, stderr string
}

func (r result) String() string {
	return fmt.Sprintf("exit code %d\nstdout:\n%s\nstderr:\n%s", r.code, tail(r.stdout, 40), tail(r.stderr, 40))
}

func (l *lab) run(dir string, args ...string) result { return l.runInput(dir, nil, args...) }

func (l *lab) runInput(dir string, stdin io.Reader, args ...string) result {
	l.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), commandLimit)
	defer cancel()
	cmd := exec.CommandContext(ctx, filepath.Join(l.bin, "agentlab"), args...)
	cmd.Dir, cmd.Env, cmd.Stdin, cmd.SysProcAttr = dir, l.env, stdin, l.attr
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	if exit := new(exec.ExitError); err != nil && !errors.As(err, &exit) {
		l.Fatalf("agentlab %v: %v", args, err)
	}
	return result{cmd.ProcessState.ExitCode(), stdout.String(), stderr.String()}
}

// ok runs a command that must succeed and returns its standard output.
func (l *lab) ok(args ...string) string {
	l.Helper()
	r := l.run("", args...)
	if r.code != 0 {
		l.Fatalf("agentlab %v: %v", args, r)
	}
	return r.stdout
}

func (l *lab) client() *client.Client {
	return client.New(filepath.Join(l.home, "run", "agentlabd.sock"))
}

// job runs a job with --json and returns it with its exit code.
func (l *lab) job(args ...string) (api.Job, result) {
	l.Helper()
	r := l.run("", append([]string{"--json", "job", "run"}, args...)...)
	var j api.Job
	if err := json.Unmarshal([]byte(r.stdout), &j); err != nil {
		l.Fatalf("job run %v gave no job: %v\n%v", args, err, r)
	}
	return j, r
}

func (l *lab) submit(args ...string) string {
	l.Helper()
	return strings.TrimSpace(l.ok(append([]string{"job", "run", "--no-wait"}, args...)...))
}

// finish waits until the job has ended; the daemon may die meanwhile.
func (l *lab) finish(id string) api.Job {
	l.Helper()
	var j api.Job
	if !eventually(commandLimit, func() bool {
		r := l.run("", "--json", "job", "show", id)
		return r.code == 0 && json.Unmarshal([]byte(r.stdout), &j) == nil && agentlab.JobStatus(j.Status).Final()
	}) {
		l.Fatalf("job %s did not end: %+v", id, j)
	}
	return j
}

func (l *lab) noSandboxes() {
	l.Helper()
	var list api.List[api.Sandbox]
	if !eventually(settleLimit, func() bool {
		list.Items = nil
		err := json.Unmarshal([]byte(l.ok("--json", "sandbox", "list")), &list)
		for _, sb := range list.Items {
			if sb.Salvage { // of a job whose VM the test has killed
				l.ok("sandbox", "destroy", "--purge", strconv.Itoa(sb.VMID))
			}
		}
		return err == nil && len(list.Items) == 0
	}) {
		l.Errorf("sandboxes are left: %+v", list.Items)
	}
}

// sampleRepo makes a repository with a file and a test that fails until the
// file is mended.
func sampleRepo(t testing.TB) string {
	t.Helper()
	dir := t.TempDir()
	files := map[string]string{
		"greeting.txt":   "helo\n",
		"test.sh":        "#!/bin/sh\ngrep -qx hello greeting.txt && echo PASS\n",
		".agentlab.yaml": "outputs:\n  - out/**\n",
	}
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	git(t, dir, "init", "-q", "-b", "main")
	git(t, dir, "add", ".")
	git(t, dir, "commit", "-q", "-m", "A greeting with a slip")
	return dir
}

func git(t testing.TB, dir string, args ...string) string {
	t.Helper()
	cmd := exec.Command("git", args...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "GIT_CONFIG_GLOBAL=/dev/null", "GIT_AUTHOR_NAME=Test", "GIT_AUTHOR_EMAIL=test@example.com",
		"GIT_COMMITTER_NAME=Test", "GIT_COMMITTER_EMAIL=test@example.com")
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("git %v: %v\n%s", args, err, out)
	}
	return strings.TrimSpace(string(out))
}

func mustAddr(s string) netip.Addr { return netip.MustParseAddr(s) }
