package recovery

import (
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/artifact"
	"github.com/agentlab-vm/agentlab/internal/backend/registry"
	"github.com/agentlab-vm/agentlab/internal/config"
	"github.com/agentlab-vm/agentlab/internal/store"
)

// home is an AGENTLAB_HOME. The tests of the daemon and of the command line
// repair the database of a daemon that really ran.
type home struct{ paths config.Paths }

func newHome(t *testing.T) *home {
	t.Helper()
	paths, err := config.Home{Dir: t.TempDir()}.Paths()
	if err != nil {
		t.Fatal(err)
	}
	if err := paths.Ensure(); err != nil {
		t.Fatal(err)
	}
	h := &home{paths}
	write(t, paths.ConfigFile(), "backend: fake\n")
	return h
}

// closedBackend is a list with a backend that cannot be opened, under the name
// of the one in config.yaml.
var closedBackend = registry.List{{Name: "fake", Open: func(registry.Env) (registry.Opened, error) {
	return registry.Opened{}, agentlab.Errorf(agentlab.CodeUnavailable, "closed for this test")
}}}

// repair returns a run of the command, with a backup to restore or none.
func (h *home) repair(backup ...string) repair {
	return repair{home: config.Home{Dir: h.paths.Home}, paths: h.paths, backends: closedBackend, backup: strings.Join(backup, "")}
}

// open opens the database as a daemon does.
func (h *home) open(t *testing.T) (*store.Store, error) {
	t.Helper()
	st, _, err := Open(t.Context(), h.paths, store.Options{})
	return st, err
}

// use opens the database as a daemon does, and closes it.
func (h *home) use(t *testing.T) {
	t.Helper()
	st, err := h.open(t)
	if err != nil {
		t.Fatal(err)
	}
	if err := st.Close(); err != nil {
		t.Fatal(err)
	}
}

// writeRecords writes the records that are due, as a daemon does at its end.
func (h *home) writeRecords(t *testing.T, st *store.Store) {
	t.Helper()
	r := NewRecords(RecordsConfig{Dir: h.paths.Records(), Store: st, Clock: time.Now, Logger: slog.New(slog.DiscardHandler)})
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
}

// lived makes a home that a daemon has used, with the files of one job, and
// returns the id of the job.
func lived(t *testing.T) (*home, string) {
	t.Helper()
	h := newHome(t)
	st, err := h.open(t)
	if err != nil {
		t.Fatal(err)
	}
	files, err := artifact.New(artifact.Config{Dir: h.paths.State, Store: st})
	if err != nil {
		t.Fatal(err)
	}
	const id = "job-kkkkkkkkkkkkk"
	ended := func(status agentlab.JobStatus) error {
		_, err := st.UpdateJob(t.Context(), id, func(j *agentlab.Job) ([]agentlab.Event, error) {
			now := time.Now().UTC()
			j.Status = status
			if j.StartedAt.IsZero() {
				j.StartedAt = now
			}
			if status.Final() {
				j.FinishedAt, j.ExitCode = now, new(int)
			}
			return nil, nil
		})
		return err
	}
	_, _, lerr := files.AppendLog(t.Context(), id, 0, []byte("done\n"))
	err = errors.Join(lerr, st.CreateJob(t.Context(), agentlab.Job{ID: id, Task: "echo done\nartifact out.txt the result", Agent: "shell", Mode: "dangerous", Profile: "yolo-ephemeral", Status: agentlab.JobQueued}, nil),
		ended(agentlab.JobRunning))
	_, perr := files.Put(t.Context(), id, "out.txt", strings.NewReader("the result"))
	if err = errors.Join(err, perr, ended(agentlab.JobCompleted)); err != nil {
		t.Fatal(err)
	}
	h.writeRecords(t, st)
	b := NewBackups(BackupsConfig{Dir: h.paths.Backups(), Store: st, Keep: config.Backups{Newest: 1}, Space: room{}, Clock: time.Now})
	if _, err := b.Make(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(files.Close(), st.Close()); err != nil {
		t.Fatal(err)
	}
	return h, id
}

// room is a disk with room, or without.
type room struct{ err error }

func (r room) Start() error { return r.err }

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}
