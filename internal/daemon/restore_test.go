package daemon

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/auth"
	"github.com/agentlab-vm/agentlab/internal/store"
)

// A token that was revoked after the backup was made stays revoked. What an
// attempt that was killed left behind does no harm.
func TestRestoreRevivesNoToken(t *testing.T) {
	h, job := lived(t)
	backup := filepath.Join(t.TempDir(), "backup.db")
	change(t, h, func(st *store.Store) {
		made, _, err := auth.New(auth.Config{Store: st}).Create(t.Context(), auth.Request{Name: "ci", Role: agentlab.RoleAdmin, TTL: time.Hour})
		if err != nil {
			t.Fatal(err)
		}
		if err := st.Backup(t.Context(), backup); err != nil {
			t.Fatal(err)
		}
		if _, err := st.DeleteAPIToken(t.Context(), made.ID, func(agentlab.APIToken) []agentlab.Event { return nil }); err != nil {
			t.Fatal(err)
		}
	})
	for _, suffix := range []string{"", "-wal", "-shm"} {
		if err := os.WriteFile(h.paths.Database()+".restore"+suffix, []byte("half of it"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	r := repair{runOptions: runOptions{home: h.paths.Home}, backup: backup}
	if err := r.do(t.Context(), "restore", false, io.Discard); err != nil {
		t.Fatal(err)
	}
	if len(r.out.Warnings) == 0 || !strings.Contains(r.out.Warnings[0], "agentlab token create") {
		t.Errorf("warnings: %q", r.out.Warnings)
	}
	change(t, h, func(st *store.Store) {
		if list, err := st.APITokens(t.Context()); err != nil || len(list) != 0 {
			t.Errorf("tokens after the restore: %v, %v", list, err)
		}
		if _, err := st.Job(t.Context(), job); err != nil {
			t.Error(err)
		}
	})
	if left, _ := filepath.Glob(h.paths.Database() + ".restore*"); len(left) != 0 {
		t.Errorf("left behind: %v", left)
	}
}

// A repair that is killed before the database is filled leaves one that no
// daemon uses: it would take the files of all jobs for leftovers.
func TestUnfinishedRepairIsRefused(t *testing.T) {
	h, job := lived(t)
	backup := filepath.Join(t.TempDir(), "backup.db")
	change(t, h, func(st *store.Store) {
		err := errors.Join(st.DeleteArtifacts(t.Context(), job), st.DeleteJob(t.Context(), job)) // the backup is older than the job
		if err != nil {
			t.Fatal(err)
		}
		if err := st.Backup(t.Context(), backup); err != nil {
			t.Fatal(err)
		}
	})
	for name, step := range map[string]func(*repair) error{
		"restore": func(r *repair) error { return r.restore(t.Context()) },
		"rebuild": func(r *repair) error {
			remove(t, h.paths.Database())
			return r.rebuild(t.Context())
		},
	} {
		r := repair{paths: h.paths, backup: backup}
		if err := step(&r); err != nil { // and then it is killed
			t.Fatal(err)
		}
		if d, err := h.open(t); agentlab.CodeOf(err) != agentlab.CodeConflict || !strings.Contains(agentlab.HintOf(err), "agentlab db rebuild") {
			t.Errorf("%s: the daemon starts: %v (%s)", name, err, agentlab.HintOf(err))
			if err == nil {
				_ = d.Close()
			}
		}
		r = repair{runOptions: runOptions{home: h.paths.Home}}
		if err := r.do(t.Context(), "rebuild", false, io.Discard); err != nil {
			t.Fatal(err)
		}
		change(t, h, func(st *store.Store) {
			if _, err := st.Job(t.Context(), job); err != nil {
				t.Errorf("%s: after a rebuild: %v", name, err)
			}
		})
		d, err := h.open(t)
		if err != nil {
			t.Fatalf("%s: after a rebuild: %v", name, err)
		}
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	}
}
