package fake

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

// Op names a method of the driver.
type Op string

// The methods that can be made to fail.
const (
	OpCreate      Op = "create"
	OpStart       Op = "start"
	OpStop        Op = "stop"
	OpSuspend     Op = "suspend"
	OpResume      Op = "resume"
	OpDestroy     Op = "destroy"
	OpInspect     Op = "inspect"
	OpList        Op = "list"
	OpTaken       Op = "taken"
	OpDialControl Op = "dial_control"
	OpDialGuest   Op = "dial_guest"
	OpListenGuest Op = "listen_guest"
	OpConsoleLog  Op = "console_log"
	OpEgressLog   Op = "egress_log"

	OpRecordEgress Op = "record_egress"

	OpUpdateNetwork Op = "update_network"
	OpSetDeadline   Op = "set_deadline"
	OpSuspendToDisk Op = "suspend_to_disk"

	OpSaveSnapshot    Op = "save_snapshot"
	OpRestoreSnapshot Op = "restore_snapshot"
	OpDeleteSnapshot  Op = "delete_snapshot"
	OpSnapshots       Op = "snapshots"

	OpWarmTemplate   Op = "warm_template"
	OpTemplates      Op = "templates"
	OpDeleteTemplate Op = "delete_template"
	OpMemory         Op = "memory"

	OpCreateVolume         Op = "create_volume"
	OpDeleteVolume         Op = "delete_volume"
	OpGrowVolume           Op = "grow_volume"
	OpInspectVolume        Op = "inspect_volume"
	OpListVolumes          Op = "list_volumes"
	OpAttachVolume         Op = "attach_volume"
	OpDetachVolume         Op = "detach_volume"
	OpSnapshotVolume       Op = "snapshot_volume"
	OpVolumeSnapshots      Op = "volume_snapshots"
	OpRestoreVolume        Op = "restore_volume"
	OpCloneVolume          Op = "clone_volume" // from a volume or a snapshot
	OpDeleteVolumeSnapshot Op = "delete_volume_snapshot"

	OpRoom Op = "room"
)

// Point is a point in a method.
type Point string

// The points. Half exists in Create (the mark exists, the disk does not), Stop
// (the guest was asked), Destroy (the VM is deleted, the disk is not), SaveSnapshot and
// DeleteSnapshot (the snapshot is partial), RestoreSnapshot (the sandbox is), and in
// the methods that create, delete or restore a volume or a snapshot of one (it is).
const (
	Before Point = "before" // nothing was done
	Half   Point = "half"   // a part was done
	After  Point = "after"  // everything was done; only the answer is missing
)

// Fault makes a method fail, wait or crash. Zero fields match everything and
// have no effect.
type Fault struct {
	Op    Op
	At    Point // default Before
	Times int   // how often; 0: until removed

	Delay time.Duration      // wait this long first
	Block <-chan struct{}    // wait until it is closed, or the context ends
	Hook  func(backend.Spec) // its argument has at least the UID of the sandbox, or else of the volume
	Err   error              // then fail with this
	Crash bool               // then the driver's process crashes: this and every later call fails until Open
}

// faults is the list of armed faults.
type faults struct {
	mu    sync.Mutex
	armed []*Fault
	hits  map[Op]int
}

// Inject arms a fault; remove removes it. The first matching fault in the
// order of Inject applies.
func (h *Host) Inject(f Fault) (remove func()) {
	if f.At == "" {
		f.At = Before
	}
	p := &f
	h.faults.mu.Lock()
	defer h.faults.mu.Unlock()
	h.faults.armed = append(h.faults.armed, p)
	return func() {
		h.faults.mu.Lock()
		defer h.faults.mu.Unlock()
		h.faults.armed = slices.DeleteFunc(h.faults.armed, func(q *Fault) bool { return q == p })
	}
}

// Calls returns how often a method was called since the creation of the host.
func (h *Host) Calls(op Op) int {
	h.faults.mu.Lock()
	defer h.faults.mu.Unlock()
	return h.faults.hits[op]
}

func (f *faults) count(op Op) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.hits == nil {
		f.hits = map[Op]int{}
	}
	f.hits[op]++
}

// take returns the first matching fault and decrements its count.
func (f *faults) take(op Op, at Point) *Fault {
	f.mu.Lock()
	defer f.mu.Unlock()
	for i, p := range f.armed {
		if p.Op != op || p.At != at {
			continue
		}
		if p.Times > 0 {
			if p.Times--; p.Times == 0 {
				f.armed = slices.Delete(f.armed, i, i+1)
			}
		}
		return p
	}
	return nil
}

// point is called at every point where a method can fail. It returns nil if
// the method continues.
func (d *Driver) point(ctx context.Context, op Op, at Point, ref backend.Ref) error {
	spec := backend.Spec{UID: ref.UID}
	if in, err := d.h.find(ref); err == nil {
		spec = in.rec.Spec // never changes
	}
	return d.pointOf(ctx, op, at, spec)
}

func (d *Driver) pointOf(ctx context.Context, op Op, at Point, spec backend.Spec) error {
	if at == Before {
		d.h.faults.count(op)
	}
	if err := d.alive(ctx); err != nil {
		return err
	}
	f := d.h.faults.take(op, at)
	if f == nil {
		return nil
	}
	if f.Delay > 0 {
		if err := sleep(ctx, f.Delay); err != nil {
			return cancelled(err)
		}
	}
	if f.Block != nil {
		select {
		case <-f.Block:
		case <-ctx.Done():
			return cancelled(ctx.Err())
		}
	}
	if f.Hook != nil {
		f.Hook(spec)
	}
	if f.Crash {
		d.die()
	}
	if err := d.alive(ctx); err != nil {
		return err
	}
	return f.Err
}

func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func cancelled(err error) error {
	return agentlab.Errorf(agentlab.CodeUnavailable, "given up: %w", err)
}
