package fake_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/backendtest"
	"github.com/agentlab-vm/agentlab/internal/backend/fake"
	"github.com/agentlab-vm/agentlab/test/guard"
)

// mutant is the fake with one sentence of the contract broken.
type mutant struct {
	*fake.Driver
	breaks string
	first  map[backend.Ref]net.Listener
}

// mutants are the broken sentences, each with the test that must find it.
var mutants = map[string]string{
	"create twice is exists":              "CreateTwice",
	"create of a renamed one is exists":   "CreateTwice",
	"create reuses what has the number":   "NumberTaken",
	"a handle is needed":                  "Handle",
	"an outdated handle leads nowhere":    "Handle",
	"contexts end connections":            "VM/Connections",
	"create starts it":                    "CreateTwice",
	"destroy of what is absent fails":     "Absent",
	"destroy ignores the mark":            "WrongMark",
	"destroy leaves it":                   "DestroyStopped",
	"inspect ignores the mark":            "WrongMark",
	"inspect cancelled is not_found":      "Cancelled",
	"list is empty":                       "CreateTwice",
	"list is twice":                       "CreateTwice",
	"list hides the half made":            "CrashPoints",
	"start twice fails":                   "VM",
	"stop does nothing":                   "VM/Stop",
	"stop waits for ever":                 "Cancelled",
	"crashed is stopped":                  "VM/Killed",
	"crash has no reason":                 "VM/Killed",
	"stopped control is not_found":        "CreateTwice",
	"guest ports are open":                "VM/DialGuest",
	"the first listener wins":             "VM/ListenGuest",
	"follow ends":                         "VM/ConsoleLog",
	"console is empty":                    "VM/ConsoleLog",
	"unsupported names no field":          "Unsupported",
	"unsupported is made":                 "Unsupported",
	"any option is taken":                 "Unsupported",
	"findings have no remedy":             "Check",
	"a console log and a hint about it":   "Info",
	"errors are foreign":                  "Cancelled",
	"foreign objects are taken":           "Foreign",
	"numbers of others are not told":      "Foreign",
	"numbers out of range are told":       "Foreign",
	"a wrong mark stops it while it runs": "VM/WrongMark",
	"any policy is taken":                 "NetworkStopped",
	"an absent sandbox is updated":        "NetworkStopped",
	"the egress log ignores its cursor":   "VM/EgressLog",
	"the egress log ignores its limit":    "VM/EgressLog",
	"a deadline is not enforced":          "VM/Deadline",
	"the same lease moves a deadline":     "VM/Deadline",
	"a saved guest is paused":             "VMSnapshots/Fork",
	"a snapshot is saved once more":       "Snapshots/Source",
	"a snapshot's disk is not copied":     "VMSnapshots/Fork",
	"any snapshot is used":                "Snapshots/From",
	"no snapshot is none":                 "Snapshots/Absent",
	"restoring does nothing":              "VMSnapshots/Suspended",
	"restoring ignores the sandbox":       "Snapshots/Source",
	"deleting ignores the sandbox":        "Snapshots/Source",
	"partial snapshots are used":          "Snapshots/CrashPoints",
	"destroy deletes snapshots":           "Snapshots/Source",
}

func (m *mutant) SetDeadline(ctx context.Context, ref backend.Ref, d backend.Deadline) error {
	switch {
	case m.breaks == "a deadline is not enforced" && d.Left > 0:
		d.Left = time.Hour
	case m.breaks == "the same lease moves a deadline":
		d.Lease = d.Lease.Add(time.Duration(time.Now().UnixNano() % 1e6))
	}
	return m.Driver.SetDeadline(ctx, ref, d)
}

func (m *mutant) UpdateNetwork(ctx context.Context, ref backend.Ref, n agentlab.Network) error {
	err := m.Driver.UpdateNetwork(ctx, ref, n)
	switch {
	case m.breaks == "any policy is taken" && agentlab.CodeOf(err) == agentlab.CodeInvalid,
		m.breaks == "an absent sandbox is updated" && agentlab.CodeOf(err) == agentlab.CodeNotFound:
		return nil
	}
	return err
}

