package audit

import (
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
)

// Sources that become due one after the other are read together: there may be thousands.
func TestReadsOfManySources(t *testing.T) {
	now := time.Unix(1e9, 0)
	s := New(Config{Store: noStore{}, Clock: func() time.Time { return now }})
	for i := range 1000 {
		src := &source{sb: subject{vmid: i}, pause: s.lim.Idle}
		src.next.Value, s.sources[i] = src, src
		s.queue.Set(&src.next, now.Add(time.Duration(i)*time.Millisecond))
	}
	looks, read := 0, 0
	for end := now.Add(s.lim.Idle); now.Before(end); looks++ {
		due, next := s.due()
		read += len(due)
		now = now.Add(next)
	}
	if most := int(s.lim.Idle / readPause); looks > most || read != len(s.sources) {
		t.Errorf("%d looks for %d reads, want at most %d for %d", looks, read, most, len(s.sources))
	}
}

// noStore is the store of a service that does not run.
type noStore struct{ Store }

func (noStore) Subscribe(func(agentlab.Commit)) {}
