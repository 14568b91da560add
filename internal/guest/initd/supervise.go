package initd

import (
	"os"
	"os/exec"
	"syscall"
	"time"

	"github.com/agentlab-vm/agentlab/internal/guest/guestd"
)

const (
	minPause = 100 * time.Millisecond
	maxPause = 5 * time.Second
	// settled is how long guestd must have run for its next end to be a
	// first one again.
	settled = time.Minute

	// As systemd gives them to services; the kernel's own are too small for
	// agents.
	openFilesSoft = 1024
	openFilesHard = 512 << 10
	lockedMemory  = 8 << 20
)

// Supervise keeps the control server alive. It does not return.
func Supervise() int {
	_ = os.WriteFile("/proc/self/oom_score_adj", []byte("-950"), 0o600)
	_ = syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: openFilesSoft, Max: openFilesHard})
	const rlimitMemlock = 8
	_ = syscall.Setrlimit(rlimitMemlock, &syscall.Rlimit{Cur: lockedMemory, Max: lockedMemory})
	pause := minPause
	for {
		began := time.Now()
		cmd := exec.Command("/proc/self/exe", "guestd")
		cmd.Args[0] = "agent-runner"
		cmd.Stderr = guestd.Console{} // where a panic is told
		cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
		err := cmd.Run()
		if time.Since(began) > settled {
			pause = minPause
		}
		_, _ = guestd.Console{}.Write([]byte("guestd ended (" + reason(err) + "), starting it again\n"))
		time.Sleep(pause)
		pause = min(2*pause, maxPause)
	}
}

func reason(err error) string {
	if err == nil {
		return "exit 0"
	}
	return err.Error()
}
