package guard

import (
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

const envLeave = "AGENTLAB_TEST_GUARD_LEAVE" // TestThatTimesOut leaves a process behind

func TestMain(m *testing.M) {
	if os.Getenv(envLeave) == "" {
		os.Exit(m.Run()) // TestTimeoutLeavesNothing starts a guard of its own
	}
	os.Exit(Run(m))
}

// TestThatTimesOut is the test that times out in TestTimeoutLeavesNothing.
func TestThatTimesOut(t *testing.T) {
	if os.Getenv(envLeave) == "" {
		t.Skip("started by TestTimeoutLeavesNothing")
	}
	// As a daemon does: in a session of its own, its parent gone.
	out, err := exec.Command("setsid", "-f", "sh", "-c", "echo $$; exec sleep 1000 >/dev/null 2>&1").Output()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(os.Getenv(envLeave), out, 0o600); err != nil {
		t.Fatal(err)
	}
	select {} // until the time limit
}

func TestTimeoutLeavesNothing(t *testing.T) {
	file := t.TempDir() + "/pid"
	cmd := exec.Command(os.Args[0], "-test.run=^TestThatTimesOut$", "-test.timeout=2s")
	cmd.Env = append(os.Environ(), envLeave+"="+file, envGuarded+"=")
	out, err := cmd.CombinedOutput()
	if err == nil || !strings.Contains(string(out), "test timed out") {
		t.Fatalf("the test did not time out: %v\n%s", err, out)
	}
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(pid, 0); err == nil {
		t.Errorf("process %d of the test that timed out is left", pid)
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
}

// TestOrphansAreReaped checks, below a guard, that a daemon that ended is no
// longer a process.
func TestOrphansAreReaped(t *testing.T) {
	if os.Getenv(envLeave) == "" {
		cmd := exec.Command(os.Args[0], "-test.run=^TestOrphansAreReaped$")
		cmd.Env = append(os.Environ(), envLeave+"=none", envGuarded+"=")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		return
	}
	out, err := exec.Command("setsid", "-f", "sh", "-c", "echo $$; exec >/dev/null").Output()
	if err != nil {
		t.Fatal(err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(out)))
	if err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(killLimit); syscall.Kill(pid, 0) == nil; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("process %d ended and is still there", pid)
		}
	}
}
