package recovery

import (
	"database/sql"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/store"
)

// alter runs SQL on a database file without the checks of the store.
func alter(t *testing.T, path, query string) {
	t.Helper()
	db, err := sql.Open("sqlite", "file:"+path+"?_pragma=foreign_keys(0)")
	if err != nil {
		t.Fatal(err)
	}
	db.SetMaxOpenConns(1) // the pragmas in query are the connection's
	if _, err := db.ExecContext(t.Context(), query); err != nil {
		t.Fatal(err)
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
}

// A backup with damage that SQLite's quick check does not find is not restored
// when it is named. When none is named, the one before it is taken.
func TestDamagedBackupIsNotRestored(t *testing.T) {
	for name, damage := range map[string]string{
		"index":     "PRAGMA writable_schema = 1; UPDATE sqlite_schema SET sql = 'CREATE INDEX jobs_created ON jobs (task, job_id)' WHERE name = 'jobs_created'",
		"reference": "DELETE FROM jobs",
	} {
		t.Run(name, func(t *testing.T) {
			h, job := lived(t)
			sound, bad := filepath.Join(h.paths.Backups(), "000098-20260101T000000Z.db"), filepath.Join(h.paths.Backups(), "000099-20260101T000000Z.db")
			change(t, h, func(st *store.Store) {
				for _, path := range []string{sound, bad} {
					if err := st.Backup(t.Context(), path); err != nil {
						t.Fatal(err)
					}
				}
			})
			alter(t, bad, damage)
			before := files(t, h.paths.State)
			r := h.repair(bad)
			err := r.do(t.Context(), "restore", false, io.Discard)
			if agentlab.CodeOf(err) != agentlab.CodeUnavailable || !strings.Contains(err.Error(), bad) || !strings.Contains(err.Error(), "damaged") {
				t.Errorf("%s: %v", agentlab.CodeOf(err), err)
			}
			if after := files(t, h.paths.State); after != before {
				t.Errorf("the state directory was changed:\n%s\nbefore:\n%s", after, before)
			}
			r = h.repair()
			if err := r.do(t.Context(), "restore", false, io.Discard); err != nil || r.out.Backup != sound || len(r.out.Warnings) == 0 || !strings.Contains(r.out.Warnings[0], bad) {
				t.Errorf("%+v, %v", r.out, err)
			}
			change(t, h, func(st *store.Store) {
				if _, err := st.Job(t.Context(), job); err != nil {
					t.Error(err)
				}
			})
		})
	}
}

// A backup with an older schema is upgraded as a copy; the copy that an upgrade
// makes before is not left behind, because the backup itself is kept.
func TestRestoreOfAnOlderSchema(t *testing.T) {
	h, job := lived(t)
	old := filepath.Join(t.TempDir(), "old.db")
	change(t, h, func(st *store.Store) {
		if err := st.Backup(t.Context(), old); err != nil {
			t.Fatal(err)
		}
	})
	alter(t, old, `DROP TABLE snapshots; DROP TABLE messages; DROP TABLE session_sandboxes; DROP TABLE sessions; ALTER TABLE jobs DROP COLUMN branch; DROP TABLE workspace_leases; DROP TABLE workspace_snapshots; DROP TABLE workspaces; DROP INDEX sandboxes_from; DROP INDEX sandboxes_live;
		ALTER TABLE sandboxes DROP COLUMN from_snapshot; ALTER TABLE sandboxes DROP COLUMN from_sandbox; ALTER TABLE sandboxes DROP COLUMN from_handle; ALTER TABLE sandboxes DROP COLUMN from_name; ALTER TABLE sandboxes DROP COLUMN workspace_id; ALTER TABLE sandboxes DROP COLUMN restoring; ALTER TABLE sandboxes DROP COLUMN start;
		ALTER TABLE sandboxes DROP COLUMN on_disk; ALTER TABLE sandboxes DROP COLUMN handle; ALTER TABLE sandboxes DROP COLUMN waiting; ALTER TABLE jobs DROP COLUMN waiting; ALTER TABLE jobs DROP COLUMN no_setup; ALTER TABLE jobs DROP COLUMN devcontainer;
		DROP INDEX jobs_salvages; ALTER TABLE jobs DROP COLUMN salvages; ALTER TABLE jobs DROP COLUMN setup_json; ALTER TABLE sandboxes DROP COLUMN salvage; ALTER TABLE sandboxes DROP COLUMN nested; ALTER TABLE sandboxes DROP COLUMN nested_state; ALTER TABLE sandboxes DROP COLUMN unbootable; ALTER TABLE jobs DROP COLUMN memory_kills; ALTER TABLE jobs DROP COLUMN backend;
		DROP INDEX jobs_parent; ALTER TABLE jobs DROP COLUMN attempts; ALTER TABLE jobs DROP COLUMN winner; ALTER TABLE jobs DROP COLUMN parent_id; ALTER TABLE jobs DROP COLUMN fork;
		ALTER TABLE jobs DROP COLUMN attempt; ALTER TABLE jobs DROP COLUMN pick; DELETE FROM goose_db_version WHERE version_id >= 15`)
	r := h.repair(old)
	if err := r.do(t.Context(), "restore", false, io.Discard); err != nil {
		t.Fatal(err)
	}
	if left, _ := filepath.Glob(h.paths.Database() + ".re*"); len(left) != 0 {
		t.Errorf("left behind: %v", left)
	}
	change(t, h, func(st *store.Store) {
		if _, err := st.Job(t.Context(), job); err != nil {
			t.Error(err)
		}
	})
}

// killed leaves the database of a home as a killed daemon does: the last change
// is in its write-ahead log only.
func killed(t *testing.T, h *home, last string) {
	t.Helper()
	files := map[string][]byte{}
	change(t, h, func(st *store.Store) {
		if err := st.SetFact(t.Context(), last, "set"); err != nil {
			t.Fatal(err)
		}
		for _, suffix := range databaseSuffixes {
			data, err := os.ReadFile(h.paths.Database() + suffix)
			if err != nil || len(data) == 0 {
				t.Fatalf("%d bytes, %v", len(data), err)
			}
			files[suffix] = data
		}
	})
	for suffix, data := range files {
		if err := os.WriteFile(h.paths.Database()+suffix, data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

// A repair may be killed after each step in which it replaces the database. No
// daemon starts then, the next repair completes it, the old database is kept
// with its log, and nothing of that log is in the new one.
func TestReplacementIsCrashSafe(t *testing.T) {
	h, job := lived(t)
	backup := filepath.Join(t.TempDir(), "backup.db")
	change(t, h, func(st *store.Store) {
		if err := st.Backup(t.Context(), backup); err != nil {
			t.Fatal(err)
		}
	})
	steps := len((&repair{}).replaceSteps(""))
	for n := 1; n <= steps; n++ {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			last := fmt.Sprintf("last%d", n)
			killed(t, h, last)
			r := h.repair()
			if err := r.stage(t.Context(), backup, ""); err != nil {
				t.Fatal(err)
			}
			for _, step := range r.replaceSteps(fmt.Sprintf("20260101T%06dZ", n))[:n] {
				if err := step(); err != nil {
					t.Fatal(err)
				}
			} // and then it is killed
			before := files(t, h.paths.State)
			st, err := h.open(t)
			if err == nil {
				_ = st.Close()
			}
			if after := files(t, h.paths.State); after != before || agentlab.CodeOf(err) != agentlab.CodeConflict || !strings.Contains(agentlab.HintOf(err), "agentlab db rebuild") {
				t.Fatalf("a daemon: %v (%s); files\n%s\nbefore:\n%s", err, agentlab.HintOf(err), after, before)
			}
			verb := []string{"restore", "rebuild"}[n%2]
			r = h.repair()
			if verb == "restore" {
				r.backup = backup
			}
			if err := r.do(t.Context(), verb, false, io.Discard); err != nil {
				t.Fatal(err)
			}
			if left, _ := filepath.Glob(h.paths.Database() + ".re*"); len(left) != 0 {
				t.Errorf("left behind: %v", left)
			}
			change(t, h, func(st *store.Store) {
				_, err := st.Job(t.Context(), job)
				if fact, ferr := st.Fact(t.Context(), last); err != nil || ferr != nil || fact != "" {
					t.Errorf("in the new database: %v, %q, %v", err, fact, ferr)
				}
			})
			wantKept(t, r.oldDatabase(fmt.Sprintf("20260101T%06dZ", n)), last)
		})
	}
}

// wantKept checks that an old database is whole.
func wantKept(t *testing.T, path, last string) {
	t.Helper()
	old, err := store.Open(t.Context(), path, store.Options{New: func() error { return errors.New("it is missing") }})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = old.Close() }()
	if fact, err := old.Fact(t.Context(), last); err != nil || fact != "set" {
		t.Errorf("in the old database: %q, %v", fact, err)
	}
}

// Two replacements within a second keep both old databases.
func TestReplacementOverwritesNothing(t *testing.T) {
	h, _ := lived(t)
	for range 3 {
		r := h.repair()
		remove(t, h.paths.Installation())
		write(t, h.paths.Database(), "damaged")
		if err := r.do(t.Context(), "rebuild", false, io.Discard); err != nil {
			t.Fatal(err)
		}
	}
	if kept, _ := filepath.Glob(h.paths.Database() + ".lost-*Z*"); len(kept) < 3 {
		t.Errorf("kept %v", kept)
	}
}

// A restore of a file that every repair removes first, under whatever name, is
// refused and does not remove it.
func TestRestoreOfAStagedFile(t *testing.T) {
	h, _ := lived(t)
	link := filepath.Join(t.TempDir(), "link.db")
	for _, suffix := range []string{".restore", ".restore.v3.bak"} {
		staged := h.paths.Database() + suffix
		change(t, h, func(st *store.Store) {
			if err := st.Backup(t.Context(), staged); err != nil {
				t.Fatal(err)
			}
		})
		remove(t, link)
		if err := os.Symlink(staged, link); err != nil {
			t.Fatal(err)
		}
		before := files(t, h.paths.State)
		for _, path := range []string{staged, filepath.Join(h.paths.Backups(), "..", filepath.Base(staged)), link} {
			r := h.repair(path)
			err := r.do(t.Context(), "restore", false, io.Discard)
			if agentlab.CodeOf(err) != agentlab.CodeInvalid || !strings.Contains(agentlab.HintOf(err), "copy it") {
				t.Errorf("%s: %v (%s)", path, err, agentlab.HintOf(err))
			}
			if after := files(t, h.paths.State); after != before {
				t.Fatalf("%s: the state directory was changed:\n%s\nbefore:\n%s", path, after, before)
			}
		}
	}
	// A rebuild that needs no new database removes them too.
	r := h.repair()
	if err := r.do(t.Context(), "rebuild", false, io.Discard); err != nil || len(r.out.MovedTo) != 0 {
		t.Fatalf("%+v, %v", r.out, err)
	}
	if left, _ := filepath.Glob(h.paths.Database() + ".re*"); len(left) != 0 {
		t.Errorf("left behind: %v", left)
	}
}
