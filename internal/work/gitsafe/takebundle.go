package gitsafe

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// errLacksBase means that the repository lacks commits that a bundle requires.
var errLacksBase = errors.New("commits that it requires are missing")

// MissingCommit is errLacksBase with the ID of such a commit.
type MissingCommit string

// Error implements error.
func (MissingCommit) Error() string { return errLacksBase.Error() }

// Is makes each MissingCommit an errLacksBase.
func (MissingCommit) Is(target error) bool { return target == errLacksBase }

// ErrNoRefs means that a bundle has none of the refs that are wanted.
var ErrNoRefs = errors.New("it does not have")

// maxBundleHeader limits the header of a bundle.
const maxBundleHeader = 1 << 20

// bundleHeader is the part of a git bundle before its pack.
type bundleHeader struct {
	needs []string          // commits that the repository must have
	Refs  map[string]string // commits by their refs
	size  int64
}

// readBundleHeader reads the header of a bundle of version 2, which git creates
// for repositories with SHA-1.
func readBundleHeader(r io.Reader) (bundleHeader, error) {
	h := bundleHeader{Refs: map[string]string{}}
	in := bufio.NewReader(io.LimitReader(r, maxBundleHeader))
	for first := true; ; first = false {
		line, err := in.ReadString('\n')
		if err != nil {
			return h, errors.New("its header is incomplete")
		}
		h.size += int64(len(line))
		line = strings.TrimSuffix(line, "\n")
		if first {
			if line != "# v2 git bundle" {
				return h, errors.New("not a git bundle of version 2")
			}
			continue
		}
		if line == "" {
			return h, nil
		}
		need, isNeed := strings.CutPrefix(line, "-")
		id, name, _ := strings.Cut(need, " ")
		if !IsCommit(id) {
			return h, errors.New("its header is malformed")
		}
		if isNeed {
			h.needs = append(h.needs, id)
		} else {
			h.Refs[name] = id
		}
	}
}

// Bundle is a guest's bundle with checked objects, or a bundle and the one
// that continues it. The objects are in a scratch repository that uses the user's
// repository as its alternate.
type Bundle struct {
	files  []bundleFile
	Header bundleHeader // of the last file
	Bare   string       // the scratch repository
	Path   string       // the user's repository
	Taken  time.Time    // when the checkpoint was stored; zero for a result
}

type bundleFile struct {
	*os.File
	header bundleHeader
}

// OpenBundle checks the objects of a bundle in a scratch repository in dir. The
// bundle must contain at least one of refs. The user's repository at path is
// not changed.
func OpenBundle(ctx context.Context, dir, bundle, path string, refs ...string) (*Bundle, error) {
	b := &Bundle{Path: path}
	objects, err := Git(ctx, b.Path, "rev-parse", "--path-format=absolute", "--git-path", "objects")
	if err != nil {
		return nil, err
	}
	if b.Bare, err = ScratchRepo(ctx, dir, objects); err != nil {
		return nil, err
	}
	return b, b.Add(ctx, bundle, refs...)
}

// Add checks a bundle that continues those that were added before.
func (b *Bundle) Add(ctx context.Context, bundle string, refs ...string) error {
	file, err := os.Open(bundle)
	if err != nil {
		return err
	}
	f := bundleFile{File: file}
	if err := b.check(ctx, &f, refs); err != nil {
		_ = file.Close()
		return err
	}
	b.files, b.Header = append(b.files, f), f.header
	return nil
}

// Close closes the files of a bundle.
func (b *Bundle) Close() {
	for _, f := range b.files {
		_ = f.Close()
	}
}

// Dir is a directory for temporary files, which is deleted after use.
func (b *Bundle) Dir() string { return filepath.Dir(b.Bare) }

// base returns the commits that the user's repository must have.
func (b *Bundle) base() []string { return b.files[0].header.needs }

