package audit_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/audit"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/fake"
	"github.com/agentlab-vm/agentlab/internal/store"
	"github.com/agentlab-vm/agentlab/internal/store/storetest"
)

// world is a database and a backend with one running sandbox.
type world struct {
	*testing.T
	path   string
	store  *store.Store
	host   *fake.Host
	driver *fake.Driver
	sb     agentlab.Sandbox
}

func newWorld(t *testing.T, change func(*agentlab.Sandbox)) *world {
	t.Helper()
	host, err := fake.NewHost(fake.Config{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = host.Close() })
	w := &world{T: t, path: filepath.Join(t.TempDir(), "agentlab.db"), host: host, driver: host.Open()}
	storetest.Create(t, w.path)
	w.open()
	t.Cleanup(func() { _ = w.store.Close() })
	sb := agentlab.Sandbox{
		UID: agentlab.NewUID(), Name: "box", Backend: "fake", Profile: "p", Image: "base@1", State: agentlab.SandboxReady,
		Desired: agentlab.DesiredRunning, Resources: agentlab.Resources{Cores: 1, MemoryMB: 512},
		Network: agentlab.Network{Mode: agentlab.NetworkNAT}, LeaseExpiresAt: time.Now().Add(time.Hour),
	}
	if change != nil {
		change(&sb)
	}
	if w.sb, err = w.store.AllocateSandbox(t.Context(), sb, agentlab.Allocation{First: 1000, Last: 2000}); err != nil {
		t.Fatal(err)
	}
	spec := backend.Spec{VMID: w.sb.VMID, UID: sb.UID, Name: sb.Name, Image: sb.Image, Resources: sb.Resources, Network: sb.Network}
	if err := errors.Join(w.driver.Create(t.Context(), spec), w.driver.Start(t.Context(), w.ref())); err != nil {
		t.Fatal(err)
	}
	return w
}

func (w *world) open() {
	w.Helper()
	var err error
	if w.store, err = store.Open(context.Background(), w.path, store.Options{}); err != nil {
		w.Fatal(err)
	}
}

func (w *world) ref() backend.Ref { return backend.RefOf(w.sb) }

func (w *world) service(l audit.Limits) *audit.Service {
	return audit.New(audit.Config{Store: w.store, Log: oneLog{w.driver}, Limits: l})
}

func (w *world) add(recs ...agentlab.EgressRecord) {
	w.Helper()
	if err := w.host.AddEgress(w.ref(), recs...); err != nil {
		w.Fatal(err)
	}
}

func (w *world) stored(f agentlab.EgressFilter) []agentlab.EgressEntry {
	w.Helper()
	out, err := w.store.Egress(w.Context(), f)
	if err != nil {
		w.Fatal(err)
	}
	return out
}

func allowed(name string) agentlab.EgressRecord {
	return agentlab.EgressRecord{Proto: "tcp", Name: name, Addr: "192.0.2.1", Port: 443, Allow: true, Rule: "mode.nat"}
}

func denied(addr string) agentlab.EgressRecord {
	return agentlab.EgressRecord{Proto: "tcp", Addr: addr, Port: 22, Rule: "always.private"}
}

func TestRunTakesLogsOver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, nil)
		s := w.service(audit.Limits{})
		changed := s.Changed()
		ctx, stop := context.WithCancel(t.Context())
		done := make(chan error)
		w.add(allowed("one.example"))
		go func() { done <- s.Run(ctx) }()
		<-changed
		if got := w.stored(agentlab.EgressFilter{}); len(got) != 1 || got[0].Name != "one.example" || got[0].UID != w.sb.UID {
			t.Errorf("%+v", got)
		}
		changed = s.Changed()
		began := time.Now()
		w.add(denied("10.0.0.1"))
		<-changed
		if waited := time.Since(began); waited > 8*time.Second {
			t.Errorf("it took %s", waited)
		}
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// A new process goes on after what the old one took over, also when the log
// was read and the commit is all that it knows.
func TestNextProcessContinues(t *testing.T) {
	w := newWorld(t, nil)
	w.add(allowed("one.example"), denied("10.0.0.1"))
	if err := w.service(audit.Limits{}).Drain(t.Context(), w.sb); err != nil {
		t.Fatal(err)
	}
	_ = w.store.Close()
	w.open()
	w.add(allowed("two.example"))
	for range 2 {
		if err := w.service(audit.Limits{}).Drain(t.Context(), w.sb); err != nil {
			t.Fatal(err)
		}
	}
	var names []string
	for _, e := range w.stored(agentlab.EgressFilter{}) {
		names = append(names, fmt.Sprint(e.Seq, e.Name, e.Addr))
	}
	if want := []string{"1one.example192.0.2.1", "210.0.0.1", "3two.example192.0.2.1"}; !reflect.DeepEqual(names, want) {
		t.Error(names)
	}
}

func TestDrainReadsEveryPageAndIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, nil)
		var recs []agentlab.EgressRecord
		for i := range 1700 {
			recs = append(recs, denied(fmt.Sprintf("10.0.%d.%d", i/250, i%250)))
		}
		w.add(recs...)
		s := w.service(audit.Limits{Drain: 3 * time.Second})
		if err := s.Drain(t.Context(), w.sb); err != nil {
			t.Fatal(err)
		}
		if got := len(w.stored(agentlab.EgressFilter{})); got != 1700 {
			t.Errorf("%d are stored", got)
		}
		// A backend that does not answer holds nothing up.
		w.host.Inject(fake.Fault{Op: fake.OpEgressLog, Block: make(chan struct{})})
		began := time.Now()
		if err := s.Drain(t.Context(), w.sb); err == nil || time.Since(began) != 3*time.Second {
			t.Errorf("%v after %s", err, time.Since(began))
		}
	})
}

func TestLimitOfRows(t *testing.T) {
	w := newWorld(t, nil)
	w.add(allowed("first.example"))
	for i := range 300 {
		w.add(denied(fmt.Sprintf("10.0.1.%d", i%250)))
	}
	w.add(allowed("last.example"))
	s := w.service(audit.Limits{Rows: 20})
	if err := s.Drain(t.Context(), w.sb); err != nil {
		t.Fatal(err)
	}
	sum, err := s.Summary(t.Context(), agentlab.EgressFilter{VMID: w.sb.VMID}, 5)
	if err != nil || sum.Allowed != 2 || sum.Denied != 20 || sum.Dropped != 280 {
		t.Errorf("%+v, %v", sum, err)
	}
}

// What a kept sandbox does after its job is not the job's doing.
func TestRecordsOfAJobEndWithIt(t *testing.T) {
	job := agentlab.Job{ID: agentlab.NewJobID(), Task: "true", Agent: "shell", Profile: "p", Mode: "dangerous", TTL: time.Hour, Status: agentlab.JobQueued}
	w := newWorld(t, func(sb *agentlab.Sandbox) { sb.JobID = job.ID })
	if err := w.store.CreateJob(t.Context(), job, nil); err != nil {
		t.Fatal(err)
	}
	s := w.service(audit.Limits{})
	s.Committed(agentlab.Commit{Sandboxes: []agentlab.Sandbox{w.sb}})
	w.add(allowed("during.example"))
	if err := s.Drain(t.Context(), w.sb); err != nil {
		t.Fatal(err)
	}
	for _, status := range []agentlab.JobStatus{agentlab.JobRunning, agentlab.JobCompleted} {
		if _, err := w.store.UpdateJob(t.Context(), job.ID, func(j *agentlab.Job) ([]agentlab.Event, error) {
			j.Status = status
			if status.Final() {
				j.FinishedAt = time.Now()
			}
			return nil, nil
		}); err != nil {
			t.Fatal(err)
		}
	}
	late := allowed("after.example")
	late.Time = time.Now().Add(time.Minute)
	w.add(late)
	list, err := s.List(t.Context(), agentlab.EgressFilter{JobID: job.ID})
	if err != nil || len(list) != 1 || list[0].Name != "during.example" {
		t.Errorf("%+v, %v", list, err)
	}
	if all := w.stored(agentlab.EgressFilter{VMID: w.sb.VMID}); len(all) != 2 {
		t.Errorf("%+v", all)
	}
}

func TestUnavailableBackendIsRetried(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, nil)
		w.host.Inject(fake.Fault{Op: fake.OpEgressLog, Times: 3, Err: agentlab.Errorf(agentlab.CodeUnavailable, "not now")})
		w.add(allowed("one.example"))
		s := w.service(audit.Limits{})
		changed := s.Changed()
		ctx, stop := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- s.Run(ctx) }()
		<-changed
		stop()
		<-done
		if got := w.stored(agentlab.EgressFilter{}); len(got) != 1 {
			t.Errorf("%+v", got)
		}
	})
}

