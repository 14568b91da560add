package recovery

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/config"
	"github.com/agentlab-vm/agentlab/internal/durable"
	"github.com/agentlab-vm/agentlab/internal/fsfault"
	"github.com/agentlab-vm/agentlab/internal/store"
)

// The database and the state directory belong together: each has the ID of the
// installation, and a daemon works only with a pair that matches. With a
// database that lost its rows, or with that of another installation, a daemon
// would delete every file of the state directory as a leftover.
//
//	database    id file    files of jobs      result
//	empty       any        none, no backups   new installation, or the id of the file
//	empty       any        some               refused: the database was lost
//	id A        id A       any                match
//	id A        id B       any                refused: of another installation
//	one of the two has no id                  the id is copied, or made; refused
//	                                          unless the database knows every job
//	                                          that has files
//
// A database that a repair has not filled yet is rejected, regardless of its
// ID.
//
// The ID is written to the database first. After a crash before the file is
// written, the next start finds the last case and completes it.

// Installation is a state directory with its database.
type Installation struct {
	paths config.Paths
	store *store.Store
}

// Open opens the database of a state directory, and makes sure that the two
// belong together. A new installation gets an id.
func Open(ctx context.Context, p config.Paths, o store.Options) (st *store.Store, _ *Installation, err error) {
	if err := checkReplaced(p); err != nil {
		return nil, nil, err
	}
	o.New = func() error { return checkDatabasePresent(p) }
	if st, err = store.Open(ctx, p.Database(), o); err != nil {
		return nil, nil, err
	}
	if err := bindInstallation(ctx, p, st); err != nil {
		return nil, nil, errors.Join(err, st.Close())
	}
	return st, &Installation{p, st}, nil
}

// repairHint returns the end of the hints about a database that cannot be
// used.
func repairHint(p config.Paths) string {
	system := ""
	if p.System {
		system = " --system"
	}
	return fmt.Sprintf("restore a backup: agentlab db restore%[1]s; or create a database from the existing files: agentlab db rebuild%[1]s", system)
}

// stateContents lists the contents of a state directory that a database
// describes.
type stateContents struct {
	jobs        []string // ids of jobs with artifacts, a log, a bundle or a record
	quarantined int      // jobs with files only in quarantine
	sandboxes   int
	backups     int
}

// scanState reads the names in the state directory.
func scanState(p config.Paths) (h stateContents, err error) {
	seen := map[string]bool{}
	var errs []error
	each := func(dir string, f func(name string)) {
		entries, err := os.ReadDir(dir)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, fsfault.At(dir, err))
		}
		for _, e := range entries {
			f(e.Name())
		}
	}
	newJob := func(name string) (id string, ok bool) {
		id, _, _ = strings.Cut(name, "@") // names in quarantine have a suffix
		id, _, _ = strings.Cut(id, ".")
		ok = agentlab.ValidateJobID(id) == nil && !seen[id]
		seen[id] = true
		return id, ok
	}
	dirs := []string{p.Artifacts(), filepath.Join(p.State, "logs"), p.Bundles()}
	for _, dir := range append(dirs, p.Records()) {
		each(dir, func(name string) {
			if id, ok := newJob(name); ok {
				h.jobs = append(h.jobs, id)
			}
		})
	}
	for _, dir := range dirs {
		each(filepath.Join(dir, ".quarantine"), func(name string) {
			if _, ok := newJob(name); ok {
				h.quarantined++
			}
		})
	}
	each(p.Sandboxes(), func(string) { h.sandboxes++ })
	each(p.Backups(), func(string) { h.backups++ })
	return h, errors.Join(errs...)
}

func (h stateContents) none() bool { return h.String() == "" }

func (h stateContents) String() string {
	var parts []string
	for _, c := range []struct {
		n    int
		what string
	}{{len(h.jobs) + h.quarantined, "jobs"}, {h.sandboxes, "sandboxes"}, {h.backups, "backups of the database"}} {
		if c.n > 0 {
			parts = append(parts, fmt.Sprintf("%s: %d", c.what, c.n))
		}
	}
	return strings.Join(parts, ", ")
}

