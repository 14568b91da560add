package qemu

import (
	"context"
	"os"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/qemuvm"
	"github.com/agentlab-vm/agentlab/internal/vmdir"
)

// A start that its caller gives up leaves a stopped sandbox, not a crash.
func TestStartIsGivenUp(t *testing.T) {
	_, f := still(t)
	qemu := script(t, "qemu", "[ \"$1\" = --version ] && { echo 'QEMU emulator version 8.0.0'; exit 0; }\nexec sleep 60")
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	d, err := New(Config{
		StateDir: f.StateDir, CacheDir: f.CacheDir, Runner: f.Runner, Supervisor: []string{self, "vmm", ""}, Accel: qemuvm.AccelTCG, QEMU: qemu,
		Images: func(context.Context, string) (vmdir.ImageFiles, error) { return f.Image, nil },
	})
	if err != nil {
		t.Fatal(err)
	}
	sp := f.spec(0)
	if err := d.Create(t.Context(), sp); err != nil {
		t.Fatal(err)
	}
	defer d.Destroy(context.Background(), sp.Ref())
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
	defer cancel()
	if err := d.Start(ctx, sp.Ref()); agentlab.CodeOf(err) != agentlab.CodeUnavailable {
		t.Errorf("%v", err)
	}
	if in, err := d.Inspect(t.Context(), sp.Ref()); err != nil || in.Power != backend.PowerStopped {
		t.Errorf("%+v, %v", in, err)
	}
}
