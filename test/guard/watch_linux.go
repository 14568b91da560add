package guard

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// watch runs a command, and kills what is left of it when it has ended.
func watch(argv []string) (code int, err error) {
	// Orphans become our children instead of init's. The setting is the
	// process's, and Pdeathsig is the thread's.
	runtime.LockOSThread()
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return 0, fmt.Errorf("become the reaper of the tests' processes: %w", err)
	}
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Env = append(os.Environ(), envGuarded+"=1", noSystemGit)
	if os.Getenv(envShared) == "" {
		dir, err := os.MkdirTemp("", "agentlab-test-*")
		if err != nil {
			return 0, err
		}
		defer func() { _ = os.RemoveAll(dir) }()
		cmd.Env = append(cmd.Env, envShared+"="+dir)
	}
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
