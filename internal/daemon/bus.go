package daemon

import (
	"sync"

	"github.com/agentlab-vm/agentlab"
)

// busBuffer is how many events may wait for a subscriber.
const busBuffer = 256

// bus sends committed events to its subscribers. It never waits: the
// subscription of a slow subscriber ends, and the subscriber reads missed
// events from the database.
type bus struct {
	mu   sync.Mutex
	subs map[chan agentlab.Event]struct{}
}

func newBus() *bus { return &bus{subs: map[chan agentlab.Event]struct{}{}} }

// publish is called by the store after each commit, in the order of commits.
func (b *bus) publish(c agentlab.Commit) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for ch := range b.subs {
		for _, e := range c.Events {
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

// Subscribe returns a channel of the events from now on, and a function that
// ends the subscription.
func (b *bus) Subscribe() (<-chan agentlab.Event, func()) {
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
