package store

import (
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
)

func hashOf(c string) string { return strings.Repeat(c, 64) }

// booting returns a sandbox in BOOTING with a QUEUED job and a token.
func booting(t testing.TB, s *testStore, name, tokenHash string) (agentlab.Sandbox, agentlab.Job) {
	t.Helper()
	j := newJob()
	if err := s.CreateJob(t.Context(), j, nil); err != nil {
		t.Fatal(err)
	}
	sb := newSandbox(name)
	sb.JobID = j.ID
	sb = must(s.AllocateSandbox(t.Context(), sb, agentlab.Allocation{First: 1, Last: 999}))(t)
	drive(t, s, sb.VMID, agentlab.SandboxProvisioning, agentlab.SandboxBooting)
	if err := s.PutBootstrapToken(t.Context(), agentlab.BootstrapToken{Hash: tokenHash, VMID: sb.VMID, ExpiresAt: s.clock.now().Add(10 * time.Minute)}, nil); err != nil {
		t.Fatal(err)
	}
	return sb, j
}

func grantsFor(sb agentlab.Sandbox, j agentlab.Job, hash string) []agentlab.Grant {
	return []agentlab.Grant{{Hash: hash, Kind: agentlab.GrantRunner, VMID: sb.VMID, JobID: j.ID, ExpiresAt: epoch.Add(time.Hour)}}
}

func TestConsumeBootstrapHasOneWinner(t *testing.T) {
	ctx := t.Context()
	s := newStore(t)
	sb, j := booting(t, s, "alpha", hashOf("a"))
	var wg sync.WaitGroup
	var mu sync.Mutex
	codes := map[agentlab.Code]int{}
	for i := range 16 {
		wg.Go(func() {
			err := s.ConsumeBootstrap(ctx, hashOf("a"), sb.VMID, grantsFor(sb, j, fmt.Sprintf("%064x", i)),
				func(_ *agentlab.Sandbox, j *agentlab.Job) ([]agentlab.Event, error) {
					j.Status, j.StartedAt = agentlab.JobRunning, s.clock.now()
					return []agentlab.Event{{Kind: agentlab.EventJobStatus}}, nil
				})
			mu.Lock()
			defer mu.Unlock()
			codes[agentlab.CodeOf(err)]++
		})
	}
	wg.Wait()
	if codes[""] != 1 || codes[agentlab.CodeDenied] != 15 {
		t.Errorf("outcomes %v", codes)
	}
	if got := must(s.Job(ctx, j.ID))(t); got.Status != agentlab.JobRunning || got.StartedAt != epoch {
		t.Errorf("job %+v", got)
	}
	found := 0
	for i := range 16 {
		g, err := s.GrantByHash(ctx, fmt.Sprintf("%064x", i), agentlab.GrantRunner)
		if err == nil {
			found++
			if g.VMID != sb.VMID || g.JobID != j.ID || g.ExpiresAt != epoch.Add(time.Hour) {
				t.Errorf("grant %+v", g)
			}
		}
	}
	if found != 1 {
		t.Errorf("%d grants", found)
	}
	if evs := must(s.Events(ctx, agentlab.EventFilter{JobIDs: []string{j.ID}}))(t); len(evs) != 1 || evs[0].SandboxVMID != sb.VMID {
		t.Errorf("events %+v", evs)
	}
}