// checkDatabasePresent refuses to create a database beside files of an earlier
// database.
func checkDatabasePresent(p config.Paths) error {
	h, err := scanState(p)
	if err != nil || h.none() {
		return err
	}
	return agentlab.Errorf(agentlab.CodeConflict, "the database %s is missing or empty, but %s contains files that belong to it (%s)", p.Database(), p.State, h).
		WithHint("%s; to start with an empty state, move %s away", repairHint(p), p.State)
}

// bindInstallation checks that the database and the state directory belong together, and
// gives them an id if they are new.
func bindInstallation(ctx context.Context, p config.Paths, st *store.Store) error {
	if mark, err := st.Fact(ctx, store.FactRepair); err != nil || mark != "" {
		if err == nil {
			err = unfinished(p, mark)
		}
		return err
	}
	inFile, err := installationOf(p)
	if err != nil {
		return err
	}
	inStore, err := st.Fact(ctx, store.FactInstallation)
	if err != nil {
		return err
	}
	switch {
	case inStore != "" && inStore == inFile:
		return nil
	case inStore != "" && inFile != "":
		return agentlab.Errorf(agentlab.CodeConflict, "the database %s belongs to another installation than the state directory %s", p.Database(), p.State).
			WithHint("restore the database that belongs to the state directory, or %s", repairHint(p))
	}
	if err := checkKnown(ctx, p, st); err != nil {
		return err
	}
	id := inStore + inFile // one of them is empty
	if id == "" {
		id = agentlab.NewUID()
	}
	if inStore == "" {
		if err := st.SetFact(ctx, store.FactInstallation, id); err != nil {
			return err
		}
	}
	if inFile == "" {
		return writeInstallation(p, id)
	}
	return nil
}

// checkKnown rejects a database that lacks a job that has files. A database with
// only some of these jobs may be an old copy, or may share a job with another
// installation after a restore. Files in quarantine do not count: the right
// database has no rows for them either.
func checkKnown(ctx context.Context, p config.Paths, st *store.Store) error {
	h, err := scanState(p)
	if err != nil {
		return err
	}
	unknown := 0
	for _, id := range h.jobs {
		switch _, err := st.Job(ctx, id); agentlab.CodeOf(err) {
		case "":
		case agentlab.CodeNotFound:
			unknown++
		default:
			return err
		}
	}
	if unknown == 0 {
		return nil
	}
	return agentlab.Errorf(agentlab.CodeConflict, "the database %[1]s and the state directory %[2]s do not have the same ID, and %[4]d of the %[3]d jobs with files there are not in the database",
		p.Database(), p.State, len(h.jobs), unknown).
		WithHint("restore the database that belongs to the state directory, or %s", repairHint(p))
}

// installationOf returns the ID of the state directory, "" if it has none.
func installationOf(p config.Paths) (string, error) {
	text, err := os.ReadFile(p.Installation())
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	id := strings.TrimSpace(string(text))
	switch {
	case err != nil:
		return "", fsfault.At(p.Installation(), err)
	case len(id) != len(agentlab.NewUID()) || strings.ContainsAny(id, " \n\t"):
		return "", agentlab.Errorf(agentlab.CodeConflict, "%s does not contain an installation ID", p.Installation()).
			WithHint("if the database beside the file is the correct one, remove the file: the ID is then written again")
	}
	return id, nil
}

func writeInstallation(p config.Paths, id string) error {
	if err := durable.Replace(p.Installation(), []byte(id+"\n"), durable.Name); err != nil {
		return fsfault.At(p.Installation(), err)
	}
	return nil
}

// Check compares the two ids again in a running daemon: the state directory or
// its id may have been replaced.
func (i *Installation) Check(ctx context.Context) error {
	p := i.paths
	inStore, err := i.store.Fact(ctx, store.FactInstallation)
	if err != nil {
		return err
	}
	inFile, err := installationOf(p)
	if err != nil {
		return err
	}
	if inStore == "" || inStore != inFile {
		return agentlab.Errorf(agentlab.CodeConflict, "the ID of the state directory %s no longer matches the database; nothing in it is removed", p.State).
			WithHint("restart the daemon: its error has instructions")
	}
	return nil
}
