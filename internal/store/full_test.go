package store

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/test/smalldisk"
)

// fillWith appends events until no more can be written.
func fillWith(t *testing.T, s *Store) error {
	t.Helper()
	e := agentlab.Event{Kind: "test", Message: strings.Repeat("x", 4000)}
	for range 10000 {
		if err := s.AppendEvents(context.Background(), e); err != nil {
			return err
		}
	}
	t.Fatal("the disk does not get full")
	return nil
}

// A change on a full disk is no_space, and made after all when there is
// something to release.
func TestFullDiskReserve(t *testing.T) {
	smalldisk.Run(t, "16m", func(t *testing.T, dir string) {
		reserve := filepath.Join(dir, "reserve")
		if err := os.WriteFile(reserve, make([]byte, 4<<20), 0o600); err != nil {
			t.Fatal(err)
		}
		released := 0
		opts := Options{Full: func() bool {
			if os.Remove(reserve) == nil {
				released++
				return true
			}
			return false
		}}
		path := filepath.Join(dir, "agentlab.db")
		s, err := Open(t.Context(), path, opts)
		if err != nil {
			t.Fatal(err)
		}
		smalldisk.Fill(t, dir, 0)
		if released != 0 {
			t.Fatal("released before the disk was full")
		}
		err = fillWith(t, s)
		if agentlab.CodeOf(err) != agentlab.CodeNoSpace || agentlab.HintOf(err) == "" {
			t.Errorf("%v (code %s)", err, agentlab.CodeOf(err))
		}
		if released != 1 {
			t.Fatalf("released %d times", released)
		}
		// What is full again goes on as soon as there is room.
		if err := os.Truncate(filepath.Join(dir, "fill"), 0); err != nil {
			t.Fatal(err)
		}
		if err := s.AppendEvents(t.Context(), agentlab.Event{Kind: "test", Message: "room"}); err != nil {
			t.Errorf("with room again: %v", err)
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		openFull(t, dir, path, reserve, opts)
	})
}

// A change that is made again after the disk was full writes its events once.
func TestFullDiskWritesEventsOnce(t *testing.T) {
	smalldisk.Run(t, "16m", func(t *testing.T, dir string) {
		ctx := t.Context()
		var freed bool
		s, err := Open(ctx, filepath.Join(dir, "agentlab.db"), Options{Full: func() bool {
			freed = true
			return os.Truncate(filepath.Join(dir, "fill"), 0) == nil
		}})
		if err != nil {
			t.Fatal(err)
		}
		fill := func() {
			smalldisk.Fill(t, dir, 0)
			for freed = false; !freed; {
				if err := s.AppendEvents(ctx, agentlab.Event{Kind: "test", Message: strings.Repeat("x", 4000)}); err != nil {
					t.Fatal(err)
				}
			}
			smalldisk.Fill(t, dir, 0)
			freed = false
		}
		once := func(kind string) {
			t.Helper()
			if !freed {
				t.Fatal("the disk was not full")
			}
			found := must(s.Events(ctx, agentlab.EventFilter{Kinds: []string{kind}}))(t)
			if len(found) != 1 {
				t.Errorf("%d events %s", len(found), kind)
			}
		}
		fill()
		ws := agentlab.Workspace{ID: agentlab.NewWorkspaceID(), UID: agentlab.NewUID(), Name: "w", Backend: "fake", SizeGB: 1, State: agentlab.WorkspaceCreating}
		v := agentlab.Session{ID: agentlab.NewSessionID(), Name: "w", Profile: "play", WorkspaceID: ws.ID}
		v = must(s.AddSession(ctx, v, agentlab.WorkspaceUse{ID: ws.ID, New: &ws, Created: agentlab.Event{Kind: "made"}}, agentlab.Event{Kind: "other"}))(t)
		once("made")
		fill()
		if err := s.RemoveSession(ctx, v.ID, func(*agentlab.Workspace) []agentlab.Event { return []agentlab.Event{{Kind: "trash"}} }); err != nil {
			t.Fatal(err)
		}
		once("trash")
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
}

// openFull opens a database on a disk that was full before.
func openFull(t *testing.T, dir, path, reserve string, opts Options) {
	t.Helper()
	if err := os.WriteFile(reserve, make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	smalldisk.Fill(t, dir, 0)
	if _, err := Open(t.Context(), path, Options{}); agentlab.CodeOf(err) != agentlab.CodeNoSpace || !strings.Contains(err.Error(), path) {
		t.Errorf("without a reserve: %v (code %s)", err, agentlab.CodeOf(err))
	}
	s, err := Open(t.Context(), path, opts)
	if err != nil {
		t.Fatalf("with a reserve: %v", err)
	}
	if err := s.AppendEvents(t.Context(), agentlab.Event{Kind: "test", Message: "opened"}); err != nil {
		t.Error(err)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}

// Codes that name no cause are no_space where the disk is full, and only
// there; a caller's own no_space releases nothing.
func TestAmbiguousCodes(t *testing.T) {
	if c, _, _ := classify(sqlite3.SQLITE_IOERR_SHMSIZE); c != agentlab.CodeNoSpace {
		t.Errorf("4874 is %s", c)
	}
	roomy := filepath.Join(t.TempDir(), "db")
	if fullDisk(roomy, errors.New("anything")) || fullDisk(roomy, agentlab.Errorf(agentlab.CodeNoSpace, "a caller's own")) {
		t.Error("not the database's")
	}
	smalldisk.Run(t, "4m", func(t *testing.T, dir string) {
		db := filepath.Join(dir, "db")
		damaged := sqliteError(t, dir)
		if fullDisk(db, damaged) {
			t.Errorf("with room, %v is a full disk", damaged)
		}
		smalldisk.Fill(t, dir, 0)
		if !fullDisk(db, damaged) {
			t.Errorf("without room, %v (%d) is none", damaged, damaged.Code())
		}
	})
}

// sqliteError is a real error whose code says nothing about its cause: a file
// that cannot be opened.
func sqliteError(t *testing.T, dir string) *sqlite.Error {
	t.Helper()
	_, err := connect(t.Context(), filepath.Join(dir, "missing", "db"), 1, nil)
	e, ok := errors.AsType[*sqlite.Error](err)
	if !ok {
		t.Fatalf("%v", err)
	}
	return e
}
