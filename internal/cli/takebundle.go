package cli

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
)

// errLacksBase means that a bundle builds on commits that are not here.
var errLacksBase = errors.New("commits that it builds on are missing")

// maxBundleHeader bounds what is read of a bundle before its objects.
const maxBundleHeader = 1 << 20

// bundleHeader is the part of a git bundle before its pack.
type bundleHeader struct {
	needs []string          // commits that the receiver must have
	refs  map[string]string // commits by their refs
	size  int64
}

// readBundleHeader reads the header of a bundle of version 2, the one that
// git makes of repositories with SHA-1.
func readBundleHeader(r io.Reader) (bundleHeader, error) {
	h := bundleHeader{refs: map[string]string{}}
	in := bufio.NewReader(io.LimitReader(r, maxBundleHeader))
	for first := true; ; first = false {
		line, err := in.ReadString('\n')
		if err != nil {
			return h, errors.New("it has no whole header")
		}
		h.size += int64(len(line))
		line = strings.TrimSuffix(line, "\n")
		if first {
			if line != "# v2 git bundle" {
				return h, errors.New("it is no git bundle of version 2")
			}
			continue
		}
		if line == "" {
			return h, nil
		}
		need, isNeed := strings.CutPrefix(line, "-")
		id, name, _ := strings.Cut(need, " ")
		if len(id) != 40 || strings.Trim(id, "0123456789abcdef") != "" {
			return h, errors.New("its header is broken")
		}
		if isNeed {
			h.needs = append(h.needs, id)
		} else {
			h.refs[name] = id
		}
	}
}

// takeBundle checks all objects of a bundle in a scratch repository in dir,
// and only then adds them to the repository at path, where it sets the ref to
// the commit that branch has in the bundle.
//
// Packs are indexed rather than bundles fetched: git checks no objects that it
// fetches from a bundle (up to 2.45 at least), and a fetch from anywhere else
// needs a transport, in which the user's repository could name programs.
func takeBundle(ctx context.Context, dir, bundle, path, branch, ref string) (string, error) {
	file, err := os.Open(bundle) //nolint:gosec // our own temporary file
	if err != nil {
		return "", err
	}
	defer func() { _ = file.Close() }()
	h, err := readBundleHeader(file)
	if err != nil {
		return "", err
	}
	commit := h.refs[branch]
	if commit == "" {
		return "", fmt.Errorf("it has no %s", branch)
	}
	objects, err := git(ctx, path, "rev-parse", "--path-format=absolute", "--git-path", "objects")
	if err != nil {
		return "", err
	}
	bare, err := scratchRepo(ctx, dir, objects)
	if err != nil {
		return "", err
	}
	if _, err := file.Seek(h.size, io.SeekStart); err != nil {
		return "", err
	}
	if err := scanPack(file); err != nil {
		return "", err
	}
	if err := checkBundle(ctx, bare, file, h, commit); err != nil {
		return "", err
	}
	if err := indexPack(ctx, file, h.size, path, "index-pack"); err != nil {
		return "", err
	}
	_, err = git(ctx, path, "update-ref", "--no-deref", ref, commit)
	return commit, err
}

// checkBundle indexes the bundle's pack in the bare repository under the
// checks of fetch.fsckObjects, and wants all that the commit refers to.
func checkBundle(ctx context.Context, bare string, file *os.File, h bundleHeader, commit string) error {
	limited := func(stdin string, args ...string) error {
		in := gitInput{stdin: strings.NewReader(stdin), limited: true}
		_, err := in.run(ctx, bare, append([]string{"--git-dir=" + bare}, args...)...)
		return err
	}
	for _, id := range h.needs {
		if err := limited("", "cat-file", "-e", id+"^{commit}"); err != nil {
			return errLacksBase
		}
	}
	if err := indexPack(ctx, file, h.size, bare, "--git-dir="+bare, "index-pack", "--strict"); err != nil {
		return fmt.Errorf("its objects are not sound: %w", err)
	}
	if err := limited("", "cat-file", "-e", commit+"^{commit}"); err != nil {
		return errors.New("its branch is no commit")
	}
	want := commit + "\n"
	for _, id := range h.needs {
		want += "^" + id + "\n"
	}
	if err := limited(want, "rev-list", "--objects", "--quiet", "--stdin"); err != nil {
		return fmt.Errorf("it is not whole: %w", err)
	}
	return nil
}

// indexPack has git read the pack that follows a bundle's header.
func indexPack(ctx context.Context, bundle *os.File, offset int64, dir string, args ...string) error {
	if _, err := bundle.Seek(offset, io.SeekStart); err != nil {
		return err
	}
	_, err := gitInput{stdin: bundle, limited: true}.run(ctx, dir, append(args, "--stdin", "--fix-thin")...)
	return err
}
