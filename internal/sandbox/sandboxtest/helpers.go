package sandboxtest

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"reflect"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/fake"
	"github.com/agentlab-vm/agentlab/internal/control"
	"github.com/agentlab-vm/agentlab/internal/stream"
)

// Stray creates a VM with our mark but without a row.
func (w *World) Stray(vmid int) backend.Ref {
	w.Helper()
	spec := backend.Spec{
		VMID: vmid, UID: agentlab.NewUID(), Name: "stray", Image: "base@sha256-1",
		Resources: agentlab.Resources{Cores: 1, MemoryMB: 512}, Network: agentlab.Network{Mode: agentlab.NetworkNAT},
	}
	if err := w.Host.Open().Create(context.Background(), spec); err != nil { // also where no daemon runs
		w.Fatal(err)
	}
	return spec.Ref()
}

// DestroyAll destroys everything and checks that nothing is left.
func (w *World) DestroyAll() {
	w.Helper()
	ctx := context.Background()
	all, err := w.Svc.List(ctx, agentlab.SandboxFilter{})
	if err != nil {
		w.Fatal(err)
	}
	for _, sb := range all {
		if _, err := w.Svc.Destroy(ctx, sb.VMID); err != nil {
			w.Fatal(err)
		}
	}
	for _, sb := range all {
		w.Until(sb.VMID, agentlab.SandboxDestroyed)
	}
	w.Empty()
}

// Empty checks that the backend has nothing.
func (w *World) Empty() {
	w.Helper()
	left, err := w.Host.Open().List(context.Background())
	if err != nil {
		w.Fatal(err)
	}
	if len(left) != 0 {
		w.Errorf("the backend still has %v", left)
	}
}

// Forked waits until the copies are READY, and checks that each continues the
// guest of src with an identity of its own.
func (w *World) Forked(src agentlab.Sandbox, made []agentlab.Sandbox) {
	w.Helper()
	boot := w.Boot(src)
	for i, sb := range made {
		got := w.Until(sb.VMID, agentlab.SandboxReady, agentlab.SandboxFailed)
		if got.State != agentlab.SandboxReady {
			w.Fatalf("%s is %s: %s", got.Name, got.State, got.Reason)
		}
		h := w.Health(got)
		if h.BootID != boot || h.Identity != got.UID || w.Sh(got, "cat file") != "one" || w.Sh(got, "hostname") != got.Name {
			w.Errorf("%s: %+v, file %q", got.Name, h, w.Sh(got, "cat file"))
		}
		w.Sh(got, fmt.Sprintf("echo %d > file", i))
	}
	if got := w.Get(src.VMID); got.State != agentlab.SandboxReady || w.Health(got).Identity != src.UID || w.Sh(got, "cat file") != "one" {
		w.Errorf("the source is %s", got.State)
	}
	w.UntilNoSnapshots()
}

// Unsynced returns the events of snapshots whose guest had not written its disks.
func (w *World) Unsynced() (texts []string) {
	for _, e := range w.Events(agentlab.EventSandboxSnapshot) {
		if strings.Contains(e.Data, `"synced":false`) {
			texts = append(texts, e.Message)
		}
	}
	return texts
}

// UntilGone lets time pass until the backend has nothing of a sandbox.
func (w *World) UntilGone(sb agentlab.Sandbox) {
	w.Helper()
	for range 60 {
		if w.Power(sb) == "" {
			return
		}
		time.Sleep(time.Second)
	}
	w.Fatalf("the VM is %s after a minute", w.Power(sb))
}

// Settle lets the loop finish what it does at this moment.
func (w *World) Settle() {
	w.Helper()
	time.Sleep(time.Second) // of the bubble
}

// HostRestart is a restart of the host with the daemon on it.
func (w *World) HostRestart() {
	w.Helper()
	w.Kill()
	if err := w.Host.Restart(); err != nil {
		w.Fatal(err)
	}
	w.Begin()
}

// Warnings returns the minutes that were left in each warning.
func (w *World) Warnings() (out []int) {
	w.Helper()
	for _, e := range w.Events(agentlab.EventSandboxLease) {
		var data struct {
			Left int `json:"minutes_left"`
		}
		if err := json.Unmarshal([]byte(e.Data), &data); err != nil {
			w.Fatal(err)
		}
		if data.Left != 0 {
			out = append(out, data.Left)
		}
	}
	return out
}

// Attach attaches to a terminal of a sandbox.
func (w *World) Attach(vmid int) net.Conn {
	w.Helper()
	conn, err := w.Svc.Attach(context.Background(), vmid, guestapi.AttachRequest{})
	if err != nil {
		w.Fatal(err)
	}
	return conn
}

// Allowlist returns a network policy that allows the names.
func Allowlist(names ...string) agentlab.Network {
	n := agentlab.Network{Mode: agentlab.NetworkAllowlist}
	for _, name := range names {
		n.Allow = append(n.Allow, agentlab.NetworkRule{Rule: name})
	}
	return n
}

