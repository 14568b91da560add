package pvenode

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"time"
)

// Fault is what happens at a point of the node.
//
// Points of calls are "METHOD path", with the path of the API's table, e.g.
// "POST /nodes/{node}/qemu/{vmid}/clone", before the call is executed; with "
// done" appended, after it. "*" means every call.
//
// Points of workers are the type of the task ("qmclone": before its work,
// "qmclone.done": after it) and the steps listed at Points.
type Fault struct {
	// Log are lines that a worker says first.
	Log []string
	// Error makes the work fail with this text there, as the real one does:
	// it cleans up as its code does.
	Error string
	// Status is the HTTP status of a call's Error; 0 is 500.
	Status int
	// Delay is waited before anything else of this fault.
	Delay time.Duration
	// Hold is waited for before anything else of this fault.
	Hold <-chan struct{}
	// Reached, when not nil, is called when the point is reached.
	Reached func()
	// Lost cuts the connection of a call: without an answer, and before the
	// work or, at a " done" point, after it.
	Lost bool
	// Kill kills the worker: nothing is cleaned up, its task has the status
	// "unexpected status", and its lock: property stays.
	Kill bool
	// VMID limits the fault to calls and workers of one VM; 0 is any.
	VMID int
	// Times is how often it happens: 0 is once, a negative number always.
	Times int
}

// Points are the steps of workers and of lists at which a Fault may happen,
// beside the types of tasks. Fail rejects other steps.
var Points = []string{
	"clone.stub",         // the stub with lock: clone is there, no volume made
	"clone.volume",       // before each volume
	"clone.config",       // the config was written after a volume was made
	"clone.volumes",      // all volumes are made, the config still has lock: clone
	"clone.finish",       // the final config is written, the lock of the source still held
	"start.cloudinit",    // before the seed image is made
	"start.qemu",         // before QEMU is started
	"start.running",      // it runs, the task not yet over
	"suspend.state",      // the state volume is there, the memory not saved
	"stop.qemu",          // before QEMU is stopped
	"shutdown.wait",      // the guest was asked
	"destroy.volumes",    // before the first volume is freed
	"destroy.volume",     // before each volume is freed
	"destroy.config",     // volumes are freed, the config is still as it was
	"destroy.zombie",     // a config with lock: destroyed alone is left, pool and ACLs are forgotten
	"config.apply",       // before changes of a config are applied
	"alloc",              // before a volume is made, on any storage
	"free",               // before a volume is freed
	"zvol.wait",          // the device of a missing zvol is waited for
	"resize.volume",      // before a volume is grown
	"snapshot.alloc",     // the volume for the memory is there, no config has it
	"snapshot.state",     // before the memory is saved
	"snapshot.volume",    // before each volume's snapshot
	"snapshot.commit",    // all is saved, the config still has lock: snapshot
	"delsnapshot.volume", // before each volume's snapshot is deleted
	"rollback.volume",    // before each volume is rolled back
	"rollback.config",    // all are rolled back, the config is still as it was
	"rollback.start",     // the config is that of the snapshot, its memory not loaded yet
	"move.renamed",       // the volume has its new name, the configs not
	"fork",               // of any call that begins a task, before its worker is there
	"list.config",        // in a list of VMs, before each VM's config is read
	"list.volume",        // in a list of a dir storage, before each volume is read
}

type faults struct {
	mu  sync.Mutex
	all []*armed
}

type armed struct {
	point string
	Fault
	left int
}

// Fail arms a fault at a point and returns what disarms it. It panics if the
// point is written like a step ("clone.volume") and is not in Points.
func (n *Node) Fail(point string, f Fault) (disarm func()) {
	call := strings.Contains(point, " ") || strings.HasPrefix(point, "*")
	worker := !strings.Contains(point, ".") || strings.HasSuffix(point, ".done")
	if !call && !worker && !slices.Contains(Points, point) {
		panic("no step " + point)
	}
	a := &armed{point: point, Fault: f, left: f.Times}
	if a.left == 0 {
		a.left = 1
	}
	n.faults.mu.Lock()
	defer n.faults.mu.Unlock()
	n.faults.all = append(n.faults.all, a)
	return func() {
		n.faults.mu.Lock()
		defer n.faults.mu.Unlock()
		a.left = 0
	}
}

// due takes the fault that happens at a point now.
func (f *faults) due(vmid int, points ...string) *armed {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, a := range f.all {
		if a.left == 0 || (a.VMID != 0 && a.VMID != vmid) {
			continue
		}
		for _, p := range points {
			if a.point == p {
				if a.left > 0 {
					a.left--
				}
				return a
			}
		}
	}
	return nil
}

func (c *call) vmid() int {
	if c.p.has("newid") {
		return c.p.num("newid")
	}
	return c.p.num("vmid")
}

// point is a step of a worker.
func (n *Node) point(c *call, name string) *Error { return n.pointOf(c, c.vmid(), name) }

// pointOf is point for a step that is about another VM than its call.
func (n *Node) pointOf(c *call, vmid int, name string) *Error {
	if a := n.faults.due(vmid, name); a != nil {
		c.happen(a)
		for _, line := range a.Log {
			c.say("%s", line)
		}
		if a.Kill {
			panic(killed{})
		}
		if a.Error != "" {
			return dief("%s", a.Error)
		}
	}
	return c.interrupted()
}

// interrupted stops a worker; after a power failure it
// dies at once.
func (c *call) interrupted() *Error {
	if c.task == nil || c.ctx.Err() == nil {
		return nil
	}
	if errors.Is(context.Cause(c.ctx), errRestart) {
		panic(killed{})
	}
	return dief("received interrupt")
}

func (c *call) happen(a *armed) {
	if a.Reached != nil {
		a.Reached()
	}
	if a.Hold != nil {
		select {
		case <-a.Hold:
		case <-c.ctx.Done():
		}
	}
	_ = c.interrupted()
	c.pause(a.Delay)
}

// errLost is answered by cutting the connection.
var errLost = &Error{Status: -1, Message: "connection lost"}

// callPoint is the point before or after a call.
func (n *Node) callPoint(c *call, method string, done bool) *Error {
	suffix := ""
	if done {
		suffix = " done"
	}
	a := n.faults.due(c.vmid(), method+" "+c.ep.path+suffix, "*"+suffix)
	if a == nil {
		return nil
	}
	c.happen(a)
	switch {
	case a.Lost:
		return errLost
	case a.Error != "" || a.Status != 0:
		e := dief("%s", a.Error)
		if a.Status != 0 {
			e.Status = a.Status
		}
		return e
	}
	return nil
}

// counters count calls.
type counters struct {
	mu    sync.Mutex
	calls map[string]int
	total int64 // since the node began
}

func (k *counters) init() { k.calls = map[string]int{} }

// enter counts a call and returns its number.
func (k *counters) enter(method, path string) int64 {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.calls[method+" "+path]++
	k.total++
	return k.total
}

// Calls returns how often each call of the API was made, by "METHOD path" with
// the path as the API's table has it.
func (n *Node) Calls() map[string]int {
	n.count.mu.Lock()
	defer n.count.mu.Unlock()
	out := map[string]int{}
	for k, v := range n.count.calls {
		out[k] = v
	}
	return out
}

// TotalCalls returns how many calls of the API were made.
func (n *Node) TotalCalls() int {
	total := 0
	for _, v := range n.Calls() {
		total += v
	}
	return total
}

// ResetCalls sets the counters to zero.
func (n *Node) ResetCalls() {
	n.count.mu.Lock()
	defer n.count.mu.Unlock()
	n.count.calls = map[string]int{}
}
