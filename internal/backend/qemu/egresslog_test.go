package qemu

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/durable"
	"github.com/agentlab-vm/agentlab/internal/vmdir"
)

// egressDriver has one sandbox, of which there is nothing but its log.
func egressDriver(t *testing.T) (*Driver, backend.Ref, string) {
	t.Helper()
	dir := t.TempDir()
	d, err := New(Config{
		StateDir: dir, CacheDir: filepath.Join(dir, "cache"), Runner: "/bin/true", Supervisor: []string{"/bin/false"},
		Images: func(context.Context, string) (vmdir.ImageFiles, error) { return vmdir.ImageFiles{}, os.ErrNotExist },
	})
	if err != nil {
		t.Fatal(err)
	}
	ref := backend.Ref{UID: uid(1)}
	box := filepath.Join(d.sandboxes(), vmdir.Name(1001, ref.UID))
	if err := os.MkdirAll(box, 0o700); err != nil {
		t.Fatal(err)
	}
	h := handle{Version: vmdir.Version, Spec: backend.Spec{VMID: 1001, UID: ref.UID, Network: agentlab.Network{Mode: agentlab.NetworkNAT}}}
	if err := durable.ReplaceJSON(filepath.Join(box, vmdir.FileConfig), h, durable.None); err != nil {
		t.Fatal(err)
	}
	return d, ref, d.dir(ref)
}

func TestUpdateNetworkOfAStoppedSandbox(t *testing.T) {
	t.Parallel()
	d, ref, dir := egressDriver(t)
	n := agentlab.Network{Mode: agentlab.NetworkAllowlist, Allow: rules("site.test", "*.wild.test:443")}
	if err := d.UpdateNetwork(t.Context(), ref, n); err != nil {
		t.Fatal(err)
	}
	h, err := vmdir.ReadHandle(dir)
	if err != nil || len(h.Spec.Network.Allow) != 2 || h.Spec.Network.Mode != n.Mode {
		t.Errorf("%+v, %v", h.Spec.Network, err)
	}
	for _, bad := range []agentlab.Network{{}, {Mode: "bridge"}, {Mode: agentlab.NetworkAllowlist, Allow: rules("no rule")}} {
		if err := d.UpdateNetwork(t.Context(), ref, bad); err == nil {
			t.Errorf("%+v is taken", bad)
		}
	}
	if again, _ := vmdir.ReadHandle(dir); len(again.Spec.Network.Allow) != 2 {
		t.Errorf("a refused policy was kept: %+v", again.Spec.Network)
	}
}
