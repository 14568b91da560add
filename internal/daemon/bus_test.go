package daemon

import (
	"testing"

	"github.com/agentlab-vm/agentlab"
)

func TestBus(t *testing.T) {
	b := newBus()
	b.publish(agentlab.Commit{Events: []agentlab.Event{{ID: 1}}}) // no listener
	quick, stopQuick := b.Subscribe()
	slow, stopSlow := b.Subscribe()
	for i := range busBuffer + 10 {
		b.publish(agentlab.Commit{Events: []agentlab.Event{{ID: int64(i) + 2}}})
		if e := <-quick; e.ID != int64(i)+2 {
			t.Fatalf("event %d, want %d", e.ID, i+2)
		}
	}
	n := 0
	for e := range slow { // what fitted, in order, and then the end
		if n++; e.ID != int64(n)+1 {
			t.Fatalf("event %d at place %d", e.ID, n)
		}
	}
	if n != busBuffer {
		t.Errorf("the slow one has %d events, want %d", n, busBuffer)
	}
	stopSlow()
	stopQuick()
	stopQuick()
	b.publish(agentlab.Commit{Events: []agentlab.Event{{ID: 9999}}})
	select {
	case e, ok := <-quick:
		t.Errorf("after the end: %v %t", e, ok)
	default:
	}
	if len(b.subs) != 0 {
		t.Errorf("%d subscriptions are left", len(b.subs))
	}
}

// TestBusBatch cuts a subscriber off in the middle of a batch only once.
func TestBusBatch(t *testing.T) {
	b := newBus()
	ch, stop := b.Subscribe()
	defer stop()
	b.publish(agentlab.Commit{Events: make([]agentlab.Event, 3*busBuffer)})
	n := 0
	for range ch {
		n++
	}
	if n != busBuffer {
		t.Errorf("%d events", n)
	}
}