func (m *mutant) SaveSnapshot(ctx context.Context, ref backend.Ref, uid string) (backend.Snapshot, error) {
	s, err := m.Driver.SaveSnapshot(ctx, ref, uid)
	switch {
	case m.breaks == "a sandbox with a volume is saved" && agentlab.CodeOf(err) == agentlab.CodeConflict:
		return s, nil
	case m.breaks == "a saved guest is paused" && s.Memory:
		return s, m.Suspend(ctx, ref)
	case m.breaks == "a snapshot is saved once more":
		s.Saved = time.Now()
	}
	return s, err
}

// whoseEver returns ref with the sandbox that the snapshot was saved of.
func (m *mutant) whoseEver(ctx context.Context, ref backend.SnapshotRef) backend.SnapshotRef {
	all, _ := m.Snapshots(ctx)
	for _, s := range all {
		if s.Ref.UID == ref.UID {
			return s.Ref
		}
	}
	return ref
}

func (m *mutant) RestoreSnapshot(ctx context.Context, ref backend.SnapshotRef) error {
	switch m.breaks {
	case "restoring does nothing":
		return nil
	case "restoring ignores the sandbox":
		ref = m.whoseEver(ctx, ref)
	}
	err := m.Driver.RestoreSnapshot(ctx, ref)
	if m.breaks == "a sandbox with a volume is restored" && agentlab.CodeOf(err) == agentlab.CodeConflict {
		return nil
	}
	if m.breaks == "partial snapshots are used" && agentlab.CodeOf(err) == agentlab.CodeNotFound {
		return nil
	}
	return err
}

func (m *mutant) DeleteSnapshot(ctx context.Context, ref backend.SnapshotRef) error {
	if m.breaks == "deleting ignores the sandbox" {
		ref = m.whoseEver(ctx, ref)
	}
	return m.Driver.DeleteSnapshot(ctx, ref)
}

func (m *mutant) Taken(ctx context.Context, first, last int) ([]int, error) {
	switch m.breaks {
	case "numbers of others are not told":
		return nil, ctx.Err()
	case "numbers out of range are told":
		first = 1
	}
	return m.Driver.Taken(ctx, first, last)
}

func (m *mutant) EgressLog(ctx context.Context, ref backend.Ref, after int64, limit int) ([]agentlab.EgressRecord, error) {
	switch m.breaks {
	case "the egress log ignores its cursor":
		after = 0
	case "the egress log ignores its limit":
		limit = max(limit, min(limit*1000, 1000))
	}
	return m.Driver.EgressLog(ctx, ref, after, limit)
}

func (m *mutant) Info() backend.Info {
	i := m.Driver.Info()
	if m.breaks == "a console log and a hint about it" {
		i.ConsoleHint = "look there"
	}
	return i
}

func (m *mutant) Check(ctx context.Context) []backend.Finding {
	f := m.Driver.Check(ctx)
	if m.breaks == "findings have no remedy" {
		f = append(f, backend.Finding{Name: "kvm", Level: backend.LevelError, Detail: "no /dev/kvm"})
	}
	return f
}

func (m *mutant) Validate(s backend.Spec) error {
	if m.breaks == "any option is taken" {
		s.Options = ""
	}
	err := m.Driver.Validate(s)
	if m.breaks == "unsupported names no field" && err != nil {
		return agentlab.Errorf(agentlab.CodeUnsupported, "%w", err)
	}
	return err
}

