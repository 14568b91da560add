package daemon

import (
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
