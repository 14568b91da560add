package qemu

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

// egressDriver has one sandbox, of which there is nothing but its log.
func egressDriver(t *testing.T) (*Driver, backend.Ref, string) {
	t.Helper()
	dir := t.TempDir()
	d, err := New(Config{
		StateDir: dir, CacheDir: filepath.Join(dir, "cache"), Runner: "/bin/true", Shim: []string{"/bin/false"},
		Images: func(context.Context, string) (ImageFiles, error) { return ImageFiles{}, os.ErrNotExist },
	})
	if err != nil {
		t.Fatal(err)
	}
	ref := backend.Ref{VMID: 1001, UID: uid(1)}
	if err := os.MkdirAll(d.dir(ref), 0o700); err != nil {
		t.Fatal(err)
	}
	h := handle{Version: handleVersion, Spec: backend.Spec{VMID: ref.VMID, UID: ref.UID, Network: agentlab.Network{Mode: agentlab.NetworkNAT}}}
	if err := writeJSON(filepath.Join(d.dir(ref), fileConfig), h); err != nil {
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
	h, err := readHandle(dir)
	if err != nil || len(h.Spec.Network.Allow) != 2 || h.Spec.Network.Mode != n.Mode {
		t.Errorf("%+v, %v", h.Spec.Network, err)
	}
	for _, bad := range []agentlab.Network{{}, {Mode: "bridge"}, {Mode: agentlab.NetworkAllowlist, Allow: rules("no rule")}} {
		if err := d.UpdateNetwork(t.Context(), ref, bad); err == nil {
			t.Errorf("%+v is taken", bad)
		}
	}
	if again, _ := readHandle(dir); len(again.Spec.Network.Allow) != 2 {
		t.Errorf("a refused policy was kept: %+v", again.Spec.Network)
	}
	// A supervisor that does not answer: an error, and nothing is changed.
	lock, err := d.takeShimLock(dir)
	if err != nil || lock == nil {
		t.Fatalf("%v, %v", lock, err)
	}
	defer func() { _ = lock.Close() }()
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if err := d.UpdateNetwork(ctx, ref, agentlab.Network{Mode: agentlab.NetworkOff}); agentlab.CodeOf(err) != agentlab.CodeUnavailable {
		t.Errorf("without an answer: %v", err)
	}
	if again, _ := readHandle(dir); again.Spec.Network.Mode != agentlab.NetworkAllowlist {
		t.Errorf("an unanswered policy was kept: %+v", again.Spec.Network)
	}
}

// A change that is held up until its asker has given up is not made: it would
// undo what was asked for since.
func TestALateChangeOfTheNetworkIsNotMade(t *testing.T) {
	t.Parallel()
	_, _, dir := egressDriver(t)
	h, err := readHandle(dir)
	if err != nil {
		t.Fatal(err)
	}
	m := &machine{dir: dir, handle: h}
	s := &shim{dir: dir, vm: m}
	gone, leave := context.WithCancel(t.Context())
	leave()
	s.netMu.Lock() // an earlier change waits for the disk
	late := make(chan error)
	go func() { late <- s.setNetwork(gone, agentlab.Network{Mode: agentlab.NetworkNAT}) }()
	s.netMu.Unlock()
	if err := <-late; agentlab.CodeOf(err) != agentlab.CodeUnavailable {
		t.Errorf("the late change: %v", err)
	}
	if err := s.setNetwork(t.Context(), agentlab.Network{Mode: agentlab.NetworkOff}); err != nil {
		t.Fatal(err)
	}
	if h, err = readHandle(dir); err != nil || h.Spec.Network.Mode != agentlab.NetworkOff || m.Network().Mode != agentlab.NetworkOff {
		t.Errorf("%+v, %v", h.Spec.Network, err)
	}
}
