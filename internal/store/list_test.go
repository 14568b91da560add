package store

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/agentlab-vm/agentlab"
)

// drive moves a sandbox through states, each allowed after the one before.
func drive(t testing.TB, s *testStore, vmid int, states ...agentlab.SandboxState) {
	t.Helper()
	for _, next := range states {
		must(s.UpdateSandbox(t.Context(), vmid, func(sb *agentlab.Sandbox) ([]agentlab.Event, error) { sb.State = next; return nil, nil }))(t)
	}
}

func TestAllocateIsUniqueUnderConcurrency(t *testing.T) {
	ctx := t.Context()
	s := newStore(t)
	const n, room = 60, 40
	var wg sync.WaitGroup
	var mu sync.Mutex
	codes := map[agentlab.Code]int{}
	vmids := map[int]bool{}
	for i := range n {
		wg.Go(func() {
			name := fmt.Sprintf("box-%d", i%50) // ten names are wanted twice
			sb, err := s.AllocateSandbox(ctx, newSandbox(name), agentlab.Allocation{First: 100, Last: 199, MaxLive: room}, agentlab.Event{Kind: agentlab.EventSandboxCreated})
			mu.Lock()
			defer mu.Unlock()
			codes[agentlab.CodeOf(err)]++
			if err == nil && vmids[sb.VMID] {
				t.Errorf("number %d twice", sb.VMID)
			}
			vmids[sb.VMID] = true
		})
	}
	wg.Wait()
	if codes[""] != room || codes[""]+codes[agentlab.CodeExists]+codes[agentlab.CodeLimit] != n {
		t.Errorf("outcomes %v", codes)
	}
	list := must(s.Sandboxes(ctx, agentlab.SandboxFilter{}))(t)
	names := map[string]bool{}
	for _, sb := range list {
		names[sb.Name] = true
	}
	if len(list) != room || len(names) != room {
		t.Errorf("%d sandboxes with %d names", len(list), len(names))
	}
	if evs := must(s.Events(ctx, agentlab.EventFilter{}))(t); len(evs) != room || !reflect.DeepEqual(evs, s.seen) {
		t.Errorf("%d events stored, %d seen, in another order", len(evs), len(s.seen))
	}
}

func TestNumbersIncreaseWrapAndAreNotReusedSoon(t *testing.T) {
	ctx := t.Context()
	s := newStore(t)
	alloc := func(name string) (int, error) {
		sb, err := s.AllocateSandbox(ctx, newSandbox(name), agentlab.Allocation{First: 10, Last: 13})
		return sb.VMID, err
	}
	for i, want := range []int{10, 11, 12} {
		if got, err := alloc(fmt.Sprintf("n%d", i)); got != want || err != nil {
			t.Fatalf("got %d, %v, want %d", got, err, want)
		}
	}
	for _, vmid := range []int{11, 12} {
		drive(t, s, vmid, agentlab.SandboxDestroyed)
	}
	if err := s.DeleteSandbox(ctx, 12); err != nil {
		t.Fatal(err)
	}
	if got, _ := alloc("after"); got != 13 {
		t.Errorf("got %d: the number of a deleted row was given again at once", got)
	}
	if got, _ := alloc("around"); got != 12 {
		t.Errorf("got %d, want 12: 10 lives and 11 has a row", got)
	}
	_, err := alloc("full")
	wantCode(t, err, agentlab.CodeLimit)
	if sb, err := s.AllocateSandbox(ctx, newSandbox("elsewhere"), agentlab.Allocation{First: 5, Last: 7}); sb.VMID != 5 || err != nil {
		t.Errorf("in another range: %d, %v", sb.VMID, err)
	}
	for _, r := range [][2]int{{0, 5}, {9, 8}, {1, 1 << 40}} {
		_, err := s.AllocateSandbox(ctx, newSandbox("x"), agentlab.Allocation{First: r[0], Last: r[1]})
		wantCode(t, err, agentlab.CodeInvalid)
	}
}

