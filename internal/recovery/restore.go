package recovery

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/config"
	"github.com/agentlab-vm/agentlab/internal/durable"
	"github.com/agentlab-vm/agentlab/internal/fsfault"
	"github.com/agentlab-vm/agentlab/internal/store"
)

// A repair first stages the new database beside the old one, and then replaces
// the old one with it. A database is up to three files, so the replacement is
// several renames, and a crash can separate them. The file replacement is there
// from before the first rename until after the last. While the file exists no
// daemon starts, so no database is opened with the write-ahead log of another
// one. The next repair completes the renames.

// The values of store.FactRepair.
const (
	repairRestore = "restore" // the rows are from a backup
	repairRebuild = "rebuild"
)

// databaseSuffixes are the suffixes of the files of a database.
var databaseSuffixes = []string{"", "-wal", "-shm"}

func (r *repair) staged() string { return r.paths.Database() + ".restore" }

func replacement(p config.Paths) string { return p.Database() + ".replacing" }

// restore replaces the database by a backup.
func (r *repair) restore(ctx context.Context) error {
	own, err := installationOf(r.paths)
	if err != nil {
		return err
	}
	if err := r.choose(ctx, own); err != nil {
		return err
	}
	if err := r.replace(); err != nil {
		return err
	}
	return r.adoptID(ctx, own)
}

// choose stages the backup that the user named, otherwise the newest intact
// one.
func (r *repair) choose(ctx context.Context, own string) error {
	if r.backup != "" {
		path := r.backup
		if !strings.Contains(path, "/") {
			path = filepath.Join(r.paths.Backups(), path)
		}
		err := r.stage(ctx, path, own)
		if errors.Is(err, fs.ErrNotExist) {
			err = agentlab.Errorf(agentlab.CodeNotFound, "there is no backup %s", path).WithHint("see 'agentlab db list'")
		}
		return err
	}
	list, err := listBackups(r.paths.Backups())
	if err != nil {
		return err
	}
	for _, b := range list {
		err := r.stage(ctx, b.path, own)
		switch agentlab.CodeOf(err) {
		case agentlab.CodeUnavailable, agentlab.CodeSchema, agentlab.CodeInvalid, agentlab.CodeInternal:
			r.out.warn("%v", err)
		default:
			return err
		}
	}
	return agentlab.Errorf(agentlab.CodeNotFound, "there is no usable backup in %s", r.paths.Backups()).
		WithHint("create a database from the files of the jobs: agentlab db rebuild")
}

// stage copies a backup, checks the copy and prepares it to become the database.
// A write-ahead log beside the backup belongs to it.
func (r *repair) stage(ctx context.Context, path, own string) (err error) {
	if err := r.checkNotStaged(path); err != nil {
		return err
	}
	if err := r.dropStaged(); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, r.dropStaged())
		}
	}()
	for _, suffix := range []string{"", "-wal"} {
		err := durable.Copy(path+suffix, r.staged()+suffix, 0o600, durable.Name)
		if err != nil && (suffix == "" || !errors.Is(err, fs.ErrNotExist)) {
			return fsfault.Own(err, "free disk space, then repeat the command", "cannot copy %s to %s", path+suffix, r.staged()+suffix)
		}
	}
	sum, err := store.Inspect(ctx, r.staged())
	switch {
	case err != nil:
	case sum.Schema == 0:
		err = agentlab.Errorf(agentlab.CodeInvalid, "it is empty")
	case own != "" && sum.Installation != "" && own != sum.Installation && !r.adopt:
		return agentlab.Errorf(agentlab.CodeConflict, "%s is a backup of another installation than %s", path, r.paths.State).
			WithHint("to restore it here anyway, add --adopt")
	default:
		err = store.Verify(ctx, r.staged())
	}
	if err != nil {
		return agentlab.Errorf(agentlab.CodeOf(err), "the backup %s is not usable: %w", path, err).WithHint("choose another backup: agentlab db list")
	}
	r.out.Backup = path
	return r.prepare(ctx, repairRestore)
}

// checkNotStaged rejects a backup that dropStaged would delete before it is copied.
func (r *repair) checkNotStaged(path string) error {
	backup, err := os.Stat(path)
	if err != nil {
		return at(path, err)
	}
	for _, name := range append(r.stagedFiles(), r.upgradeCopies()...) {
		if st, err := os.Stat(name); err == nil && os.SameFile(st, backup) {
			return agentlab.Errorf(agentlab.CodeInvalid, "%s is a temporary file of a repair, which every repair removes first", path).
				WithHint("copy it to another directory, with %s-wal if it exists, and use the copy; or choose a backup: agentlab db list", path)
		}
	}
	return nil
}

// stagedFiles returns the paths of the files of the staged database.
func (r *repair) stagedFiles() []string {
	var out []string
	for _, suffix := range databaseSuffixes {
		out = append(out, r.staged()+suffix)
	}
	return out
}

// upgradeCopies returns the paths of the copies that the store makes before it
// upgrades the staged database.
func (r *repair) upgradeCopies() []string {
	var out []string
	for v := range store.NewestSchema() {
		out = append(out, fmt.Sprintf("%s.v%d.bak", r.staged(), v))
	}
	return out
}

// dropStaged deletes the staged files of an attempt that was killed. SQLite
// would apply their log to the next staged database, and they may contain
// hashes of tokens.
func (r *repair) dropStaged() error {
	return removeFiles(append(r.stagedFiles(), r.upgradeCopies()...))
}

