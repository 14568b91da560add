package qemuvm

import (
	"strings"
	"syscall"
	"testing"

	"github.com/agentlab-vm/agentlab"
)

func TestReason(t *testing.T) {
	exited := func(code int) syscall.WaitStatus { return syscall.WaitStatus(code << 8) }
	killed := func(s syscall.Signal) syscall.WaitStatus { return syscall.WaitStatus(s) }
	for _, test := range []struct {
		e    Exit
		want string
	}{
		{Exit{Status: killed(syscall.SIGKILL)}, "QEMU was killed by SIGKILL"},
		{Exit{Status: killed(syscall.SIGKILL), OOM: true}, "QEMU was killed because the host ran out of memory"},
		{Exit{Status: killed(syscall.SIGSYS)}, "QEMU was killed by its system call filter"},
		{Exit{Status: killed(syscall.SIGABRT), Stderr: "a\nassertion failed\n"}, "QEMU was killed by SIGABRT: assertion failed"},
		{Exit{Status: exited(1), Stderr: "qemu: no such disk\n"}, "QEMU failed: qemu: no such disk"},
		{Exit{Status: exited(1)}, "QEMU failed"},
		{Exit{Shutdown: "guest-shutdown"}, "the guest powered itself off"},
		{Exit{Shutdown: "guest-reset"}, "the guest reset itself before agent-runner answered"},
		{Exit{Shutdown: "guest-reset", Answered: true}, "the guest rebooted itself"},
		{
			Exit{Shutdown: "guest-reset", Console: "[1.0] Kernel panic - not syncing: VFS: \x1b[31mno\x07 root\r\n[2.0] next"},
			"guest kernel panic: VFS: [31mno root",
		},
		{Exit{Shutdown: "guest-reset", Console: "Kernel panic - not syncing: "}, "guest kernel panic: no reason given"},
		{Exit{Shutdown: "host-qmp-quit"}, "QEMU ended"},
		{Exit{Status: exited(1), Stderr: strings.Repeat("ü", 1000)}, "QEMU failed: " + strings.Repeat("ü", 113) + "…"},
	} {
		if got := test.e.End().Reason; got != test.want {
			t.Errorf("%+v: %q, want %q", test.e, got, test.want)
		}
		if e := test.e.End(); e.PoweredOff != (test.want == "the guest powered itself off") || e.Rebooted != (test.want == "the guest rebooted itself") {
			t.Errorf("%+v: %+v", test.e, e)
		}
	}
}

func FuzzReason(f *testing.F) {
	f.Add("Kernel panic - not syncing: x\n", "y")
	f.Add("Kernel panic - not syncing: \xff\x00", "\n\n")
	f.Fuzz(func(t *testing.T, console, stderr string) {
		for _, e := range []Exit{{Shutdown: "guest-reset", Console: console}, {Status: 0x100, Stderr: stderr}} {
			got := e.End().Reason
			if got == "" || len(got) > MaxReason+len("…") || !agentlab.IsPrintable(got) {
				t.Errorf("reason %q", got)
			}
		}
	})
}