func TestNames(t *testing.T) {
	ctx := t.Context()
	s := newStore(t)
	for i := range 3 { // three lives of one name
		sb := must(s.AllocateSandbox(ctx, newSandbox("alpha"), agentlab.Allocation{First: 1, Last: 99}))(t)
		_, err := s.AllocateSandbox(ctx, newSandbox("alpha"), agentlab.Allocation{First: 1, Last: 99})
		wantCode(t, err, agentlab.CodeExists)
		if got := must(s.SandboxByName(ctx, "alpha"))(t); got.VMID != sb.VMID {
			t.Errorf("life %d: got %d, want %d", i, got.VMID, sb.VMID)
		}
		s.clock.advance(time.Second)
		drive(t, s, sb.VMID, agentlab.SandboxDestroyed)
		if got := must(s.SandboxByName(ctx, "alpha"))(t); got.VMID != sb.VMID {
			t.Errorf("after life %d: got %d, want %d", i, got.VMID, sb.VMID)
		}
	}
	_, err := s.SandboxByName(ctx, "beta")
	wantCode(t, err, agentlab.CodeNotFound)
	twin := newSandbox("gamma")
	must(s.AllocateSandbox(ctx, twin, agentlab.Allocation{First: 1, Last: 99}))(t)
	twin.Name = "delta"
	_, err = s.AllocateSandbox(ctx, twin, agentlab.Allocation{First: 1, Last: 99})
	wantCode(t, err, agentlab.CodeExists) // the same UID
}

func TestSandboxFilters(t *testing.T) {
	ctx := t.Context()
	s := newStore(t)
	for i := range 6 {
		must(s.AllocateSandbox(ctx, newSandbox(fmt.Sprintf("n%d", i)), agentlab.Allocation{First: 1, Last: 99}))(t)
	}
	drive(t, s, 2, agentlab.SandboxDestroyed)
	drive(t, s, 3, agentlab.SandboxProvisioning)
	for _, tc := range []struct {
		name string
		f    agentlab.SandboxFilter
		want []int
	}{
		{"live", agentlab.SandboxFilter{}, []int{1, 3, 4, 5, 6}},
		{"all", agentlab.SandboxFilter{Destroyed: true}, []int{1, 2, 3, 4, 5, 6}},
		{"states", agentlab.SandboxFilter{States: []agentlab.SandboxState{agentlab.SandboxProvisioning, agentlab.SandboxDestroyed}}, []int{2, 3}},
		{"page", agentlab.SandboxFilter{Limit: 2, AfterVMID: 3}, []int{4, 5}},
		{"end", agentlab.SandboxFilter{AfterVMID: 6}, nil},
	} {
		var got []int
		for _, sb := range must(s.Sandboxes(ctx, tc.f))(t) {
			got = append(got, sb.VMID)
		}
		if !slices.Equal(got, tc.want) {
			t.Errorf("%s: got %v, want %v", tc.name, got, tc.want)
		}
	}
	want := map[agentlab.SandboxState]int{agentlab.SandboxRequested: 4, agentlab.SandboxDestroyed: 1, agentlab.SandboxProvisioning: 1}
	if got := must(s.CountSandboxes(ctx))(t); !reflect.DeepEqual(got, want) {
		t.Errorf("counts %v", got)
	}
}

