package qemu

import (
	"strings"
	"syscall"

	"github.com/agentlab-vm/agentlab"
)

// vmExit describes a QEMU process that ended without a request.
type vmExit struct {
	status   syscall.WaitStatus
	shutdown string // reason of QMP's SHUTDOWN event, "" if there was none
	stderr   string // the last output of QEMU
	console  string // the last output of the guest
	answered bool   // agent-runner answered in this run
	oom      bool   // the host killed processes for lack of memory during the run
}

const maxReason = 240

// reason returns one line with the reason why QEMU ended. It contains text of the guest
// only for a kernel panic, sanitized and cut.
func (e vmExit) reason() string {
	switch {
	case e.status.Signaled() && e.status.Signal() == syscall.SIGKILL && e.oom:
		return "QEMU was killed because the host ran out of memory"
	case e.status.Signaled() && e.status.Signal() == syscall.SIGSYS:
		return "QEMU was killed by its system call filter"
	case e.status.Signaled():
		return agentlab.OneLine("QEMU was killed by "+signalName(e.status.Signal())+lastLine(": ", e.stderr), maxReason)
	case e.shutdown == "guest-shutdown":
		return "the guest powered itself off"
	case e.shutdown == "guest-panic", e.shutdown == "guest-reset":
		if p := panicText(e.console); p != "" {
			return agentlab.OneLine("guest kernel panic: "+p, maxReason)
		}
		if !e.answered {
			return "the guest reset itself before agent-runner answered"
		}
		return "the guest rebooted itself"
	case e.status.ExitStatus() != 0:
		return agentlab.OneLine("QEMU failed"+lastLine(": ", e.stderr), maxReason)
	}
	return agentlab.OneLine("QEMU ended"+lastLine(": ", e.stderr), maxReason)
}

// panicText returns the last kernel panic in the console output.
func panicText(console string) string {
	const mark = "Kernel panic - not syncing: "
	i := strings.LastIndex(console, mark)
	if i < 0 {
		return ""
	}
	text, _, _ := strings.Cut(console[i+len(mark):], "\n")
	if text = strings.TrimSpace(text); text == "" {
		return "no reason given"
	}
	return text
}

func lastLine(prefix, text string) string {
	text = strings.TrimSpace(text)
	text = text[strings.LastIndexByte(text, '\n')+1:]
	if text == "" {
		return ""
	}
	return prefix + text
}
