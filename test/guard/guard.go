// Package guard runs the tests of a package in a child process and kills
// every process that they leave behind. A test that times out ends its
// process without running its cleanups: without a guard, the daemons,
// supervisors and virtual machines that it started would outlive it.
package guard

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

// envGuarded is set in the process that runs the tests, and in what it starts.
const envGuarded = "AGENTLAB_TEST_GUARDED"

// noSystemGit makes the git of tests independent of /etc/gitconfig of the machine, which may
// require filters that are not installed.
const noSystemGit = "GIT_CONFIG_NOSYSTEM=1"

// Patience is how long a test waits for what must happen. It only ends a test that
// hangs: no test measures the speed of its machine, and a busy one may be a hundred
// times slower than a quiet one.
const Patience = 10 * time.Minute

// killLimit bounds the time in which killed processes must disappear.
const killLimit = Patience

// Run is m.Run with a guard: a TestMain calls it in its place. It returns the
// exit code of the tests, whose git reads no system configuration.
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

// Context returns the context of the test, which also ends after Patience.
func Context(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), Patience)
	t.Cleanup(cancel)
	return ctx
}

// Until waits for a condition of the outside world, which can only be polled.
func Until(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(Patience); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not within %s: %s", Patience, what)
		}
	}
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
		port := first + rand.IntN(last-first+1)
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