// Images of destroyed sandboxes are not in use.
func TestImagesInUse(t *testing.T) {
	ctx := t.Context()
	s := newStore(t)
	for i, image := range []string{"base@1", "base@2", "base@2", "agents"} {
		sb := newSandbox(fmt.Sprintf("n%d", i))
		sb.Image = image
		must(s.AllocateSandbox(ctx, sb, agentlab.Allocation{First: 1, Last: 99}))(t)
	}
	drive(t, s, 1, agentlab.SandboxDestroyed)
	if got, want := must(s.ImagesInUse(ctx))(t), map[string]int{"base@2": 2, "agents": 1}; !reflect.DeepEqual(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

func TestJobPages(t *testing.T) {
	ctx := t.Context()
	s := newStore(t)
	var ids []string
	for i := range 9 {
		j := newJob()
		if i%3 == 0 { // three jobs in each instant: ties must not lose any
			s.clock.advance(time.Nanosecond)
		}
		if i%2 == 0 {
			j.Status, j.SandboxVMID = agentlab.JobRunning, 7
		}
		if err := s.CreateJob(ctx, j, nil); err != nil {
			t.Fatal(err)
		}
		ids = append(ids, j.ID)
	}
	var got []string
	var last time.Time
	for before := (agentlab.JobKey{}); ; {
		page := must(s.Jobs(ctx, agentlab.JobFilter{Limit: 2, Before: before}))(t)
		if len(page) == 0 {
			break
		}
		for _, j := range page {
			if !last.IsZero() && j.CreatedAt.After(last) {
				t.Error("not the newest first")
			}
			last = j.CreatedAt
			got = append(got, j.ID)
		}
		before = page[len(page)-1].Key()
	}
	slices.Sort(got)
	slices.Sort(ids)
	if !slices.Equal(got, ids) {
		t.Errorf("pages hold %d of %d jobs", len(got), len(ids))
	}
	if n := len(must(s.Jobs(ctx, agentlab.JobFilter{Statuses: []agentlab.JobStatus{agentlab.JobRunning}, SandboxVMID: 7}))(t)); n != 5 {
		t.Errorf("%d running", n)
	}
	if got := must(s.CountJobs(ctx))(t); got[agentlab.JobRunning] != 5 || got[agentlab.JobQueued] != 4 {
		t.Errorf("counts %v", got)
	}
}

func TestEventFilters(t *testing.T) {
	ctx := t.Context()
	s := newStore(t)
	for i := range 6 {
		s.clock.advance(time.Second)
		e := agentlab.Event{ID: 99, Kind: []string{"a", "b", "c"}[i%3], Message: fmt.Sprint(i), Data: `{"i": 1}`}
		if i%2 == 0 {
			e.SandboxVMID, e.JobID = 5, "job-x"
		}
		if err := s.AppendEvents(ctx, e); err != nil {
			t.Fatal(err)
		}
	}
	for _, tc := range []struct {
		name string
		f    agentlab.EventFilter
		want string
	}{
		{"all", agentlab.EventFilter{}, "012345"},
		{"after", agentlab.EventFilter{AfterID: 4}, "45"},
		{"kinds", agentlab.EventFilter{Kinds: []string{"a", "c"}}, "0235"},
		{"sandbox", agentlab.EventFilter{SandboxVMID: 5}, "024"},
		{"job", agentlab.EventFilter{JobIDs: []string{"job-x"}, Limit: 2}, "02"},
		{"tail", agentlab.EventFilter{Tail: true, Limit: 2}, "45"},
		{"tail of a job", agentlab.EventFilter{Tail: true, Limit: 2, JobIDs: []string{"job-x"}}, "24"},
		{"tail of all", agentlab.EventFilter{Tail: true}, "012345"},
		{"from", agentlab.EventFilter{From: 4, AfterID: 1}, "345"},
	} {
		got := ""
		for _, e := range must(s.Events(ctx, tc.f))(t) {
			got += e.Message
		}
		if got != tc.want {
			t.Errorf("%s: got %s, want %s", tc.name, got, tc.want)
		}
	}
	if n := must(s.DeleteEventsBefore(ctx, epoch.Add(4*time.Second)))(t); n != 3 {
		t.Errorf("deleted %d", n)
	}
	if err := s.AppendEvents(ctx, agentlab.Event{Kind: "z"}); err != nil {
		t.Fatal(err)
	}
	if n := must(s.DeleteEventsBefore(ctx, epoch.Add(time.Hour)))(t); n != 4 {
		t.Errorf("deleted %d", n)
	}
	if err := s.AppendEvents(ctx, agentlab.Event{Kind: "z"}); err != nil {
		t.Fatal(err)
	}
	if evs := must(s.Events(ctx, agentlab.EventFilter{}))(t); len(evs) != 1 || evs[0].ID != 8 {
		t.Errorf("an id was given again: %+v", evs)
	}
}

func TestEventMessagesAreOneLine(t *testing.T) {
	ctx, s := t.Context(), newStore(t)
	for in, want := range map[string]string{
		"plain ünï": "plain ünï", "a\nb\r\tc": "a b c", "\x1b[31mred": "[31mred", "bad\xffutf": "bad?utf", "x\u2028y": "x y", "\u009bz": "z",
		strings.Repeat("é", maxMessage): strings.Repeat("é", maxMessage/2) + "…",
	} {
		if err := s.AppendEvents(ctx, agentlab.Event{Kind: "a", Message: in}); err != nil {
			t.Fatal(err)
		}
		evs := must(s.Events(ctx, agentlab.EventFilter{}))(t)
		if got := evs[len(evs)-1].Message; got != want {
			t.Errorf("%q: got %q, want %q", in, got, want)
		}
	}
}

func TestArtifacts(t *testing.T) {
	ctx := t.Context()
	s := newStore(t)
	j := newJob()
	if err := s.CreateJob(ctx, j, nil); err != nil {
		t.Fatal(err)
	}
	sum := strings.Repeat("ab", 32)
	put := func(path string, size int64) error {
		return s.PutArtifact(ctx, agentlab.Artifact{JobID: j.ID, Path: path, Size: size, SHA256: sum, MIME: "text/plain"}, agentlab.Event{Kind: agentlab.EventArtifactStored})
	}
	for _, a := range []struct {
		path string
		size int64
	}{{"b/x", 10}, {"a", 5}, {"b/x", 20}} {
		if err := put(a.path, a.size); err != nil {
			t.Fatal(err)
		}
	}
	list := must(s.Artifacts(ctx, j.ID))(t)
	if len(list) != 2 || list[0].Path != "a" || list[1].Size != 20 || list[1].CreatedAt != epoch {
		t.Errorf("%+v", list)
	}
	if n := must(s.ArtifactBytes(ctx, j.ID))(t); n != 25 {
		t.Errorf("%d bytes", n)
	}
	if a := must(s.Artifact(ctx, j.ID, "b/x"))(t); a != list[1] {
		t.Errorf("%+v", a)
	}
	_, err := s.Artifact(ctx, j.ID, "b")
	wantCode(t, err, agentlab.CodeNotFound)
	wantCode(t, put("", 1), agentlab.CodeInvalid)
	wantCode(t, put("x", -1), agentlab.CodeInvalid)
	wantCode(t, s.PutArtifact(ctx, agentlab.Artifact{JobID: "job-aaaaaaaaaaaaa", Path: "x", SHA256: sum}), agentlab.CodeConflict)

	must(s.UpdateJob(ctx, j.ID, func(j *agentlab.Job) ([]agentlab.Event, error) { j.Status = agentlab.JobCancelled; return nil, nil }))(t)
	wantCode(t, s.DeleteJob(ctx, j.ID), agentlab.CodeConflict)
	if err := s.DeleteArtifacts(ctx, j.ID); err != nil {
		t.Fatal(err)
	}
	if n := must(s.ArtifactBytes(ctx, j.ID))(t); n != 0 {
		t.Errorf("%d bytes", n)
	}
	if err := s.DeleteJob(ctx, j.ID); err != nil {
		t.Fatal(err)
	}
	wantCode(t, s.DeleteJob(ctx, j.ID), agentlab.CodeNotFound)
}

func TestProfilesKeepEachTextOnce(t *testing.T) {
	ctx := t.Context()
	s := newStore(t)
	for _, text := range []string{"name: p", "name: p", "name: p # changed"} {
		if sum := must(s.PutProfile(ctx, "p", text))(t); !isSHA256(sum) {
			t.Error(sum)
		}
	}
	var n int
	if err := s.r.QueryRowContext(ctx, "SELECT count(*) FROM profiles WHERE name = 'p'").Scan(&n); err != nil || n != 2 {
		t.Errorf("%d rows, %v", n, err)
	}
	_, err := s.PutProfile(ctx, "../p", "")
	wantCode(t, err, agentlab.CodeInvalid)
}

// TestTimesSortAsText: the order of stored text is the order of time, inside
// a second too, and every time comes back as it was.
func TestTimesSortAsText(t *testing.T) {
	lo, hi := time.Date(0, 1, 1, 0, 0, 0, 0, time.UTC), time.Date(9999, 12, 31, 23, 59, 59, 999999999, time.UTC)
	instant := rapid.Custom(func(t *rapid.T) time.Time {
		sec := rapid.OneOf(rapid.Int64Range(lo.Unix(), hi.Unix()), rapid.Int64Range(epoch.Unix(), epoch.Unix()+1)).Draw(t, "s")
		ns := rapid.OneOf(rapid.Int64Range(0, 999999999), rapid.SampledFrom([]int64{0, 1, 10, 100000000, 120000000})).Draw(t, "ns")
		zone := time.FixedZone("", rapid.IntRange(-14*3600, 14*3600).Draw(t, "zone"))
		return time.Unix(sec, ns).In(zone)
	})
	rapid.Check(t, func(t *rapid.T) {
		a, b := instant.Draw(t, "a"), instant.Draw(t, "b")
		ta, err := encodeTime(a)
		if err != nil {
			t.Fatal(err)
		}
		tb, err := encodeTime(b)
		if err != nil {
			t.Fatal(err)
		}
		if strings.Compare(ta, tb) != a.Compare(b) {
			t.Fatalf("%s and %s sort otherwise than %s and %s", ta, tb, a, b)
		}
		back, err := decodeTime(ta)
		if err != nil || !back.Equal(a) && !a.IsZero() {
			t.Fatalf("%s came back as %s, %v", a, back, err)
		}
	})
	for _, s := range []string{"2026-01-02T03:04:05Z", "2026-01-02T03:04:05.1Z", "2026-01-02T03:04:05.000000000+01:00", "now"} {
		if _, err := decodeTime(s); err == nil {
			t.Errorf("%q is taken", s)
		}
	}
}

// TestTransitionsAreEnforced: whatever is asked, a row moves only along the
// table, and what was refused left nothing behind.
func TestTransitionsAreEnforced(t *testing.T) {
	ctx := t.Context()
	s := newStore(t)
	states := []agentlab.SandboxState{agentlab.SandboxRequested, agentlab.SandboxProvisioning, agentlab.SandboxBooting, agentlab.SandboxReady,
		agentlab.SandboxRunning, agentlab.SandboxCompleted, agentlab.SandboxFailed, agentlab.SandboxTimeout, agentlab.SandboxSuspended,
		agentlab.SandboxStopped, agentlab.SandboxDestroyed}
	statuses := []agentlab.JobStatus{agentlab.JobQueued, agentlab.JobRunning, agentlab.JobCompleted, agentlab.JobFailed, agentlab.JobTimeout, agentlab.JobCancelled}
	n := 0
	rapid.Check(t, func(rt *rapid.T) {
		n++
		sb := must(s.AllocateSandbox(ctx, newSandbox(fmt.Sprintf("n-%d", n)), agentlab.Allocation{First: 1, Last: 1 << 20}))(t)
		j := newJob()
		if err := s.CreateJob(ctx, j, nil); err != nil {
			rt.Fatal(err)
		}
		state, status := sb.State, j.Status
		for range rapid.IntRange(1, 6).Draw(rt, "steps") {
			next := rapid.SampledFrom(states).Draw(rt, "state")
			_, err := s.UpdateSandbox(ctx, sb.VMID, func(sb *agentlab.Sandbox) ([]agentlab.Event, error) { sb.State = next; return nil, nil })
			if ok := state == next || state.CanBecome(next); ok != (err == nil) {
				rt.Fatalf("%s to %s: %v", state, next, err)
			} else if ok {
				state = next
			}
			nextStatus := rapid.SampledFrom(statuses).Draw(rt, "status")
			_, err = s.UpdateJob(ctx, j.ID, func(j *agentlab.Job) ([]agentlab.Event, error) { j.Status = nextStatus; return nil, nil })
			if ok := status == nextStatus || status.CanBecome(nextStatus); ok != (err == nil) {
				rt.Fatalf("%s to %s: %v", status, nextStatus, err)
			} else if ok {
				status = nextStatus
			}
		}
		if got := must(s.Sandbox(ctx, sb.VMID))(t); got.State != state {
			rt.Fatalf("stored %s, want %s", got.State, state)
		}
		if got := must(s.Job(ctx, j.ID))(t); got.Status != status {
			rt.Fatalf("stored %s, want %s", got.Status, status)
		}
	})
}
