package doctor

import (
	"context"
	"encoding/json"
	"testing"

	"github.com/agentlab-vm/agentlab/internal/fleet"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

// many is a driver with more sandboxes than can be asked in time.
type many struct {
	*host
	backend.Host
	asked int
	last  context.CancelFunc // ends the call after three
}

func (*many) Accel(context.Context) string { return "" }

func (m *many) List(context.Context) ([]backend.Instance, error) {
	list := []backend.Instance{{VMID: 1, Power: backend.PowerStopped}}
	for n := range 1000 {
		list = append(list, backend.Instance{Ref: backend.Ref{UID: "uid"}, VMID: 2 + n, Power: backend.PowerRunning})
	}
	return list, nil
}

func (m *many) Memory(context.Context, backend.Ref) (backend.Memory, error) {
	m.asked++
	switch m.asked {
	case 2:
		return backend.Memory{}, agentlab.Errorf(agentlab.CodeConflict, "it has just ended")
	case 4:
		m.last()
	}
	return backend.Memory{Unique: 1, Shared: 2, Proportional: 3}, nil
}

// A status has the memory of the sandboxes that could be read in time.
func TestStatusMemory(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	m := &many{host: &host{}, last: cancel}
	s := newDoctor(t, m.host, func(c *Config) { c.Fleet = fleet.Single(m, nil) })
	got := s.memory(ctx)
	if len(got) != 3 || got[0].VMID != 2 || got[1].VMID != 4 || got[0].UniqueBytes != 1 || got[0].SharedBytes != 2 || got[0].ProportionalBytes != 3 {
		t.Errorf("%+v", got)
	}
	if unique, shared, err := newDoctor(t, &host{}, func(c *Config) { c.Fleet = fleet.Single(&many{host: &host{}, last: func() {}}, nil) }).VMMemory(t.Context()); unique != 999 || shared != 999*2 || err != nil {
		t.Errorf("%d unique, %d shared, %v", unique, shared, err)
	}
	if m.asked != 4 {
		t.Errorf("%d were asked", m.asked)
	}
	if got := newDoctor(t, &host{}, nil).memory(t.Context()); got == nil || len(got) != 0 {
		t.Errorf("a backend that does not know it has %#v", got)
	}
}

// The size of a status does not grow with the number of sandboxes: it lists the
// largest ones, and the total of all.
func TestStatusMemoryIsBounded(t *testing.T) {
	s := newDoctor(t, &host{}, func(c *Config) { c.Fleet = fleet.Single(&uneven{&many{host: &host{}, last: func() {}}}, nil) })
	got, err := s.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if n := len(got.Memory); n != memoryListed || got.Memory[0].UniqueBytes != 1000 || got.Memory[n-1].UniqueBytes != 1000-memoryListed+1 {
		t.Errorf("%d are listed: %+v", n, got.Memory)
	}
	if want := (api.MemoryTotal{Sandboxes: 1000, UniqueBytes: 1000 * 1001 / 2}); got.MemoryTotal != want {
		t.Errorf("total %+v, want %+v", got.MemoryTotal, want)
	}
	if text, err := json.Marshal(got); err != nil || len(text) > 10<<10 {
		t.Errorf("it has %d bytes, %v", len(text), err)
	}
}

// uneven is a driver of which each sandbox has more memory than the one before.
type uneven struct{ *many }

func (m *uneven) Memory(context.Context, backend.Ref) (backend.Memory, error) {
	m.asked++
	return backend.Memory{Unique: int64(m.asked)}, nil
}