// A log whose records are out of order, repeated or senseless does no harm.
func TestHostileRecords(t *testing.T) {
	w := newWorld(t, nil)
	log := &scripted{recs: []agentlab.EgressRecord{
		{Seq: 1, Proto: "tcp\x1b[2J", Name: "a\nb\x00\u202e.example", Addr: "10.0.0.1; rm", Port: -1, Rule: "", Count: -5, Dropped: -1, VMID: 7, Time: time.Unix(1<<40, 0)},
		{Seq: 1, Proto: "tcp", Rule: "again", Count: 1},
		{Seq: 2, Proto: "dns", Name: strings.Repeat("\xff", 5000), Addr: "fe80::1%eth0; rm", Port: 70000, Rule: agentlab.RuleAuditLimit, Error: "a\r\nb", Count: 2},
	}}
	s := audit.New(audit.Config{Store: w.store, Log: oneLog{log}})
	began := time.Now().Add(-time.Second) // the store rounds times
	if err := s.Drain(t.Context(), w.sb); err != nil {
		t.Fatal(err)
	}
	got := w.stored(agentlab.EgressFilter{})
	if len(got) != 2 {
		t.Fatalf("%+v", got)
	}
	a, b := got[0], got[1]
	if a.VMID != w.sb.VMID || a.Proto != "unknown" || a.Name != `a\010b\000\226\128\174.example` || a.Addr != "" || a.Port != 0 ||
		a.Rule != "unknown" || a.Count != 1 || a.Dropped != 0 || a.Time.Before(began) || a.Time.After(time.Now()) {
		t.Errorf("%+v", a)
	}
	if len(b.Name) > 1012 || b.Addr != "fe80::1" || b.Port != 0 || b.Rule != "unknown" || b.Error != "a b" || b.Count != 2 {
		t.Errorf("%+v", b)
	}
}

type scripted struct{ recs []agentlab.EgressRecord }

func (s *scripted) EgressLog(_ context.Context, _ backend.Ref, after int64, limit int) ([]agentlab.EgressRecord, error) {
	var out []agentlab.EgressRecord
	for _, r := range s.recs {
		if r.Seq > after && len(out) < limit {
			out = append(out, r)
		}
	}
	return out, nil
}

func TestBackendWithoutLog(t *testing.T) {
	w := newWorld(t, nil)
	s := audit.New(audit.Config{Store: w.store, Log: oneLog{}})
	s.Committed(agentlab.Commit{Sandboxes: []agentlab.Sandbox{w.sb}})
	if err := s.Drain(t.Context(), w.sb); err != nil {
		t.Error(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	stop()
	if err := s.Run(ctx); err != nil {
		t.Error(err)
	}
}

// A name that holds a secret of the job, or of a sandbox without one, is kept
// without it.
func TestNamesAreRedacted(t *testing.T) {
	for name, jobID := range map[string]string{"job": agentlab.NewJobID(), "no job": ""} {
		t.Run(name, func(t *testing.T) { namesAreRedacted(t, jobID) })
	}
}

// redactor knows one secret of one job or sandbox.
type redactor struct {
	t  *testing.T
	id string
}

func (r redactor) RedactFunc(_ context.Context, id string) func(string) string {
	if id != r.id {
		r.t.Errorf("asked for %q", id)
	}
	return func(text string) string { return strings.ReplaceAll(text, "hunter2", "[redacted]") }
}

func namesAreRedacted(t *testing.T, jobID string) {
	w := newWorld(t, func(sb *agentlab.Sandbox) { sb.JobID = jobID })
	s := audit.New(audit.Config{Store: w.store, Log: oneLog{w.driver}, Redactor: redactor{t, cmp.Or(jobID, w.sb.UID)}})
	w.add(allowed("hunter2.evil.example"), agentlab.EgressRecord{Proto: "dns", Name: "x", Rule: "mode.nat", Error: "no hunter2"})
	if err := s.Drain(t.Context(), w.sb); err != nil {
		t.Fatal(err)
	}
	got := w.stored(agentlab.EgressFilter{})
	if len(got) != 2 || got[0].Name != "[redacted].evil.example" || got[1].Error != "no [redacted]" {
		t.Errorf("%+v", got)
	}
}

// Only what is followed is looked at more often.
func TestWatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, nil)
		s := w.service(audit.Limits{Every: time.Hour, Idle: time.Hour})
		ctx, stop := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- s.Run(ctx) }()
		time.Sleep(time.Second) // the first look is over
		for _, test := range []struct {
			f    agentlab.EgressFilter
			want int // records that are stored soon
		}{{agentlab.EgressFilter{VMID: w.sb.VMID + 1}, 0}, {agentlab.EgressFilter{JobID: "job-aaaaaaaaaaaaa"}, 0}, {agentlab.EgressFilter{VMID: w.sb.VMID}, 3}, {agentlab.EgressFilter{}, 4}} {
			stopWatch := s.Watch(test.f)
			time.Sleep(10 * time.Second)
			w.add(denied("192.0.2.7"))
			time.Sleep(time.Second)
			if got := len(w.stored(agentlab.EgressFilter{})); got != test.want {
				t.Errorf("%+v: %d records, want %d", test.f, got, test.want)
			}
			stopWatch()
		}
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// oneLog is the log of the only backend.
type oneLog struct {
	log interface { // nil: it has none
		EgressLog(ctx context.Context, ref backend.Ref, after int64, limit int) ([]agentlab.EgressRecord, error)
	}
}

func (l oneLog) Logs(string) bool { return l.log != nil }

func (l oneLog) EgressLog(ctx context.Context, _ string, ref backend.Ref, after int64, limit int) ([]agentlab.EgressRecord, error) {
	return l.log.EgressLog(ctx, ref, after, limit)
}
