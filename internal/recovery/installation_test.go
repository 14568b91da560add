package recovery

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/store"
)

func remove(t *testing.T, paths ...string) {
	t.Helper()
	for _, p := range paths {
		if err := os.RemoveAll(p); err != nil {
			t.Fatal(err)
		}
	}
}

// change opens the database of a home without a daemon.
func change(t *testing.T, h *home, f func(*store.Store)) {
	t.Helper()
	st, err := store.Open(t.Context(), h.paths.Database(), store.Options{})
	if err != nil {
		t.Fatal(err)
	}
	f(st)
	if err := st.Close(); err != nil {
		t.Fatal(err)
	}
}

func setID(t *testing.T, h *home, id string) {
	t.Helper()
	change(t, h, func(st *store.Store) {
		if err := st.SetFact(t.Context(), store.FactInstallation, id); err != nil {
			t.Error(err)
		}
	})
}

// TestInstallation is every state of the pair of a database and a state
// directory. Where a start is refused, every file stays.
func TestInstallation(t *testing.T) {
	for _, c := range []struct {
		name    string
		prepare func(t *testing.T, h *home, job string)
		refused string // in the error; "" when the daemon starts
	}{
		{"match", func(*testing.T, *home, string) {}, ""},
		{"missing database", func(t *testing.T, h *home, _ string) { remove(t, h.paths.Database()) }, "missing or empty"},
		{"empty database", func(t *testing.T, h *home, _ string) { write(t, h.paths.Database(), "") }, "missing or empty"},
		{"missing database and id", func(t *testing.T, h *home, _ string) { remove(t, h.paths.Database(), h.paths.Installation()) }, "missing or empty"},
		{"missing database, a log only", func(t *testing.T, h *home, _ string) {
			remove(t, h.paths.Database(), h.paths.Artifacts(), h.paths.Backups(), h.paths.Records())
		}, "missing or empty"},
		{"missing database, backups only", func(t *testing.T, h *home, job string) {
			remove(t, h.paths.Database(), h.paths.Artifacts(), h.paths.Records(), filepath.Join(h.paths.State, "logs", job+".log"))
			write(t, filepath.Join(h.paths.Backups(), "000001-20260101T000000Z.db"), "x")
		}, "missing or empty"},
		{"missing database and nothing else", func(t *testing.T, h *home, job string) {
			remove(t, h.paths.Database(), h.paths.Artifacts(), h.paths.Backups(), h.paths.Records(), filepath.Join(h.paths.State, "logs", job+".log"))
		}, ""},
		{"missing database, records only", func(t *testing.T, h *home, job string) {
			remove(t, h.paths.Database(), h.paths.Artifacts(), h.paths.Backups(), filepath.Join(h.paths.State, "logs", job+".log"))
		}, "(jobs: 1)"},
		{"another installation", func(t *testing.T, h *home, _ string) { setID(t, h, agentlab.NewUID()) }, "belongs to another installation"},
		{"missing id file, known jobs", func(t *testing.T, h *home, _ string) { remove(t, h.paths.Installation()) }, ""},
		{"older database, known jobs", func(t *testing.T, h *home, _ string) {
			setID(t, h, "")
			remove(t, h.paths.Installation())
		}, ""},
		{"database without an id, id file", func(t *testing.T, h *home, _ string) { setID(t, h, "") }, ""},
		{"missing id file, unknown jobs", func(t *testing.T, h *home, job string) {
			remove(t, h.paths.Installation())
			change(t, h, func(st *store.Store) {
				if err := st.DeleteArtifacts(t.Context(), job); err != nil {
					t.Error(err)
				}
				if err := st.DeleteJob(t.Context(), job); err != nil {
					t.Error(err)
				}
			})
		}, "1 of the 1 jobs with files there are not in the database"},
		{"missing id file, one unknown job", func(t *testing.T, h *home, _ string) {
			remove(t, h.paths.Installation())
			record(t, h, agentlab.Job{ID: "job-aaaaaaaaaaaaa", Status: agentlab.JobFailed})
		}, "1 of the 2 jobs with files there are not in the database"},
		{"older database, one unknown job", func(t *testing.T, h *home, _ string) {
			setID(t, h, "")
			remove(t, h.paths.Installation())
			write(t, filepath.Join(h.paths.Artifacts(), "job-aaaaaaaaaaaaa", "result"), "of another installation")
		}, "1 of the 2 jobs with files there are not in the database"},
		{"missing id file, unknown job in quarantine", func(t *testing.T, h *home, _ string) {
			remove(t, h.paths.Installation())
			write(t, filepath.Join(h.paths.Artifacts(), ".quarantine", "job-aaaaaaaaaaaaa@20260101T000000Z", "result"), "a leftover")
		}, ""},
		{"damaged id file", func(t *testing.T, h *home, _ string) { write(t, h.paths.Installation(), "?") }, "does not contain an installation ID"},
	} {
		t.Run(c.name, func(t *testing.T) {
			h, job := lived(t)
			c.prepare(t, h, job)
			before := files(t, h.paths.State)
			st, err := h.open(t)
			if c.refused != "" {
				if err == nil {
					_ = st.Close()
					t.Fatal("it starts")
				}
				if !strings.Contains(err.Error(), c.refused) || agentlab.CodeOf(err) != agentlab.CodeConflict || agentlab.HintOf(err) == "" {
					t.Errorf("code %s: %v; hint %q", agentlab.CodeOf(err), err, agentlab.HintOf(err))
				}
				if after := files(t, h.paths.State); after != before {
					t.Errorf("the state directory was changed:\n%s\nbefore:\n%s", after, before)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			id, err := st.Fact(t.Context(), store.FactInstallation)
			if inFile, ferr := installationOf(h.paths); err != nil || ferr != nil || id == "" || id != inFile {
				t.Errorf("id %q and %q, %v, %v", id, inFile, err, ferr)
			}
			if err := st.Close(); err != nil {
				t.Error(err)
			}
		})
	}
}

// files lists what is in a state directory beside what every start touches.
func files(t *testing.T, dir string) string {
	t.Helper()
	var out []string
	err := filepath.WalkDir(dir, func(p string, e os.DirEntry, err error) error {
		if err != nil || e.IsDir() || strings.HasPrefix(e.Name(), "agentlabd.") || strings.HasPrefix(e.Name(), "agentlab.db-") {
			return err
		}
		st, err := e.Info()
		out = append(out, p+" "+st.Mode().String())
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return strings.Join(out, "\n")
}

// A state directory that was replaced while a daemon uses it is noticed.
func TestReplacedStateDirectory(t *testing.T) {
	h, _ := lived(t)
	st, i, err := Open(t.Context(), h.paths, store.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = st.Close() }()
	if err := i.Check(t.Context()); err != nil {
		t.Error(err)
	}
	write(t, h.paths.Installation(), agentlab.NewUID()+"\n")
	if err := i.Check(t.Context()); agentlab.CodeOf(err) != agentlab.CodeConflict || agentlab.HintOf(err) == "" {
		t.Errorf("%v", err)
	}
	remove(t, h.paths.Installation())
	if err := i.Check(t.Context()); agentlab.CodeOf(err) != agentlab.CodeConflict {
		t.Errorf("without the file: %v", err)
	}
}
