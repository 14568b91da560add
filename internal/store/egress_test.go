package store

import (
	"context"
	"fmt"
	"reflect"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
)

func liveSandbox(t *testing.T, s *testStore, name string) agentlab.Sandbox {
	t.Helper()
	return must(s.AllocateSandbox(context.Background(), newSandbox(name), agentlab.Allocation{First: 1000, Last: 2000}))(t)
}

func egressOf(sb agentlab.Sandbox, seq int64, allow bool) agentlab.EgressEntry {
	at := epoch.Add(time.Duration(seq) * time.Second)
	return agentlab.EgressEntry{UID: sb.UID, JobID: "job-a", EgressRecord: agentlab.EgressRecord{
		Seq: seq, VMID: sb.VMID, Time: at, Last: at, Proto: "tcp", Name: fmt.Sprintf("host%d.example", seq), Addr: "192.0.2.1", Port: 443,
		Allow: allow, Rule: "mode.nat", Count: 1,
	}}
}

func seqs(list []agentlab.EgressEntry) (out []int64) {
	for _, e := range list {
		out = append(out, e.Seq)
	}
	return out
}

func TestEgressRoundTrip(t *testing.T) {
	ctx, s := context.Background(), newStore(t)
	a, b := liveSandbox(t, s, "a"), liveSandbox(t, s, "b")
	want := egressOf(a, 1, true)
	want.Error, want.Count, want.Dropped = "connection refused", 3, 2
	recs := []agentlab.EgressEntry{want, egressOf(a, 2, false), egressOf(b, 1, false)}
	recs[2].JobID = ""
	if n := must(s.AddEgress(ctx, recs, 100))(t); n != 3 {
		t.Errorf("%d were added", n)
	}
	got := must(s.Egress(ctx, agentlab.EgressFilter{}))(t)
	want.ID = got[0].ID
	if len(got) != 3 || !reflect.DeepEqual(got[0], want) {
		t.Errorf("got %+v\nwant %+v", got, want)
	}
	for _, tc := range []struct {
		f    agentlab.EgressFilter
		want int
	}{
		{agentlab.EgressFilter{VMID: a.VMID}, 2},
		{agentlab.EgressFilter{JobID: "job-a", Denied: true}, 1},
		{agentlab.EgressFilter{Denied: true}, 2},
		{agentlab.EgressFilter{Since: epoch.Add(2 * time.Second)}, 1},
		{agentlab.EgressFilter{AfterID: got[1].ID}, 1},
		{agentlab.EgressFilter{Limit: 2, Tail: true}, 2},
	} {
		list := must(s.Egress(ctx, tc.f))(t)
		if len(list) != tc.want {
			t.Errorf("%+v gave %d", tc.f, len(list))
		}
		for _, e := range got {
			in := false
			for _, l := range list {
				in = in || l.ID == e.ID
			}
			if tc.f.Limit == 0 && in != tc.f.Match(e) {
				t.Errorf("%+v: Match and Egress differ about %d", tc.f, e.ID)
			}
		}
	}
}

func TestEgressReadTwiceAddsNothing(t *testing.T) {
	ctx, s := context.Background(), newStore(t)
	sb := liveSandbox(t, s, "a")
	recs := []agentlab.EgressEntry{egressOf(sb, 1, true), egressOf(sb, 2, true), egressOf(sb, 3, false)}
	must(s.AddEgress(ctx, recs[:2], 100))(t)
	if n := must(s.AddEgress(ctx, recs, 100))(t); n != 1 {
		t.Errorf("%d were added", n)
	}
	if got := seqs(must(s.Egress(ctx, agentlab.EgressFilter{}))(t)); !reflect.DeepEqual(got, []int64{1, 2, 3}) {
		t.Error(got)
	}
	if c := must(s.EgressCursor(ctx, sb.VMID, sb.UID))(t); c != 3 {
		t.Errorf("the cursor is %d", c)
	}
	if c := must(s.EgressCursor(ctx, sb.VMID, "another"))(t); c != 0 {
		t.Errorf("another sandbox of that number has cursor %d", c)
	}
}

func TestEgressOfAForgottenSandboxIsDropped(t *testing.T) {
	ctx, s := context.Background(), newStore(t)
	sb := liveSandbox(t, s, "a")
	gone := sb
	gone.UID = agentlab.NewUID()
	if n := must(s.AddEgress(ctx, []agentlab.EgressEntry{egressOf(gone, 1, true)}, 100))(t); n != 0 {
		t.Errorf("%d were added", n)
	}
}