func (b *Bundle) check(ctx context.Context, f *bundleFile, refs []string) (err error) {
	if f.header, err = readBundleHeader(f); err != nil {
		return err
	}
	var commits []string
	for _, ref := range refs {
		if commit := f.header.Refs[ref]; commit != "" {
			commits = append(commits, commit)
		}
	}
	if len(commits) == 0 {
		return fmt.Errorf("%w %s", ErrNoRefs, strings.Join(refs, " or "))
	}
	if _, err := f.Seek(f.header.size, io.SeekStart); err != nil {
		return err
	}
	if err := scanPack(f); err != nil {
		return err
	}
	// Only the user's own commits are known to be complete.
	base := f.header.needs
	if len(b.files) > 0 {
		base = b.base()
	}
	return checkBundle(ctx, b.Bare, f.File, f.header, base, commits)
}

// CountCommits returns the number of commits up to commit that the bundle adds.
func (b *Bundle) CountCommits(ctx context.Context, commit string) (int, error) {
	in := commit + "\n"
	for _, id := range b.base() {
		in += "^" + id + "\n"
	}
	out, err := b.Git(ctx, Command{Stdin: strings.NewReader(in)}, "rev-list", "--count", "--stdin")
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(strings.TrimSpace(out))
}

// Git runs git on the checked objects, under the limits for guests' objects.
func (b *Bundle) Git(ctx context.Context, in Command, args ...string) (string, error) {
	in.Limited = true
	return in.Run(ctx, b.Bare, append([]string{"--git-dir=" + b.Bare}, args...)...)
}

// Keep adds the objects to the user's repository and sets refs there: the keys
// are names in the user's repository, the values names in the bundle.
//
// It indexes the pack instead of fetching the bundle: git does not check objects
// that it fetches from a bundle (up to 2.45 at least), and other fetches need a
// transport, for which the user's repository can configure programs.
func (b *Bundle) Keep(ctx context.Context, refs map[string]string) error {
	// In a subdirectory, index-pack takes the git directory for a relative one.
	dir, err := Git(ctx, b.Path, "rev-parse", "--absolute-git-dir")
	if err != nil {
		return err
	}
	for _, f := range b.files {
		if err := indexPack(ctx, f.File, f.header.size, b.Path, "--git-dir="+strings.TrimSuffix(dir, "\n"), "index-pack"); err != nil {
			return err
		}
	}
	for name, from := range refs {
		if _, err := Git(ctx, b.Path, "update-ref", "--no-deref", name, b.Header.Refs[from]); err != nil {
			return err
		}
	}
	return nil
}

// checkBundle indexes the bundle's pack in the bare repository with the checks
// of fetch.fsckObjects, and checks that everything the commits refer to exists, up
// to the commits of base.
func checkBundle(ctx context.Context, bare string, file *os.File, h bundleHeader, base, commits []string) error {
	limited := func(stdin string, args ...string) error {
		in := Command{Stdin: strings.NewReader(stdin), Limited: true}
		_, err := in.Run(ctx, bare, append([]string{"--git-dir=" + bare}, args...)...)
		return err
	}
	for _, id := range h.needs {
		if err := limited("", "cat-file", "-e", id+"^{commit}"); err != nil {
			return MissingCommit(id)
		}
	}
	if err := indexPack(ctx, file, h.size, bare, "--git-dir="+bare, "index-pack", "--strict"); err != nil {
		return fmt.Errorf("its objects are invalid: %w", err)
	}
	want := ""
	for _, commit := range commits {
		if err := limited("", "cat-file", "-e", commit+"^{commit}"); err != nil {
			return errors.New("its branch does not point to a commit")
		}
		want += commit + "\n"
	}
	for _, id := range base {
		want += "^" + id + "\n"
	}
	if err := limited(want, "rev-list", "--objects", "--quiet", "--stdin"); err != nil {
		return fmt.Errorf("it is incomplete: %w", err)
	}
	return nil
}

// indexPack runs git index-pack on the pack after a bundle's header.
func indexPack(ctx context.Context, bundle *os.File, offset int64, dir string, args ...string) error {
	if _, err := bundle.Seek(offset, io.SeekStart); err != nil {
		return err
	}
	_, err := Command{Stdin: bundle, Limited: true}.Run(ctx, dir, append(args, "--stdin", "--fix-thin")...)
	return err
}
