// Package guard runs the tests of a package in a child process and kills
// every process that they leave behind. A test that times out ends its
// process without running its cleanups: without a guard, the daemons,
// supervisors and virtual machines that it started would outlive it.
package guard

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// envGuarded is set in the process that runs the tests, and in what it starts.
const envGuarded = "AGENTLAB_TEST_GUARDED"

// killLimit bounds the time in which killed processes must disappear.
const killLimit = time.Minute

// Run is m.Run with a guard: a TestMain calls it in its place. It returns the
// exit code of the tests.
func Run(m *testing.M) int {
	if os.Getenv(envGuarded) != "" {
		return m.Run()
	}
	code, err := watch(os.Args)
	if err != nil {
		fmt.Fprintln(os.Stderr, "guard:", err)
		return 1
	}
	return code
}

// watch runs a command, and kills what is left of it when it has ended.
func watch(argv []string) (code int, err error) {
	// Orphans become our children instead of init's. The setting is the
	// process's, and Pdeathsig is the thread's.
	runtime.LockOSThread()
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return 0, fmt.Errorf("become the reaper of the tests' processes: %w", err)
	}
	cmd := exec.Command(argv[0], argv[1:]...) //nolint:gosec // this program
	cmd.Env = append(os.Environ(), envGuarded+"=1")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGQUIT, syscall.SIGHUP)
	defer signal.Stop(signals)
	if err := cmd.Start(); err != nil {
		return 0, err
	}
	go func() {
		for s := range signals {
			_ = cmd.Process.Signal(s)
		}
	}()
	status, err := reapUntil(cmd.Process.Pid)
	if err != nil {
		return 0, err
	}
	code = status.ExitStatus()
	if code < 0 { // a signal
		code = 1
	}
	return code, killAll()
}

// reapUntil waits for the child with this pid. Until then it also reaps the
// orphans, as init does: a daemon that ended would else be seen as a process.
func reapUntil(child int) (syscall.WaitStatus, error) {
	for {
		var status syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &status, 0, nil)
		switch {
		case errors.Is(err, syscall.EINTR):
		case err != nil:
			return 0, fmt.Errorf("wait for the tests: %w", err)
		case pid == child:
			return status, nil
		}
	}
}

// killAll kills the descendants of this process until there are none.
func killAll() error {
	for deadline := time.Now().Add(killLimit); ; time.Sleep(20 * time.Millisecond) {
		left := descendants(os.Getpid())
		if len(left) == 0 {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("these processes of the tests could not be killed: %v", left)
		}
		for _, pid := range left {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
		for {
			pid, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil)
			if pid <= 0 || err != nil {
				break
			}
		}
	}
}

// descendants returns the processes below root.
func descendants(root int) []int {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil
	}
	children := map[int][]int{}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		stat, err := os.ReadFile("/proc/" + e.Name() + "/stat")
		if err != nil {
			continue // it has ended
		}
		// The name in parentheses may hold anything; state and parent follow.
		text := string(stat)
		fields := strings.Fields(text[strings.LastIndexByte(text, ')')+1:])
		if len(fields) < 2 {
			continue
		}
		if parent, err := strconv.Atoi(fields[1]); err == nil {
			children[parent] = append(children[parent], pid)
		}
	}
	var out []int
	for next := children[root]; len(next) > 0; next = next[1:] {
		out = append(out, next[0])
		next = append(next, children[next[0]]...)
	}
	return out
}

// Alive reports whether a process is not a zombie, or one whose other threads have not
// ended: until then it holds its files and sockets.
func Alive(pid int) bool {
	dir := "/proc/" + strconv.Itoa(pid)
	stat, err := os.ReadFile(dir + "/stat")
	if err != nil {
		return false
	}
	if _, state, _ := strings.Cut(string(stat), ") "); !strings.HasPrefix(state, "Z") {
		return true
	}
	threads, err := os.ReadDir(dir + "/task")
	return err == nil && len(threads) > 1
}

// FreePort returns a TCP port of the loopback on which no process listens, other than
// those in not. It is below the ports that the kernel gives to clients, so that no
// connection of another test takes it.
func FreePort(not ...int) (int, error) {
	const first, last = 16384, 32767
	err := errors.New("no free TCP port")
	for range last - first {
		port := first + rand.IntN(last-first+1) //nolint:gosec // no secret
		var l net.Listener
		if l, err = net.ListenTCP("tcp", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: port}); err != nil {
			continue
		}
		if err = l.Close(); err == nil && !slices.Contains(not, port) {
			return port, nil
		}
	}
	return 0, err
}
