package qemuvm

import (
	"strings"
	"syscall"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/supervisor"
)

// Exit describes a QEMU process that ended without a request.
type Exit struct {
	Status   syscall.WaitStatus
	Shutdown string // reason of QMP's SHUTDOWN event, "" if there was none
	Stderr   string // the last output of QEMU
	Console  string // the last output of the guest
	Answered bool   // agent-runner answered in this run
	OOM      bool   // the host killed processes for lack of memory during the run
}

// MaxReason bounds the reason of an end, in bytes.
const MaxReason = 240

// End returns how the VM ended. The reason contains text of the guest only for a
// kernel panic, sanitized and cut.
func (e Exit) End() supervisor.End {
	switch {
	case e.Status.Signaled() && e.Status.Signal() == syscall.SIGKILL && e.OOM:
		return supervisor.End{Reason: "QEMU was killed because the host ran out of memory"}
	case e.Status.Signaled() && e.Status.Signal() == syscall.SIGSYS:
		return supervisor.End{Reason: "QEMU was killed by its system call filter"}
	case e.Status.Signaled():
		return endOf("QEMU was killed by "+signalName(e.Status.Signal()), lastLine(e.Stderr))
	case e.Shutdown == "guest-shutdown":
		return supervisor.End{Reason: "the guest powered itself off", PoweredOff: true}
	case e.Shutdown == "guest-panic", e.Shutdown == "guest-reset":
		if p := panicText(e.Console); p != "" {
			return endOf("guest kernel panic", p)
		}
		if !e.Answered {
			return supervisor.End{Reason: "the guest reset itself before agent-runner answered"}
		}
		return supervisor.End{Reason: "the guest rebooted itself", Rebooted: true}
	case e.Status.ExitStatus() != 0:
		return endOf("QEMU failed", lastLine(e.Stderr))
	}
	return endOf("QEMU ended", lastLine(e.Stderr))
}

// endOf returns an end with a reason, and details if there are any.
func endOf(reason, details string) supervisor.End {
	if details != "" {
		reason += ": " + details
	}
	return supervisor.End{Reason: agentlab.OneLine(reason, MaxReason)}
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
