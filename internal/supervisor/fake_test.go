package supervisor

import (
	"context"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/durable"
)

// call is a call of a fakeVM.
type call struct {
	name string
	at   time.Time
}

// fakeVM is a VM without a process.
type fakeVM struct {
	wires Wires
	disk  string
	last  End              // how it ends by itself
	deaf  []string         // calls that do nothing: the VM does not end
	fail  map[string]error // results of calls

	hooks Hooks
	done  chan struct{}

	mu      sync.Mutex
	calls   []call
	policy  agentlab.Network
	console string
}

func newFakeVM() *fakeVM {
	return &fakeVM{done: make(chan struct{}), last: End{Reason: "it ended"}, policy: agentlab.Network{Mode: agentlab.NetworkNAT}}
}

// did records a call and returns its result.
func (v *fakeVM) did(name string) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.calls = append(v.calls, call{name, time.Now()})
	return v.fail[name]
}

// made returns the calls, separated by spaces.
func (v *fakeVM) made() string {
	v.mu.Lock()
	defer v.mu.Unlock()
	var out []string
	for _, c := range v.calls {
		out = append(out, c.name)
	}
	return strings.Join(out, " ")
}

// ending returns the calls after Ready, each with the time since from.
func (v *fakeVM) ending(from time.Time) string {
	v.mu.Lock()
	defer v.mu.Unlock()
	var out []string
	for _, c := range v.calls {
		if c.name != "launch" && c.name != "ready" {
			out = append(out, fmt.Sprintf("%s %s", c.name, c.at.Sub(from)))
		}
	}
	return strings.Join(out, ", ")
}

// end is a call that ends the VM.
func (v *fakeVM) end(name string) error {
	err := v.did(name)
	if err == nil && !slices.Contains(v.deaf, name) {
		v.die()
	}
	return err
}

// die ends the VM by itself.
func (v *fakeVM) die() {
	v.mu.Lock()
	defer v.mu.Unlock()
	select {
	case <-v.done:
	default:
		for _, c := range []interface{ Close() error }{v.wires.Console, v.wires.Control, v.wires.Network} {
			if c != nil {
				_ = c.Close()
			}
		}
		close(v.done)
	}
}

func (v *fakeVM) Launch(context.Context) (Wires, error) { return v.wires, v.did("launch") }
func (v *fakeVM) Ready(context.Context) error           { return v.did("ready") }
func (v *fakeVM) Done() <-chan struct{}                 { return v.done }
func (v *fakeVM) PowerButton(context.Context) error     { return v.end("button") }
func (v *fakeVM) Quit(context.Context) error            { return v.end("quit") }
func (v *fakeVM) Pause(context.Context) error           { return v.did("pause") }
func (v *fakeVM) Disks() []string                       { return []string{v.disk} }

// Kill is no call where the VM has ended.
func (v *fakeVM) Kill() {
	select {
	case <-v.done:
	default:
		_ = v.end("kill")
	}
}

func (v *fakeVM) End(s Seen) End {
	v.console = s.Console
	return v.last
}

func (v *fakeVM) Continue(context.Context) error {
	err := v.did("continue")
	if err == nil {
		v.hooks.Paused("")
	}
	return err
}

func (v *fakeVM) VMID() int { return 7 }

func (v *fakeVM) Network() agentlab.Network {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.policy
}

func (v *fakeVM) StoreNetwork(n agentlab.Network) error {
	if err := v.did("store"); err != nil {
		return err
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	v.policy = n
	return nil
}

// kinds has the fake as the backend "fake", and as that of a start.json
// without one.
func (v *fakeVM) kinds(name string) (Kind, error) {
	if name != "fake" && name != "" {
		return nil, agentlab.Errorf(agentlab.CodeInvalid, "there is no backend %q", name)
	}
	return func(_ string, h Hooks) (VM, error) {
		v.hooks = h
		return v, nil
	}, nil
}

// testDir is the directory of a VM that was never started.
func testDir(t *testing.T) Dir {
	return Dir{Path: t.TempDir(), VMID: 1001, Process: "fake", Log: slog.New(slog.DiscardHandler)}
}

// writeStart writes start.json.
func writeStart(t *testing.T, d Dir, s Start) {
	t.Helper()
	if err := durable.ReplaceJSON(filepath.Join(d.Path, fileStart), s, durable.None); err != nil {
		t.Fatal(err)
	}
}
