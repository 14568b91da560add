package store

import (
	"bytes"
	"context"
	"database/sql"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
)

func TestBackupWhileWriting(t *testing.T) {
	s := newStore(t)
	if err := s.SetFact(t.Context(), FactInstallation, "home"); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	var writer sync.WaitGroup
	writer.Go(func() {
		for ctx.Err() == nil {
			if err := s.CreateJob(t.Context(), newJob(), nil); err != nil {
				t.Error(err)
				return
			}
		}
	})
	defer writer.Wait()
	defer stop()
	path := filepath.Join(t.TempDir(), "copy.db")
	for range 3 {
		if err := s.Backup(t.Context(), path); err != nil {
			t.Fatal(err)
		}
	}
	sum, err := Inspect(t.Context(), path)
	if err != nil || sum.Installation != "home" || sum.Schema != NewestSchema() {
		t.Errorf("%+v, %v", sum, err)
	}
	st, err := os.Stat(path)
	if err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", st, err)
	}
	entries, _ := os.ReadDir(filepath.Dir(path))
	if len(entries) != 1 {
		t.Errorf("files %v", entries)
	}
	c, err := Open(t.Context(), path, Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	if jobs, err := c.Jobs(t.Context(), agentlab.JobFilter{}); err != nil || len(jobs) != sum.Jobs {
		t.Errorf("%d jobs of %d, %v", len(jobs), sum.Jobs, err)
	}
}

// A backup of a damaged database is refused, and the older one stays.
func TestBackupOfDamage(t *testing.T) {
	s := newStore(t)
	for range 200 {
		j := newJob()
		j.Task = strings.Repeat("x", 1000)
		if err := s.CreateJob(t.Context(), j, nil); err != nil {
			t.Fatal(err)
		}
	}
	path := filepath.Join(t.TempDir(), "copy.db")
	if err := s.Backup(t.Context(), path); err != nil {
		t.Fatal(err)
	}
	before := readAll(t, path)
	if _, err := s.w.ExecContext(t.Context(), "PRAGMA wal_checkpoint(TRUNCATE)"); err != nil {
		t.Fatal(err)
	}
	data := readAll(t, s.path)
	copy(data[4096:], bytes.Repeat([]byte{0xA5}, 20*4096))
	if err := os.WriteFile(s.path, data, 0o600); err != nil {
		t.Fatal(err)
	}
	wantCode(t, s.Backup(t.Context(), path), agentlab.CodeUnavailable)
	if !bytes.Equal(before, readAll(t, path)) {
		t.Error("the older backup was changed")
	}
}

// Where there is no database, none is made without the consent of the caller.
func TestNewDatabaseIsAskedFor(t *testing.T) {
	dir := t.TempDir()
	empty := filepath.Join(dir, "empty.db")
	if err := os.WriteFile(empty, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	blank := filepath.Join(dir, "blank.db") // has a page and no table
	db, err := sql.Open("sqlite", blank)
	if err == nil {
		_, err = db.ExecContext(t.Context(), "CREATE TABLE t (x); DROP TABLE t")
	}
	if err = errors.Join(err, db.Close()); err != nil {
		t.Fatal(err)
	}
	refused := errors.New("refused")
	for _, path := range []string{filepath.Join(dir, "missing.db"), empty, blank} {
		before, _ := os.ReadFile(path)
		_, err := Open(t.Context(), path, Options{New: func() error { return refused }})
		after, _ := os.ReadFile(path)
		if !errors.Is(err, refused) || !bytes.Equal(before, after) {
			t.Errorf("%s: %v; %d bytes, before %d", path, err, len(after), len(before))
		}
	}
	if _, err := os.Stat(filepath.Join(dir, "missing.db")); err == nil {
		t.Error("the file was made")
	}
	s, err := Open(t.Context(), newStore(t).path, Options{New: func() error { return refused }})
	if err != nil {
		t.Fatal(err)
	}
	_ = s.Close()
}

// What is under way has as much time left after a jump as before; what people
// made with an end of its own keeps that.
func TestClockJumpedMovesEnds(t *testing.T) {
	const shift = 31 * 24 * time.Hour
	s := newStore(t)
	hash := hashOf("a")
	sb, j := booting(t, s, "one", hash)
	if _, err := s.UpdateJob(t.Context(), j.ID, func(j *agentlab.Job) ([]agentlab.Event, error) {
		j.Status, j.DeadlineAt = agentlab.JobRunning, epoch.Add(time.Hour)
		return nil, nil
	}); err != nil {
		t.Fatal(err)
	}
	ended := newJob()
	ended.Status, ended.DeadlineAt = agentlab.JobCompleted, epoch
	if err := s.CreateJob(t.Context(), ended, nil); err != nil {
		t.Fatal(err)
	}
	var leases []agentlab.WorkspaceLease
	for _, name := range []string{"has it", "waits"} {
		use := agentlab.WorkspaceUse{ID: "ws-aaaaaaaaaaaaa", Wait: time.Hour}
		if len(leases) == 0 {
			use.New = &agentlab.Workspace{ID: "ws-aaaaaaaaaaaaa", UID: agentlab.NewUID(), Name: "data", Backend: "fake", SizeGB: 1, State: agentlab.WorkspaceCreating}
			use.Created = agentlab.Event{Kind: agentlab.EventWorkspaceState}
		}
		user := must(s.AllocateSandbox(t.Context(), newSandbox(strings.ReplaceAll(name, " ", "-")), agentlab.Allocation{First: 2000, Last: 2009, Workspace: &use}))(t)
		l, _, err := s.WorkspaceLease(t.Context(), user.UID)
		leases = append(leases, must(l, err)(t))
	}
	if err := s.ClockJumped(t.Context(), shift, "seen", agentlab.Event{Kind: agentlab.EventClock, Message: "jump"}); err != nil {
		t.Fatal(err)
	}
	s.clock.advance(shift)
	if got := must(s.Sandbox(t.Context(), sb.VMID))(t); !got.LeaseExpiresAt.Equal(sb.LeaseExpiresAt.Add(shift)) || !got.CreatedAt.Equal(sb.CreatedAt.Add(shift)) {
		t.Errorf("lease %s, created %s", got.LeaseExpiresAt, got.CreatedAt) // a lease can be renewed until a time after the creation
	}
	for i, l := range leases {
		got, _, err := s.WorkspaceLease(t.Context(), l.UID)
		if err != nil || got.Acquired() != (i == 0) || !got.WaitUntil.Equal(l.WaitUntil.Add(shift)) {
			t.Errorf("lease of a workspace %+v, %v", got, err)
		}
	}
	if got := must(s.Job(t.Context(), j.ID))(t); !got.DeadlineAt.Equal(epoch.Add(time.Hour + shift)) {
		t.Errorf("deadline %s", got.DeadlineAt)
	}
	if got := must(s.Job(t.Context(), ended.ID))(t); !got.DeadlineAt.Equal(epoch) {
		t.Errorf("deadline of an ended job %s", got.DeadlineAt)
	}
	if err := s.CheckBootstrap(t.Context(), hash, sb.VMID); err != nil {
		t.Errorf("bootstrap token: %v", err)
	}
	if got := must(s.Fact(t.Context(), FactClock))(t); got != "seen" {
		t.Errorf("fact %q", got)
	}
	if evs := must(s.Events(t.Context(), agentlab.EventFilter{Kinds: []string{agentlab.EventClock}}))(t); len(evs) != 1 {
		t.Errorf("events %v", evs)
	}
}