func TestConsumeBootstrapFailureLeavesTheTokenUsable(t *testing.T) {
	ctx := t.Context()
	s := newStore(t)
	sb, j := booting(t, s, "alpha", hashOf("a"))
	for name, try := range map[string]func() error{
		"own error": func() error {
			return s.ConsumeBootstrap(ctx, hashOf("a"), sb.VMID, nil, func(*agentlab.Sandbox, *agentlab.Job) ([]agentlab.Event, error) {
				return nil, agentlab.Errorf(agentlab.CodeUnavailable, "no secrets")
			})
		},
		"transition": func() error {
			return s.ConsumeBootstrap(ctx, hashOf("a"), sb.VMID, nil, func(_ *agentlab.Sandbox, j *agentlab.Job) ([]agentlab.Event, error) {
				j.Status = agentlab.JobCompleted
				return nil, nil
			})
		},
		"bad grant": func() error {
			return s.ConsumeBootstrap(ctx, hashOf("a"), sb.VMID, []agentlab.Grant{{Hash: "short", Kind: agentlab.GrantRunner, VMID: sb.VMID, ExpiresAt: epoch}}, nil)
		},
		"foreign grant": func() error {
			return s.ConsumeBootstrap(ctx, hashOf("a"), sb.VMID, []agentlab.Grant{{Hash: hashOf("b"), Kind: agentlab.GrantRunner, VMID: sb.VMID + 1, ExpiresAt: epoch}}, nil)
		},
	} {
		if err := try(); err == nil {
			t.Errorf("%s: no error", name)
		}
		if got := must(s.Job(ctx, j.ID))(t); got.Status != agentlab.JobQueued {
			t.Errorf("%s: the job is %s", name, got.Status)
		}
	}
	if err := s.ConsumeBootstrap(ctx, hashOf("a"), sb.VMID, grantsFor(sb, j, hashOf("b")), nil); err != nil {
		t.Errorf("afterwards: %v", err)
	}
}

func TestConsumeBootstrapDenies(t *testing.T) {
	ctx := t.Context()
	s := newStore(t)
	sb, _ := booting(t, s, "alpha", hashOf("a"))
	other, _ := booting(t, s, "beta", hashOf("b"))
	consume := func(hash string, vmid int) error { return s.ConsumeBootstrap(ctx, hash, vmid, nil, nil) }
	wantCode(t, consume(hashOf("c"), sb.VMID), agentlab.CodeDenied)
	wantCode(t, consume("", sb.VMID), agentlab.CodeDenied)
	wantCode(t, consume(hashOf("a"), other.VMID), agentlab.CodeDenied)

	drive(t, s, other.VMID, agentlab.SandboxTimeout)
	wantCode(t, consume(hashOf("b"), other.VMID), agentlab.CodeDenied)

	// Consuming one token closes the sandbox's others and its older grants.
	put := func(hash string, ttl time.Duration) error {
		return s.PutBootstrapToken(ctx, agentlab.BootstrapToken{Hash: hash, VMID: sb.VMID, ExpiresAt: s.clock.now().Add(ttl)}, nil)
	}
	if err := put(hashOf("d"), 15*time.Minute); err != nil {
		t.Fatal(err)
	}
	if err := consume(hashOf("d"), sb.VMID); err != nil {
		t.Fatal(err)
	}
	wantCode(t, consume(hashOf("a"), sb.VMID), agentlab.CodeDenied)
	wantCode(t, consume(hashOf("d"), sb.VMID), agentlab.CodeDenied)

	if err := put(hashOf("e"), 10*time.Minute); err != nil {
		t.Fatal(err)
	}
	s.clock.advance(10 * time.Minute) // the very instant of expiry
	wantCode(t, consume(hashOf("e"), sb.VMID), agentlab.CodeDenied)

	wantCode(t, put(hashOf("f"), 0), agentlab.CodeInvalid)
	wantCode(t, put(hashOf("f"), 16*time.Minute), agentlab.CodeInvalid)
	wantCode(t, put("nohash", time.Minute), agentlab.CodeInvalid)
	wantCode(t, put(hashOf("e"), time.Minute), agentlab.CodeExists)
	wantCode(t, s.PutBootstrapToken(ctx, agentlab.BootstrapToken{Hash: hashOf("9"), VMID: 555, ExpiresAt: s.clock.now().Add(time.Minute)}, nil), agentlab.CodeConflict)
}