// A flood displaces neither earlier nor later records, nor allowed ones; and
// the number of missing records is reported.
func TestEgressFlood(t *testing.T) {
	ctx, s := context.Background(), newStore(t)
	sb := liveSandbox(t, s, "a")
	const limit = 10
	must(s.AddEgress(ctx, []agentlab.EgressEntry{egressOf(sb, 1, true)}, limit))(t)
	seq := int64(1)
	for range 20 {
		var recs []agentlab.EgressEntry
		for range 7 {
			seq++
			recs = append(recs, egressOf(sb, seq, false))
		}
		must(s.AddEgress(ctx, recs, limit))(t)
	}
	got := must(s.Egress(ctx, agentlab.EgressFilter{}))(t)
	want := []int64{1, 2, 3, 4, 5, 6, 0, 137, 138, 139, 140, 141}
	have := seqs(got)
	if len(have) != len(want) {
		t.Fatalf("got %v, want %v in some order", have, want)
	}
	sum := must(s.EgressSummary(ctx, agentlab.EgressFilter{VMID: sb.VMID}, 3))(t)
	if sum.Allowed != 1 || sum.Denied != limit || sum.Dropped != 140-limit || len(sum.Targets) != 3 || sum.More != limit-3 {
		t.Errorf("%+v", sum)
	}
	for _, e := range got {
		if e.Seq == 0 && (e.Rule != agentlab.RuleAuditLimit || e.Dropped != 140-limit || e.Count != 0) {
			t.Errorf("%+v", e)
		}
	}
}

// The private destinations that were used are reported separately.
func TestEgressSummaryNamesPrivate(t *testing.T) {
	ctx, s := context.Background(), newStore(t)
	sb := liveSandbox(t, s, "a")
	var list []agentlab.EgressEntry
	for i, e := range []struct{ proto, rule string }{{"tcp", "private:gateway.corp:443"}, {"tcp", "private:gateway.corp:443"}, {"dns", "private:gateway.corp:443"}, {"tcp", "mode.nat"}} {
		one := egressOf(sb, int64(i+1), true)
		one.Proto, one.Rule, one.Name, one.Addr = e.proto, e.rule, "gateway.corp", "10.1.2.3"
		list = append(list, one)
	}
	must(s.AddEgress(ctx, list, 100))(t)
	sum := must(s.EgressSummary(ctx, agentlab.EgressFilter{VMID: sb.VMID}, 3))(t)
	if len(sum.Private) != 1 || sum.Private[0].Count != 2 || sum.Private[0].Rule != "private:gateway.corp:443" || sum.Private[0].Port != 443 {
		t.Errorf("%+v", sum.Private)
	}
}

func TestEgressGapIsReported(t *testing.T) {
	ctx, s := context.Background(), newStore(t)
	sb := liveSandbox(t, s, "a")
	must(s.AddEgress(ctx, []agentlab.EgressEntry{egressOf(sb, 1, true), egressOf(sb, 5, true)}, 100))(t)
	sum := must(s.EgressSummary(ctx, agentlab.EgressFilter{JobID: "job-a"}, 3))(t)
	if sum.Allowed != 2 || sum.Dropped != 3 {
		t.Errorf("%+v", sum)
	}
}

func TestEgressRetention(t *testing.T) {
	ctx, s := context.Background(), newStore(t)
	sb := liveSandbox(t, s, "a")
	var recs []agentlab.EgressEntry
	for seq := int64(1); seq <= 10; seq++ {
		recs = append(recs, egressOf(sb, seq, false))
	}
	must(s.AddEgress(ctx, recs, 10))(t)
	if n := must(s.DeleteEgressBefore(ctx, epoch.Add(9*time.Second)))(t); n != 8 {
		t.Errorf("%d were deleted", n)
	}
	// There is room again.
	must(s.AddEgress(ctx, []agentlab.EgressEntry{egressOf(sb, 11, false), egressOf(sb, 12, false)}, 10))(t)
	if got := seqs(must(s.Egress(ctx, agentlab.EgressFilter{}))(t)); !reflect.DeepEqual(got, []int64{9, 10, 11, 12}) {
		t.Error(got)
	}
	// The cursor goes with the sandbox, the records stay.
	must(s.UpdateSandbox(ctx, sb.VMID, func(sb *agentlab.Sandbox) ([]agentlab.Event, error) {
		sb.State, sb.Desired = agentlab.SandboxDestroyed, agentlab.DesiredDestroyed
		return nil, nil
	}))(t)
	if err := s.DeleteSandbox(ctx, sb.VMID); err != nil {
		t.Fatal(err)
	}
	if c := must(s.EgressCursor(ctx, sb.VMID, sb.UID))(t); c != 0 {
		t.Errorf("cursor %d", c)
	}
	if got := must(s.Egress(ctx, agentlab.EgressFilter{VMID: sb.VMID}))(t); len(got) != 4 {
		t.Errorf("%d are left", len(got))
	}
}

func TestEgressRefuses(t *testing.T) {
	ctx, s := context.Background(), newStore(t)
	sb := liveSandbox(t, s, "a")
	for name, spoil := range map[string]func(*agentlab.EgressEntry){
		"port":  func(e *agentlab.EgressEntry) { e.Port = 70000 },
		"rule":  func(e *agentlab.EgressEntry) { e.Rule = "" },
		"limit": func(e *agentlab.EgressEntry) { e.Rule = agentlab.RuleAuditLimit },
		"count": func(e *agentlab.EgressEntry) { e.Count = -1 },
	} {
		e := egressOf(sb, 1, true)
		spoil(&e)
		if _, err := s.AddEgress(ctx, []agentlab.EgressEntry{e}, 100); agentlab.CodeOf(err) != agentlab.CodeInvalid {
			t.Errorf("%s: %v", name, err)
		}
	}
}
