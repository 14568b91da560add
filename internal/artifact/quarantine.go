package artifact

import (
	"context"
	"errors"
	"io/fs"
	"maps"
	"os"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/agentlab-vm/agentlab"
)

// The quarantine of each root is a directory in it, so that moving there is
// one rename. The name of an entry has its job and the time when it was moved:
// quarantineDir/<job_id>@<time><suffix>, which is a directory of artifacts
// (suffix "" or a path in it), a log or a bundle.
const (
	quarantineDir  = ".quarantine"
	quarantineTime = "20060102T150405Z"
)

// quarantine moves an object of a job, or with a suffix "/…" one of its
// artifacts, to the quarantine.
func (s *Service) quarantine(root *os.Root, name, jobID, suffix string) error {
	to := path.Join(quarantineDir, jobID+"@"+s.clock().UTC().Format(quarantineTime)+suffix)
	err := root.MkdirAll(path.Dir(to), 0o700)
	if err == nil {
		if _, lerr := root.Lstat(to); lerr == nil {
			return nil // moved within the same second; the next sweep moves this one
		}
		err = root.Rename(name, to)
	}
	if errors.Is(err, fs.ErrNotExist) {
		return nil // deleted in the meantime
	}
	return fault(err, "move %s to the quarantine", name)
}

// quarantined is one entry of a quarantine.
type quarantined struct {
	name   string // in the root
	jobID  string
	suffix string // "", ".log" or ".bundle"
	at     time.Time
}

// listQuarantine lists the entries of a root, the oldest first.
func listQuarantine(root *os.Root) ([]quarantined, error) {
	entries, err := fs.ReadDir(root.FS(), quarantineDir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	var out []quarantined
	for _, e := range entries {
		jobID, rest, _ := strings.Cut(e.Name(), "@")
		stamp, suffix := rest, ""
		if i := strings.IndexByte(rest, '.'); i >= 0 {
			stamp, suffix = rest[:i], rest[i:]
		}
		at, terr := time.Parse(quarantineTime, stamp)
		if terr != nil || agentlab.ValidateJobID(jobID) != nil {
			continue // not created by AgentLab
		}
		out = append(out, quarantined{path.Join(quarantineDir, e.Name()), jobID, suffix, at})
	}
	slices.SortFunc(out, func(a, b quarantined) int { return a.at.Compare(b.at) })
	return out, fault(err, "list the quarantine")
}

// expire deletes entries whose quarantine has ended.
func (s *Service) expire(root *os.Root, n *int) error {
	list, err := listQuarantine(root)
	errs := []error{err}
	for _, q := range list {
		if s.clock().Sub(q.at) < s.limits.Quarantine {
			continue
		}
		*n++
		errs = append(errs, fault(root.RemoveAll(q.name), "remove %s", q.name))
	}
	return errors.Join(errs...)
}

// RecoveredJob is the data about a job from its files.
type RecoveredJob struct {
	JobID  string
	Oldest time.Time // of its files
	Newest time.Time
}

// Recover moves all entries of the quarantine back, unless another file has
// their path, and returns the jobs with artifacts or a log, by ID. It is for
// rebuilding the database; no other process may use the directory.
func (s *Service) Recover() ([]RecoveredJob, error) {
	var errs []error
	found := map[string]*RecoveredJob{}
	for _, r := range []struct {
		root   *os.Root
		suffix string
	}{{s.files, ""}, {s.logs, ".log"}, {s.bundles, ".bundle"}} {
		errs = append(errs, restore(r.root, r.suffix))
		if r.root == s.bundles {
			continue // the inputs of a job have no information about its work
		}
		entries, err := fs.ReadDir(r.root.FS(), ".")
		errs = append(errs, fault(err, "list the state directory"))
		for _, e := range entries {
			id, ok := strings.CutSuffix(e.Name(), r.suffix)
			if ok && agentlab.ValidateJobID(id) == nil {
				errs = append(errs, scan(r.root, e.Name(), id, found))
			}
		}
	}
	out := []RecoveredJob{}
	for _, id := range slices.Sorted(maps.Keys(found)) {
		out = append(out, *found[id])
	}
	return out, errors.Join(errs...)
}

// scan records the times of the files of a job.
func scan(root *os.Root, name, jobID string, found map[string]*RecoveredJob) error {
	return fs.WalkDir(root.FS(), name, func(_ string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		st, err := e.Info()
		if err != nil {
			return err
		}
		f, at := found[jobID], st.ModTime().UTC()
		if f == nil {
			f = &RecoveredJob{JobID: jobID, Oldest: at, Newest: at}
			found[jobID] = f
		}
		if at.Before(f.Oldest) {
			f.Oldest = at
		}
		if at.After(f.Newest) {
			f.Newest = at
		}
		return nil
	})
}

// restore empties a quarantine, the newest first. An entry whose place is
// taken stays.
func restore(root *os.Root, suffix string) error {
	list, err := listQuarantine(root)
	errs := []error{err}
	for _, q := range slices.Backward(list) {
		if q.suffix != suffix {
			continue
		}
		if suffix != "" {
			errs = append(errs, moveUnique(root, q.name, q.jobID+suffix))
			continue
		}
		errs = append(errs, fs.WalkDir(root.FS(), q.name, func(name string, e fs.DirEntry, err error) error {
			if err != nil || e.IsDir() {
				return err
			}
			return moveUnique(root, name, q.jobID+strings.TrimPrefix(name, q.name))
		}))
		removeEmpty(root, q.name)
	}
	return errors.Join(errs...)
}

// moveUnique renames a file unless the new name exists.
func moveUnique(root *os.Root, from, to string) error {
	if _, err := root.Lstat(to); err == nil {
		return nil
	}
	err := root.MkdirAll(path.Dir(to), 0o700)
	if err == nil {
		err = root.Rename(from, to)
	}
	return fault(err, "move %s back", from)
}

// removeEmpty removes a directory tree if it has no files.
func removeEmpty(root *os.Root, name string) {
	var dirs []string
	_ = fs.WalkDir(root.FS(), name, func(p string, e fs.DirEntry, err error) error {
		if err == nil && e.IsDir() {
			dirs = append(dirs, p)
		}
		return nil
	})
	for _, d := range slices.Backward(dirs) {
		_ = root.Remove(d) // fails if it is not empty
	}
}

// Describe creates the missing rows of a job's artifacts and returns their
// number. Like Recover it is for rebuilding the database.
func (s *Service) Describe(ctx context.Context, jobID string) (n int, err error) {
	if err := agentlab.ValidateJobID(jobID); err != nil {
		return 0, err
	}
	if _, err := s.files.Lstat(jobID); errors.Is(err, fs.ErrNotExist) {
		return 0, nil // a job with only a log
	}
	rows, err := s.store.Artifacts(ctx, jobID)
	if err != nil {
		return 0, err
	}
	known := map[string]bool{}
	for _, a := range rows {
		known[a.Path] = true
	}
	err = fs.WalkDir(s.files.FS(), jobID, func(name string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		p := strings.TrimPrefix(name, jobID+"/")
		if known[p] || agentlab.ValidateArtifactPath(p) != nil || !e.Type().IsRegular() {
			return nil //nolint:nilerr // a name that is not of an artifact is not touched
		}
		st, err := e.Info()
		if err != nil {
			return err
		}
		n++
		return s.describe(ctx, jobID, p, st.ModTime())
	})
	return n, err
}