func TestGrantsEnd(t *testing.T) {
	ctx := t.Context()
	s := newStore(t)
	sb, j := booting(t, s, "alpha", hashOf("a"))
	if err := s.ConsumeBootstrap(ctx, hashOf("a"), sb.VMID, grantsFor(sb, j, hashOf("b")), nil); err != nil {
		t.Fatal(err)
	}
	must(s.GrantByHash(ctx, hashOf("b"), agentlab.GrantRunner))(t)
	_, err := s.GrantByHash(ctx, hashOf("b"), agentlab.GrantUpload)
	wantCode(t, err, agentlab.CodeDenied)
	s.clock.advance(time.Hour)
	_, err = s.GrantByHash(ctx, hashOf("b"), agentlab.GrantRunner)
	wantCode(t, err, agentlab.CodeDenied)
	if n := must(s.DeleteExpiredTokens(ctx, s.clock.now()))(t); n != 2 {
		t.Errorf("deleted %d, want token and grant", n)
	}

	sb, j = booting(t, s, "beta", hashOf("c"))
	g := grantsFor(sb, j, hashOf("d"))
	g[0].ExpiresAt = s.clock.now().Add(time.Hour)
	if err := s.ConsumeBootstrap(ctx, hashOf("c"), sb.VMID, g, nil); err != nil {
		t.Fatal(err)
	}
	if err := s.RevokeGrants(ctx, sb.VMID); err != nil {
		t.Fatal(err)
	}
	_, err = s.GrantByHash(ctx, hashOf("d"), agentlab.GrantRunner)
	wantCode(t, err, agentlab.CodeDenied)

	// Deleting a sandbox's row takes its tokens along.
	sb, _ = booting(t, s, "gamma", hashOf("e"))
	drive(t, s, sb.VMID, agentlab.SandboxDestroyed)
	if err := s.DeleteSandbox(ctx, sb.VMID); err != nil {
		t.Fatal(err)
	}
	var n int
	if err := s.r.QueryRowContext(ctx, "SELECT count(*) FROM bootstrap_tokens WHERE vmid = ?", sb.VMID).Scan(&n); err != nil || n != 0 {
		t.Errorf("%d tokens left, %v", n, err)
	}
}

// What a job leaves is closed when it ends; its runner may still report.
func TestFinalJobLosesUploads(t *testing.T) {
	ctx := t.Context()
	s := newStore(t)
	sb, j := booting(t, s, "alpha", hashOf("a"))
	if err := s.CheckBootstrap(ctx, hashOf("a"), sb.VMID); err != nil {
		t.Error(err)
	}
	wantCode(t, s.CheckBootstrap(ctx, hashOf("f"), sb.VMID), agentlab.CodeDenied)
	wantCode(t, s.CheckBootstrap(ctx, hashOf("a"), sb.VMID+1), agentlab.CodeDenied)
	g := append(grantsFor(sb, j, hashOf("b")), grantsFor(sb, j, hashOf("c"))...)
	g[1].Kind = agentlab.GrantUpload
	if err := s.ConsumeBootstrap(ctx, hashOf("a"), sb.VMID, g, nil); err != nil {
		t.Fatal(err)
	}
	wantCode(t, s.CheckBootstrap(ctx, hashOf("a"), sb.VMID), agentlab.CodeDenied)
	for _, status := range []agentlab.JobStatus{agentlab.JobRunning, agentlab.JobCompleted} {
		must(s.GrantByHash(ctx, hashOf("c"), agentlab.GrantUpload))(t)
		must(s.UpdateJob(ctx, j.ID, func(j *agentlab.Job) ([]agentlab.Event, error) { j.Status = status; return nil, nil }))(t)
	}
	must(s.GrantByHash(ctx, hashOf("b"), agentlab.GrantRunner))(t)
	_, err := s.GrantByHash(ctx, hashOf("c"), agentlab.GrantUpload)
	wantCode(t, err, agentlab.CodeDenied)
}

func TestBootstrapOpen(t *testing.T) {
	ctx := t.Context()
	s := newStore(t)
	sb, j := booting(t, s, "alpha", hashOf("a"))
	open := func() bool { return must(s.BootstrapOpen(ctx, sb.VMID))(t) }
	if !open() || must(s.BootstrapOpen(ctx, sb.VMID+1))(t) {
		t.Error("a token of this sandbox is open, none of another")
	}
	s.clock.advance(10 * time.Minute)
	if open() {
		t.Error("open though it has expired")
	}
	if err := s.PutBootstrapToken(ctx, agentlab.BootstrapToken{Hash: hashOf("b"), VMID: sb.VMID, ExpiresAt: s.clock.now().Add(time.Minute)}, nil); err != nil {
		t.Fatal(err)
	}
	if !open() {
		t.Error("the new one is not open")
	}
	if err := s.ConsumeBootstrap(ctx, hashOf("b"), sb.VMID, grantsFor(sb, j, hashOf("c")), nil); err != nil {
		t.Fatal(err)
	}
	if open() {
		t.Error("open though it was consumed")
	}
}