// removeFiles deletes files. A missing file is not an error.
func removeFiles(paths []string) error {
	for _, path := range paths {
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fsfault.At(path, err)
		}
	}
	return nil
}

// prepare opens the staged database, which creates or upgrades it, marks it as
// unfilled, and deletes its API tokens and bootstrap tokens: some may have been
// revoked or used after the backup. Afterwards all data is in one file.
func (r *repair) prepare(ctx context.Context, mark string) error {
	st, err := store.Open(ctx, r.staged(), store.Options{})
	if err != nil {
		return err
	}
	n, err := st.DeleteTokens(ctx)
	if err == nil {
		err = st.SetFact(ctx, store.FactRepair, mark)
	}
	if n > 0 {
		r.out.warn("%d API token(s) of the backup are not restored, because they may have been revoked after the backup; create new ones: agentlab token create", n)
	}
	if err := errors.Join(err, st.Close()); err != nil {
		return err
	}
	if err := removeFiles(r.upgradeCopies()); err != nil { // the backup itself is kept
		return err
	}
	if exists(r.staged() + "-wal") {
		return agentlab.Errorf(agentlab.CodeUnavailable, "cannot apply the write-ahead log of %s", r.staged()).
			WithHint("stop processes that use the file, and check the free disk space; then try again")
	}
	return nil
}

// replace replaces the old database by the staged one. The old one is kept
// under another name.
func (r *repair) replace() error {
	stamp := time.Now().UTC().Format(backupTime)
	free := stamp
	for n := 1; exists(r.oldDatabase(free)) || exists(r.oldDatabase(free)+"-wal"); n++ {
		free = fmt.Sprintf("%s-%d", stamp, n)
	}
	return r.runReplacement(free)
}

var replacementStamp = regexp.MustCompile(`^[0-9]{8}T[0-9]{6}Z(-[0-9]+)?$`)

// finishReplacement completes the replacement of a repair that was killed.
func (r *repair) finishReplacement() error {
	path := replacement(r.paths)
	text, err := os.ReadFile(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return fsfault.At(path, err)
	case !replacementStamp.Match(text):
		return agentlab.Errorf(agentlab.CodeConflict, "%s does not contain the time of a replacement of the database", path).
			WithHint("check which files %s* belong together, then remove the file", r.paths.Database())
	}
	return r.runReplacement(string(text))
}

func (r *repair) runReplacement(stamp string) error {
	for _, step := range r.replaceSteps(stamp) {
		if err := step(); err != nil {
			return err
		}
	}
	for _, suffix := range databaseSuffixes {
		if to := r.oldDatabase(stamp) + suffix; exists(to) {
			r.out.MovedTo = append(r.out.MovedTo, to)
		}
	}
	return nil
}

// replaceSteps returns the steps of a replacement. All steps may be run again
// after a crash at any point. Each step is synced to disk before the next one
// begins.
func (r *repair) replaceSteps(stamp string) []func() error {
	steps := []func() error{func() error {
		return at(replacement(r.paths), durable.Replace(replacement(r.paths), []byte(stamp), durable.Name))
	}}
	for _, suffix := range databaseSuffixes {
		steps = append(steps, func() error { return r.moveOld(suffix, r.oldDatabase(stamp)+suffix) })
	}
	return append(steps, func() error {
		err := os.Rename(r.staged(), r.paths.Database())
		if errors.Is(err, fs.ErrNotExist) { // it was already renamed
			return nil
		}
		return r.renamed(r.paths.Database(), err)
	}, func() error { return r.renamed(replacement(r.paths), os.Remove(replacement(r.paths))) })
}

// oldDatabase returns the path at which the replaced database is kept.
func (r *repair) oldDatabase(stamp string) string { return r.paths.Database() + ".lost-" + stamp }

// moveOld renames a file of the old database. It does nothing after the staged
// database was renamed.
func (r *repair) moveOld(suffix, to string) error {
	from := r.paths.Database() + suffix
	switch {
	case !exists(r.staged()) && exists(r.paths.Database()), !exists(from):
		return nil
	case exists(to):
		return agentlab.Errorf(agentlab.CodeConflict, "a repair was interrupted after moving the database to %s, and %s exists again", to, from).
			WithHint("move one of the two away, then run the command again")
	}
	return r.renamed(to, os.Rename(from, to))
}

// renamed syncs a change of names in the state directory to disk.
func (r *repair) renamed(path string, err error) error {
	if err == nil {
		err = durable.SyncPath(filepath.Dir(r.paths.Database()))
	}
	return at(path, err)
}

func at(path string, err error) error {
	if err == nil {
		return nil
	}
	return fsfault.At(path, err)
}

// exists reports whether a file exists or may exist.
func exists(path string) bool {
	_, err := os.Lstat(path)
	return !errors.Is(err, fs.ErrNotExist)
}

// checkReplaced returns an error if a repair was killed while it replaced the
// database.
func checkReplaced(p config.Paths) error {
	if !exists(replacement(p)) {
		return nil
	}
	return unfinished(p, "replacing")
}

func unfinished(p config.Paths, what string) error {
	return agentlab.Errorf(agentlab.CodeConflict, "a repair of the database %s was not finished (%s)", p.Database(), what).
		WithHint("%s", repairHint(p))
}
