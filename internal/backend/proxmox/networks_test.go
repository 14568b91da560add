package proxmox

import (
	"context"
	"testing"
)

// stuckHost is a network whose node does not answer.
type stuckHost struct {
	silentHost
	asked chan struct{}
}

func (h stuckHost) Restore(ctx context.Context, _ []Guest) error {
	close(h.asked)
	<-ctx.Done()
	return context.Cause(ctx)
}

// TestANodeThatDoesNotAnswerHoldsUpNoOther: what is asked of one node does not
// wait for another one.
func TestANodeThatDoesNotAnswerHoldsUpNoOther(t *testing.T) {
	stuck := stuckHost{asked: make(chan struct{})}
	d := &Driver{dir: t.TempDir(), cfg: Config{Nodes: []Node{{Name: "pve1", Host: stuck}, {Name: "pve2", Host: silentHost{}}}}}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() {
		_, err := d.network(ctx, "pve1")
		ended <- err
	}()
	<-stuck.asked
	other := make(chan error)
	go func() {
		_, err := d.network(t.Context(), "pve2")
		other <- err
	}()
	if err := <-other; err != nil {
		t.Error(err)
	}
	cancel()
	if err := <-ended; err == nil {
		t.Error("a node that did not answer was taken over")
	}
}