// SetProfile changes the network policy of a profile.
func (w *World) SetProfile(name string, n agentlab.Network) {
	w.Profiles.Mu.Lock()
	defer w.Profiles.Mu.Unlock()
	p := w.Profiles.List[name]
	p.Network = n
	w.Profiles.List[name] = p
}

func (w *World) inForce(sb agentlab.Sandbox) agentlab.Network {
	w.Helper()
	n, err := w.Host.Network(backend.RefOf(sb))
	if err != nil {
		w.Fatal(err)
	}
	return n
}

// WantInForce checks that a sandbox has a network policy on the backend.
func (w *World) WantInForce(vmid int, want agentlab.Network) {
	w.Helper()
	sb := w.Get(vmid)
	if got := w.inForce(sb); !reflect.DeepEqual(got, want) || !reflect.DeepEqual(sb.Network, want) || sb.NetworkPending {
		w.Errorf("in force %+v; row %+v, pending %v; want %+v", got, sb.Network, sb.NetworkPending, want)
	}
}

// Pooled returns the rows of the warm pool.
func (w *World) Pooled() (out []agentlab.Sandbox) {
	w.Helper()
	all, err := w.Store.Sandboxes(context.Background(), agentlab.SandboxFilter{Destroyed: true})
	if err != nil {
		w.Fatal(err)
	}
	for _, sb := range all {
		if sb.Pooled() {
			out = append(out, sb)
		}
	}
	return out
}

// When lets time pass until cond is true for the rows of the warm pool.
func (w *World) When(what string, cond func([]agentlab.Sandbox) bool) []agentlab.Sandbox {
	w.Helper()
	for range 900 {
		synctest.Wait()
		if rows := w.Pooled(); cond(rows) {
			return rows
		}
		time.Sleep(100 * time.Millisecond) // of the bubble's time
	}
	w.Fatalf("the pool is not %s: %+v", what, w.Pooled())
	return nil
}

// Filled waits until the pool has exactly n rows, and all wait.
func (w *World) Filled(n int) []agentlab.Sandbox {
	w.Helper()
	return w.When(fmt.Sprintf("filled with %d", n), func(rows []agentlab.Sandbox) bool {
		return len(rows) == n && !slices.ContainsFunc(rows, func(sb agentlab.Sandbox) bool { return sb.State != agentlab.SandboxPooled })
	})
}

// UntilWorkspace lets time pass until a workspace is in a state.
func (w *World) UntilWorkspace(name string, state agentlab.WorkspaceState) {
	w.Helper()
	var v agentlab.Workspace
	w.Pass(func() bool { v = w.WorkspaceOf(name); return v.State == state }, func() string {
		return fmt.Sprintf("workspace %s is %s", name, v.State)
	})
}

// Crashed lets the VM of a sandbox crash until the service knows it.
func (w *World) Crashed(sb agentlab.Sandbox) agentlab.Sandbox {
	w.Helper()
	if err := w.Host.CrashVM(backend.RefOf(w.Get(sb.VMID)), "the kernel of the guest panicked"); err != nil {
		w.Fatal(err)
	}
	return w.Until(sb.VMID, agentlab.SandboxFailed)
}

// Silent is a driver whose guests accept connections and do not answer.
type Silent struct {
	*fake.Driver
	Asked chan struct{} // gets a value when a guest is called, if there is room
	Calls *atomic.Int32
}

// DialControl implements backend.Driver.
func (d Silent) DialControl(context.Context, backend.Ref) (net.Conn, error) {
	host, guest := net.Pipe()
	go func() {
		_, _ = io.Copy(io.Discard, guest) // until the caller leaves
		_ = guest.Close()
	}()
	d.Calls.Add(1)
	select {
	case d.Asked <- struct{}{}:
	default:
	}
	return host, nil
}

// Silence makes the guests of the next daemon silent.
func (w *World) Silence() Silent {
	s := Silent{Asked: make(chan struct{}), Calls: &atomic.Int32{}}
	w.Wrap = func(d backend.Driver) backend.Driver {
		s.Driver = d.(*fake.Driver)
		return s
	}
	return s
}

// WantPolicySoon narrows a policy while a guest is being asked.
func WantPolicySoon(w *World, vmid int, most time.Duration) {
	w.Helper()
	begin := time.Now()
	if err := w.Svc.NarrowNetwork(context.Background(), vmid, Allowlist("a.example")); err != nil {
		w.Fatal(err)
	}
	if took := time.Since(begin); took > most {
		w.Errorf("the policy was in force after %s, want at most %s", took, most)
	}
	w.WantInForce(vmid, agentlab.Network{Mode: agentlab.NetworkNAT, Layers: []agentlab.Network{Allowlist("a.example")}})
}

func (w *World) guest(sb agentlab.Sandbox) *control.Client {
	return control.New(func(ctx context.Context) (net.Conn, error) {
		return w.Host.Open().DialControl(ctx, backend.RefOf(sb))
	})
}

// Health asks the guest of a sandbox for its health.
func (w *World) Health(sb agentlab.Sandbox) guestapi.Health {
	w.Helper()
	h, err := w.guest(sb).Health(context.Background())
	if err != nil {
		w.Fatal(err)
	}
	return h
}