func (m *mutant) Create(ctx context.Context, s backend.Spec) error {
	in, ierr := m.Driver.Inspect(ctx, s.Ref())
	switch m.breaks {
	case "create twice is exists":
		if ierr == nil && in.Power == backend.PowerStopped {
			return agentlab.Errorf(agentlab.CodeExists, "it exists")
		}
	case "create of a renamed one is exists":
		if ierr == nil && in.Name != s.Name {
			return agentlab.Errorf(agentlab.CodeExists, "it exists with another name")
		}
	case "create reuses what has the number":
		all, _ := m.Driver.List(ctx)
		for _, in := range all {
			if in.VMID == s.VMID {
				return m.Driver.Destroy(ctx, in.Ref)
			}
		}
	case "foreign objects are taken":
		if m.Host().Foreign(s.VMID) {
			return nil
		}
	case "a snapshot's disk is not copied":
		s.From = nil
	case "unsupported is made", "unsupported names no field":
		if m.breaks == "unsupported is made" {
			s.Resources.Cores, s.Network.Mode = 1, agentlab.NetworkNAT
		}
	}
	err := m.Driver.Create(ctx, s)
	switch code := agentlab.CodeOf(err); {
	case m.breaks == "no snapshot is none" && code == agentlab.CodeNotFound:
		s.From = nil
		return m.Driver.Create(ctx, s)
	case m.breaks == "any snapshot is used" && code == agentlab.CodeInvalid:
		return nil
	}
	if m.breaks == "create starts it" && err == nil {
		return m.Driver.Start(ctx, s.Ref())
	}
	return err
}

func (m *mutant) Start(ctx context.Context, ref backend.Ref) error {
	if in, err := m.Driver.Inspect(ctx, ref); m.breaks == "start twice fails" && err == nil && in.Power == backend.PowerRunning {
		return agentlab.Errorf(agentlab.CodeInternal, "it runs")
	}
	return m.Driver.Start(ctx, ref)
}

func (m *mutant) Stop(ctx context.Context, ref backend.Ref, grace time.Duration) error {
	switch m.breaks {
	case "stop does nothing":
		_, err := m.Driver.Inspect(ctx, ref)
		return err
	case "stop waits for ever":
		if grace == time.Hour {
			time.Sleep(7 * time.Second)
		}
	case "a wrong mark stops it while it runs":
		ref = m.byHandle(ctx, ref)
	}
	return m.Driver.Stop(ctx, ref, grace)
}

// byHandle is the Ref that has the handle, whatever its mark.
func (m *mutant) byHandle(ctx context.Context, ref backend.Ref) backend.Ref {
	all, _ := m.Driver.List(ctx)
	for _, in := range all {
		if in.Ref.Handle == ref.Handle && (in.Power == backend.PowerRunning || m.breaks != "a wrong mark stops it while it runs") {
			return in.Ref
		}
	}
	return ref
}

func (m *mutant) Destroy(ctx context.Context, ref backend.Ref) error {
	m.deleteVolume(ctx, ref)
	_, err := m.Driver.Inspect(ctx, ref)
	switch m.breaks {
	case "destroy of what is absent fails":
		if err != nil {
			return err
		}
	case "destroy ignores the mark":
		ref = m.byHandle(ctx, ref)
	case "destroy leaves it":
		return nil
	case "destroy deletes snapshots":
		all, _ := m.Snapshots(ctx)
		for _, s := range all {
			_ = m.Driver.DeleteSnapshot(ctx, s.Ref)
		}
	}
	return m.Driver.Destroy(ctx, ref)
}

func (m *mutant) Inspect(ctx context.Context, ref backend.Ref) (backend.Instance, error) {
	if m.breaks == "inspect ignores the mark" {
		ref = m.byHandle(ctx, ref)
	}
	in, err := m.Driver.Inspect(ctx, ref)
	switch {
	case m.breaks == "a handle is needed" && ref.Handle == "", m.breaks == "an outdated handle leads nowhere" && ref.Handle == "nonsense":
		return in, agentlab.Errorf(agentlab.CodeNotFound, "nothing")
	case m.breaks == "inspect cancelled is not_found" && ctx.Err() != nil:
		return in, agentlab.Errorf(agentlab.CodeNotFound, "nothing")
	case m.breaks == "errors are foreign" && agentlab.CodeOf(err) == agentlab.CodeUnavailable:
		return in, agentlab.Errorf(agentlab.CodeTimeout, "too late")
	case m.breaks == "crashed is stopped" && in.Power == backend.PowerCrashed:
		in.Power = backend.PowerStopped
	case m.breaks == "crash has no reason":
		in.Reason = ""
	}
	return in, err
}

func (m *mutant) List(ctx context.Context) ([]backend.Instance, error) {
	all, err := m.Driver.List(ctx)
	switch m.breaks {
	case "list is empty":
		return nil, err
	case "list is twice":
		return append(all, all...), err
	case "list hides the half made":
		var whole []backend.Instance
		for _, in := range all {
			if in.Power != backend.PowerPartial {
				whole = append(whole, in)
			}
		}
		return whole, err
	}
	return all, err
}

