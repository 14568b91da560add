package daemon

import (
	"sync"

	"github.com/agentlab-vm/agentlab"
)

// busBuffer is how many events a subscriber may lag behind.
const busBuffer = 256

// bus hands committed events to whoever listens at the moment. It never
// waits: a subscriber that lags too far is cut off, and reads from the record
// what it missed.
type bus struct {
	mu   sync.Mutex
	subs map[chan agentlab.Event]struct{}
}

func newBus() *bus { return &bus{subs: map[chan agentlab.Event]struct{}{}} }

// publish is called by the store after each commit, in the order of commits.
func (b *bus) publish(events []agentlab.Event) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for ch := range b.subs {
		for _, e := range events {
			select {
			case ch <- e:
				continue
			default:
			}
			delete(b.subs, ch)
			close(ch)
			break
		}
	}
}

// subscribe returns the events from now on, and how to end that.
func (b *bus) subscribe() (<-chan agentlab.Event, func()) {
	ch := make(chan agentlab.Event, busBuffer)
	b.mu.Lock()
	defer b.mu.Unlock()
	b.subs[ch] = struct{}{}
	return ch, func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		delete(b.subs, ch)
	}
}
