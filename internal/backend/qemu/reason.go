package qemu

import (
	"strings"
	"syscall"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/supervisor"
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

// end returns how the VM ended. The reason contains text of the guest only for a
// kernel panic, sanitized and cut.
func (e vmExit) end() supervisor.End {
	switch {
	case e.status.Signaled() && e.status.Signal() == syscall.SIGKILL && e.oom:
		return supervisor.End{Reason: "QEMU was killed because the host ran out of memory"}
	case e.status.Signaled() && e.status.Signal() == syscall.SIGSYS:
		return supervisor.End{Reason: "QEMU was killed by its system call filter"}
	case e.status.Signaled():
		return endOf("QEMU was killed by "+signalName(e.status.Signal()), lastLine(e.stderr))
	case e.shutdown == "guest-shutdown":
		return supervisor.End{Reason: "the guest powered itself off", PoweredOff: true}
	case e.shutdown == "guest-panic", e.shutdown == "guest-reset":
		if p := panicText(e.console); p != "" {
			return endOf("guest kernel panic", p)
		}
		if !e.answered {
			return supervisor.End{Reason: "the guest reset itself before agent-runner answered"}
		}
		return supervisor.End{Reason: "the guest rebooted itself", Rebooted: true}
	case e.status.ExitStatus() != 0:
		return endOf("QEMU failed", lastLine(e.stderr))
	}
	return endOf("QEMU ended", lastLine(e.stderr))
}

// endOf returns an end with a reason, and details if there are any.
func endOf(reason, details string) supervisor.End {
	if details != "" {
		reason += ": " + details
	}
	return supervisor.End{Reason: agentlab.OneLine(reason, maxReason)}
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

func lastLine(text string) string {
	text = strings.TrimSpace(text)
	return text[strings.LastIndexByte(text, '\n')+1:]
}
