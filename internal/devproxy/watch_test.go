package devproxy

import (
	"fmt"
	"testing"

	"github.com/agentlab-vm/agentlab/guestapi"
)

// Of many guests only the few that changed last wait with their answers. The
// ports of all others are found, too.
func TestCrowd(t *testing.T) {
	const guests, most = 9, 2
	w := &world{t: t, guests: map[int]*guestWorld{}, changed: make(chan struct{}), maxHeld: most}
	w.start("")
	var ports []uint16
	for i := range guests {
		ports = append(ports, freePort(t))
		w.add(1001+i, fmt.Sprintf("shop-%d", i))
		w.listen(1001+i, guestapi.Listener{Port: ports[i]}, "127.0.0.1:1")
	}
	for i, port := range ports {
		w.served(1001+i, port)
	}
	w.change(func() { w.now = w.now.Add(1) })
	first := freePort(t)
	w.listen(1001, guestapi.Listener{Port: first}, "127.0.0.1:1") // the oldest one
	w.served(1001, first)
	w.until("the guest that has changed waits with its answer", func() bool {
		w.s.mu.Lock()
		defer w.s.mu.Unlock()
		at := w.s.watchers["uid1001"]
		return at.held && at.cancel != nil
	})
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.mostHeld > most || w.held == 0 {
		t.Errorf("%d guests waited with their answers at the same time, %d do; want at most %d", w.mostHeld, w.held, most)
	}
}

// An answer that changes nothing does not make the service read all sandboxes again.
func TestAnswerWithoutChange(t *testing.T) {
	w := newWorld(t, "")
	port := freePort(t)
	w.add(1001, "shop")
	w.listen(1001, guestapi.Listener{Port: port}, "127.0.0.1:1")
	w.served(1001, port)
	lists := func() int {
		w.mu.Lock()
		defer w.mu.Unlock()
		return w.lists
	}
	before := lists()
	for range 4 {
		w.mu.Lock()
		w.guests[1001].state++ // of a socket that is not one of its listeners
		close(w.changed)
		w.changed = make(chan struct{})
		asked := w.asked
		w.mu.Unlock()
		w.until("the guest is asked again", func() bool {
			w.mu.Lock()
			defer w.mu.Unlock()
			return w.asked > asked
		})
	}
	if got := lists() - before; got > 2 { // of the changes before
		t.Errorf("the sandboxes were read %d times", got)
	}
}

// Changed listeners do not make the service read all sandboxes again: it has read them,
// and there may be thousands.
func TestChangedListenersReadNoSandboxes(t *testing.T) {
	w := newWorld(t, "")
	port := freePort(t)
	w.add(1001, "shop")
	w.listen(1001, guestapi.Listener{Port: port}, "127.0.0.1:1")
	w.served(1001, port)
	lists := func() int {
		w.mu.Lock()
		defer w.mu.Unlock()
		return w.lists
	}
	before := lists()
	const changes = 4
	for range changes {
		port = freePort(t)
		w.mu.Lock()
		g := w.guests[1001]
		g.state++
		g.listeners = []guestapi.Listener{{Port: port}}
		g.dial[port] = "127.0.0.1:1"
		close(w.changed)
		w.changed = make(chan struct{})
		w.mu.Unlock()
		w.served(1001, port)
		w.until("Run has handled the change", func() bool { return len(w.s.wake) == 0 })
	}
	if got := lists() - before; got > 2 { // of the changes before
		t.Errorf("the sandboxes were read %d times for %d changes", got, changes)
	}
}
