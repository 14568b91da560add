package runner

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path"
	"slices"
	"strings"
	"syscall"

	"github.com/bmatcuk/doublestar/v4"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/projectfile"
)

const (
	projectFile = projectfile.Name
	maxOutputs  = 1000
	maxVisited  = 500000 // maximum number of directory entries that one job's patterns check
)

// readProject reads the project file of a work tree. A missing file means an empty one.
func readProject(root *os.Root) (projectfile.File, error) {
	text, err := readSmall(root, projectFile, projectfile.MaxBytes)
	if errors.Is(err, fs.ErrNotExist) {
		return projectfile.File{}, nil
	}
	var p projectfile.File
	if err == nil {
		p, err = projectfile.Parse(text)
	}
	if err != nil {
		msg := err.Error()
		if hint := agentlab.HintOf(err); hint != "" {
			msg += " (" + hint + ")"
		}
		return projectfile.File{}, fmt.Errorf("%s: %s", projectFile, msg)
	}
	return p, nil
}

// collectOutputs finds the files that the project file declares.
func (r *Runner) collectOutputs(ctx context.Context, work string, c *collected) {
	root, err := os.OpenRoot(work)
	if err != nil {
		c.warn("the work tree can no longer be read: %v", err)
		return
	}
	r.closers = append(r.closers, root)
	p, err := readProject(root)
	if err != nil {
		c.warn("outputs are not collected: %v", err)
		return
	}
	names, err := findOutputs(ctx, root, p.Outputs)
	if err != nil {
		c.warn("not all outputs are collected: %v", err)
	}
	for _, name := range names {
		at := outputPath(name)
		if err := agentlab.ValidateArtifactPath(at); err != nil {
			c.warn("the output %.80q is not kept: its name cannot be an artifact's", name)
			continue
		}
		c.Files = append(c.Files, upload{Path: at, root: root, file: name})
	}
}

var errTooManyFiles = errors.New("there are too many files")

// findOutputs returns the matching regular files. It does not follow links to
// directories and does not search .git.
func findOutputs(ctx context.Context, root *os.Root, patterns []string) ([]string, error) {
	seen := map[string]bool{}
	limited := &countFS{FS: root.FS(), ctx: ctx, left: maxVisited}
	for _, glob := range patterns {
		err := doublestar.GlobWalk(limited, path.Clean(glob), func(name string, _ fs.DirEntry) error {
			if name == ".git" || strings.HasPrefix(name, ".git/") {
				return nil
			}
			if len(seen) >= maxOutputs && !seen[name] {
				return errTooManyFiles
			}
			seen[name] = true
			return nil
		}, doublestar.WithFilesOnly(), doublestar.WithNoFollow())
		if err == nil {
			err = limited.err
		}
		if err != nil {
			return slices.Sorted(maps.Keys(seen)), err
		}
	}
	return slices.Sorted(maps.Keys(seen)), nil
}

// countFS limits the work for patterns.
type countFS struct {
	fs.FS
	ctx  context.Context
	left int
	err  error
}

func (c *countFS) ReadDir(name string) ([]fs.DirEntry, error) {
	if c.err == nil && c.ctx.Err() != nil {
		c.err = c.ctx.Err()
	}
	if c.err != nil {
		return nil, c.err
	}
	entries, err := fs.ReadDir(c.FS, name)
	if c.left -= len(entries) + 1; c.left < 0 {
		c.err = errTooManyFiles
		return nil, c.err
	}
	return entries, err
}

func (c *countFS) Stat(name string) (fs.FileInfo, error)  { return fs.Stat(c.FS, name) }
func (c *countFS) Lstat(name string) (fs.FileInfo, error) { return fs.Lstat(c.FS, name) }
func (c *countFS) ReadLink(name string) (string, error)   { return fs.ReadLink(c.FS, name) }

// outputPath returns the artifact path of an output. The name of a hidden file
// is changed: ".coverage" becomes "outputs/dot.coverage". So that no two
// outputs share a path, a name that already begins with "dot." gets another
// "dot".
func outputPath(name string) string {
	parts := strings.Split(name, "/")
	for i, p := range parts {
		rest := p
		for strings.HasPrefix(rest, "dot") {
			rest = rest[len("dot"):]
		}
		if strings.HasPrefix(rest, ".") {
			parts[i] = "dot" + p
		}
	}
	return "outputs/" + strings.Join(parts, "/")
}

// openOutput opens a regular file below root. It opens no link out of root, no
// device, and no pipe, which could block.
func openOutput(root *os.Root, name string) (*os.File, error) {
	f, err := root.OpenFile(name, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	if st, err := f.Stat(); err != nil || !st.Mode().IsRegular() {
		_ = f.Close()
		return nil, errors.Join(err, errors.New("it is not a regular file"))
	}
	return f, nil
}