// Sh runs a script in a guest and returns what it prints.
func (w *World) Sh(sb agentlab.Sandbox, script string) string {
	w.Helper()
	c, err := w.guest(sb).Exec(context.Background(), guestapi.ExecRequest{Command: []string{"sh", "-c", script}})
	if err != nil {
		w.Fatal(err)
	}
	defer c.Close()
	var out strings.Builder
	for r := stream.NewReader(c); ; {
		typ, data, err := r.Next()
		if err != nil {
			w.Fatal(err)
		}
		switch typ {
		case stream.Stdout:
			out.Write(data)
		case stream.Exit:
			return strings.TrimSpace(out.String())
		}
	}
}

// Ready creates a sandbox and waits until it is READY.
func (w *World) Ready(name string) agentlab.Sandbox {
	w.Helper()
	return w.Until(w.Create(agentlab.SandboxRequest{Name: name}).VMID, agentlab.SandboxReady)
}

// UntilSnapshots lets time pass until the snapshots, of both kinds, are as wanted.
func (w *World) UntilSnapshots(cond func([]agentlab.Snapshot) bool) {
	w.Helper()
	for begin := time.Now(); ; time.Sleep(time.Second) {
		list, err := w.Store.Snapshots(context.Background(), agentlab.SnapshotFilter{})
		if err != nil {
			w.Fatal(err)
		}
		if cond(list) {
			return
		}
		if time.Since(begin) > 2*time.Hour {
			w.Fatalf("after two hours the snapshots are %+v", list)
		}
	}
}

// Save saves a snapshot and waits for it.
func (w *World) Save(sb agentlab.Sandbox, name string, keep bool) agentlab.Snapshot {
	w.Helper()
	n, err := w.Snaps.SaveSnapshot(context.Background(), sb.VMID, name, keep)
	if err != nil {
		w.Fatal(err)
	}
	return w.Saved(n)
}

// Saved waits until a snapshot is saved.
func (w *World) Saved(n agentlab.Snapshot) agentlab.Snapshot {
	w.Helper()
	w.UntilSnapshots(func(list []agentlab.Snapshot) bool {
		for _, now := range list {
			if now.UID == n.UID && now.State == agentlab.SnapshotReady {
				n = now
				return true
			}
		}
		return false
	})
	return n
}

// UntilNoSnapshots waits until there is no snapshot.
func (w *World) UntilNoSnapshots() {
	w.Helper()
	w.UntilSnapshots(func(list []agentlab.Snapshot) bool { return len(list) == 0 })
	left, err := w.Host.Open().Snapshots(context.Background())
	if err != nil || len(left) != 0 {
		w.Errorf("the backend still has %v, %v", left, err)
	}
}

// Crashes arms a crash of the driver's process, and returns a function that waits
// for it and restarts the daemon.
func (w *World) Crashes(op fake.Op, at fake.Point) (restart func()) {
	dead := make(chan struct{})
	w.Host.Inject(fake.Fault{Op: op, At: at, Times: 1, Crash: true, Hook: func(backend.Spec) { close(dead) }})
	return func() {
		w.Helper()
		select {
		case <-dead:
		case <-time.After(time.Hour):
			w.Fatalf("%s %s was not called", op, at)
		}
		w.Restart()
	}
}

// Must returns v, after it has failed the test if there is an error.
func Must[T any](v T, err error) func(*testing.T) T {
	return func(t *testing.T) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

// Suspended creates a sandbox and waits until it is SUSPENDED.
func (w *World) Suspended(name string) agentlab.Sandbox {
	w.Helper()
	sb := w.Create(agentlab.SandboxRequest{Name: name})
	_, err := w.Svc.Suspend(context.Background(), sb.VMID, false)
	WantCode(w.T, err, agentlab.CodeConflict) // it is not READY yet
	w.Until(sb.VMID, agentlab.SandboxReady)
	if _, err := w.Svc.Suspend(context.Background(), sb.VMID, false); err != nil {
		w.Fatal(err)
	}
	return w.Until(sb.VMID, agentlab.SandboxSuspended)
}

// SuspendToDisk suspends a sandbox to disk.
func (w *World) SuspendToDisk(sb agentlab.Sandbox) agentlab.Sandbox {
	w.Helper()
	if _, err := w.Svc.Suspend(context.Background(), sb.VMID, true); err != nil {
		w.Fatal(err)
	}
	return w.UntilIt(sb.VMID, func(sb agentlab.Sandbox) bool { return sb.OnDisk })
}

// Boot returns the ID of the current boot of a guest.
func (w *World) Boot(sb agentlab.Sandbox) string {
	w.Helper()
	return w.Health(sb).BootID
}

// WaitingEvents are the messages of events that tell why a sandbox waits.
func (w *World) WaitingEvents() (out []string) {
	for _, e := range w.Events(agentlab.EventSandboxState) {
		if strings.Contains(e.Data, `"waiting"`) {
			out = append(out, e.Message)
		}
	}
	return out
}