func (m *mutant) DialControl(ctx context.Context, ref backend.Ref) (net.Conn, error) {
	c, err := m.Driver.DialControl(ctx, ref)
	if m.breaks == "contexts end connections" && err == nil {
		context.AfterFunc(ctx, func() { _ = c.Close() })
	}
	if m.breaks == "stopped control is not_found" && err != nil && ctx.Err() == nil {
		return nil, agentlab.Errorf(agentlab.CodeNotFound, "nothing")
	}
	return c, err
}

func (m *mutant) DialGuest(ctx context.Context, ref backend.Ref, port uint16) (net.Conn, error) {
	c, err := m.Driver.DialGuest(ctx, ref, port)
	if m.breaks == "guest ports are open" && port == 1 {
		return m.Driver.DialGuest(ctx, ref, 22)
	}
	return c, err
}

func (m *mutant) ListenGuest(ctx context.Context, ref backend.Ref) (net.Listener, error) {
	if m.breaks == "the first listener wins" && m.first[ref] != nil {
		return deaf{make(chan struct{})}, nil
	}
	l, err := m.Driver.ListenGuest(ctx, ref)
	if err == nil {
		m.first[ref] = l
	}
	return l, err
}

// deaf is a listener without connections.
type deaf struct{ done chan struct{} }

func (d deaf) Accept() (net.Conn, error) { <-d.done; return nil, net.ErrClosed }
func (d deaf) Addr() net.Addr            { return &net.TCPAddr{} }
func (d deaf) Close() error {
	select {
	case <-d.done:
	default:
		close(d.done)
	}
	return nil
}

func (m *mutant) ConsoleLog(ctx context.Context, ref backend.Ref, follow bool) (io.ReadCloser, error) {
	rc, err := m.Driver.ConsoleLog(ctx, ref, follow && m.breaks != "follow ends")
	if m.breaks == "console is empty" && err == nil {
		return io.NopCloser(strings.NewReader("")), rc.Close()
	}
	return rc, err
}

const mutantEnv = "AGENTLAB_TEST_MUTANT"

// TestMutant is run by TestSuiteDetectsMutants, in a process of its own.
func TestMutant(t *testing.T) {
	breaks := os.Getenv(mutantEnv)
	if breaks == "" {
		t.Skip("skipped: it is a part of TestSuiteDetectsMutants")
	}
	backendtest.Run(t, backendtest.Config{Patience: 3 * time.Second, New: func(t *testing.T) *backendtest.Harness {
		host, err := fake.NewHost(fake.Config{})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = host.Close() })
		open := func() *mutant {
			return &mutant{Driver: host.Open(), breaks: breaks, first: map[backend.Ref]net.Listener{}}
		}
		h := harness(t, host.Open)
		h.Driver = open()
		h.Reopen = func(*testing.T) backend.Driver { return open() }
		return h
	}})
}

// TestSuiteDetectsMutants breaks one sentence of the contract after the other
// and checks that the suite fails, in the test that is for it.
func TestSuiteDetectsMutants(t *testing.T) {
	maps.Copy(mutants, volumeMutants)
	for breaks, where := range mutants {
		t.Run(breaks, func(t *testing.T) {
			t.Parallel()
			// A busy host delays the tests that are not about this sentence.
			only := "^TestMutant$/^" + strings.ReplaceAll(where, "/", "$/^") + "$"
			cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run="+only, "-test.v", "-test.timeout="+guard.Patience.String())
			cmd.Env = append(os.Environ(), mutantEnv+"="+breaks)
			out, err := cmd.CombinedOutput()
			exit := (*exec.ExitError)(nil)
			if !errors.As(err, &exit) {
				t.Fatalf("the suite passes (%v)", err)
			}
			if want := fmt.Sprintf("--- FAIL: TestMutant/%s", where); !strings.Contains(string(out), want) {
				t.Errorf("the suite fails, but not in %s:\n%s", where, out)
			}
		})
	}
}
