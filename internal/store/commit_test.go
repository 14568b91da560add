package store

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/test/smalldisk"
)

// A subscriber gets the rows of sandboxes that differ and the jobs that have new
// records, before the writing call returns, and nothing of what changed
// nothing or failed.
func TestCommitReportsRowsAndRecords(t *testing.T) {
	ctx, s := context.Background(), newStore(t)
	last := func(what string) agentlab.Commit {
		t.Helper()
		if len(s.done) != 1 {
			t.Fatalf("%s: %d commits: %+v", what, len(s.done), s.done)
		}
		c := s.done[0]
		s.done = nil
		return c
	}
	row := func(what string, vmid int, state agentlab.SandboxState) {
		t.Helper()
		c := last(what)
		if len(c.Sandboxes) != 1 || c.Sandboxes[0].VMID != vmid || c.Sandboxes[0].State != state || len(c.Records) > 0 {
			t.Errorf("%s: %+v", what, c)
		}
	}
	sb := liveSandbox(t, s, "a")
	row("allocate", sb.VMID, agentlab.SandboxRequested)
	change := func(fn func(*agentlab.Sandbox) error) {
		t.Helper()
		_, _ = s.UpdateSandbox(ctx, sb.VMID, func(sb *agentlab.Sandbox) ([]agentlab.Event, error) { return nil, fn(sb) })
	}
	change(func(sb *agentlab.Sandbox) error { sb.State = agentlab.SandboxProvisioning; return nil })
	row("update", sb.VMID, agentlab.SandboxProvisioning)
	change(func(*agentlab.Sandbox) error { return nil })
	change(func(sb *agentlab.Sandbox) error { sb.State = agentlab.SandboxBooting; return errors.New("no") })
	if len(s.done) > 0 {
		t.Errorf("nothing changed: %+v", s.done)
	}
	if err := s.ClockJumped(ctx, time.Hour, "{}"); err != nil {
		t.Fatal(err)
	}
	row("clock", sb.VMID, agentlab.SandboxProvisioning)
	lost := newSandbox("lost")
	lost.VMID, lost.CreatedAt, lost.UpdatedAt = 1500, epoch, epoch
	if err := s.RecoverSandbox(ctx, lost); err != nil {
		t.Fatal(err)
	}
	row("recover", lost.VMID, agentlab.SandboxRequested)

	recs := []agentlab.EgressEntry{egressOf(sb, 1, true), egressOf(sb, 2, false), egressOf(sb, 3, false)}
	recs[2].JobID = ""
	must(s.AddEgress(ctx, recs, 100))(t)
	if c := last("records"); !slices.Equal(c.Records, []string{"job-a"}) || c.Egress != (agentlab.EgressCount{Allowed: 1, Denied: 2}) || len(c.Sandboxes)+len(c.Events) > 0 {
		t.Errorf("records: %+v", c)
	}
	more := egressOf(sb, 7, true) // 4 to 6 are missing
	more.JobID, more.Count, more.Dropped = "", 5, 2
	must(s.AddEgress(ctx, []agentlab.EgressEntry{more}, 100))(t)
	if c := last("records without a job"); c.Egress != (agentlab.EgressCount{Allowed: 5, Dropped: 5}) || len(c.Records) > 0 {
		t.Errorf("records without a job: %+v", c)
	}
	must(s.AddEgress(ctx, recs, 100))(t)
	if len(s.done) > 0 {
		t.Errorf("no record is new: %+v", s.done)
	}

	s.clock.t = s.clock.t.Add(time.Hour)
	sb, j := booting(t, s, "b", hashOf("a"))
	s.done = nil
	err := s.ConsumeBootstrap(ctx, hashOf("a"), sb.VMID, nil, func(sb *agentlab.Sandbox, j *agentlab.Job) ([]agentlab.Event, error) {
		j.Status, sb.LeaseExpiresAt = agentlab.JobRunning, sb.LeaseExpiresAt.Add(time.Hour)
		return []agentlab.Event{{Kind: agentlab.EventJobStatus}}, nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if c := last("bootstrap"); len(c.Sandboxes) != 1 || c.Sandboxes[0].VMID != sb.VMID || len(c.Events) != 1 || c.Events[0].JobID != j.ID {
		t.Errorf("bootstrap: %+v", c)
	}
}

// OnWrite is called once for each write that had its turn, with its error.
func TestOnWrite(t *testing.T) {
	var errs []error
	s, err := Open(t.Context(), filepath.Join(t.TempDir(), "agentlab.db"), Options{OnWrite: func(wait, took time.Duration, err error) {
		if wait < 0 || took <= 0 {
			t.Errorf("wait %s, took %s", wait, took)
		}
		errs = append(errs, err)
	}})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	room := agentlab.Allocation{First: 1, Last: 9}
	must(s.AllocateSandbox(t.Context(), newSandbox("a"), room))(t)
	if _, err := s.AllocateSandbox(t.Context(), newSandbox("a"), room); agentlab.CodeOf(err) != agentlab.CodeExists {
		t.Fatal(err)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := s.AllocateSandbox(ended, newSandbox("b"), room); err == nil {
		t.Fatal("written after the end of the context")
	}
	must(s.CountSandboxes(t.Context()))(t)
	if len(errs) != 2 || errs[0] != nil || agentlab.CodeOf(errs[1]) != agentlab.CodeExists {
		t.Errorf("%v", errs)
	}
}

// OnRead is called once for each read, and not for those that are part of a write.
func TestOnRead(t *testing.T) {
	reads := 0
	s, err := Open(t.Context(), filepath.Join(t.TempDir(), "agentlab.db"), Options{OnRead: func(took time.Duration) {
		if reads++; took <= 0 {
			t.Errorf("took %s", took)
		}
	}})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	sb := must(s.AllocateSandbox(t.Context(), newSandbox("a"), agentlab.Allocation{First: 1, Last: 9}))(t)
	must(s.UpdateSandbox(t.Context(), sb.VMID, func(*agentlab.Sandbox) ([]agentlab.Event, error) { return nil, nil }))(t)
	if reads != 0 {
		t.Errorf("%d reads in writes", reads)
	}
	must(s.Sandbox(t.Context(), sb.VMID))(t)
	must(s.Sandboxes(t.Context(), agentlab.SandboxFilter{}))(t)
	must(s.CountSandboxes(t.Context()))(t)
	must(s.ArtifactBytes(t.Context(), "job"))(t)
	if reads != 4 {
		t.Errorf("%d reads, want 4", reads)
	}
}

// Counts are made by the database: their cost in this process does not depend on
// the number of rows.
func TestCountsLoadNoRows(t *testing.T) {
	cost := func(n int) float64 {
		s := newStore(t)
		fill(t, s, n)
		return testing.AllocsPerRun(3, func() {
			if c := must(s.CountSandboxes(t.Context()))(t); c[agentlab.SandboxRequested] != n {
				t.Fatal(c)
			}
			if mb := must(s.SandboxMemoryMB(t.Context()))(t); mb[agentlab.SandboxRequested] != n*newSandbox("x").Resources.MemoryMB {
				t.Fatal(mb)
			}
		})
	}
	if few, many := cost(10), cost(10000); many > 1.5*few+50 {
		t.Errorf("%.0f allocations for 10 sandboxes and %.0f for 10000", few, many)
	}
}

// Records are added once and completely, also when the disk was full and had
// to be given room first.
func TestAddEgressOnFullDisk(t *testing.T) {
	smalldisk.Run(t, "16m", func(t *testing.T, dir string) {
		reserve := filepath.Join(dir, "reserve")
		if err := os.WriteFile(reserve, make([]byte, 4<<20), 0o600); err != nil {
			t.Fatal(err)
		}
		released := 0
		s, err := Open(t.Context(), filepath.Join(dir, "agentlab.db"), Options{Full: func() bool {
			released++
			return os.Remove(reserve) == nil
		}})
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		sb := must(s.AllocateSandbox(t.Context(), newSandbox("a"), agentlab.Allocation{First: 1, Last: 9}))(t)
		smalldisk.Fill(t, dir, 0)
		const batch = 500
		for seq := int64(0); released == 0; seq += batch {
			var recs []agentlab.EgressEntry
			for i := range int64(batch) {
				recs = append(recs, egressOf(sb, seq+i+1, true))
			}
			if n, err := s.AddEgress(t.Context(), recs, 1<<20); err != nil || n != batch {
				t.Fatalf("after %d: %d were added, %v", seq, n, err)
			}
		}
	})
}
