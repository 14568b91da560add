package gitsafe

import (
	"context"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"unicode"

	"github.com/agentlab-vm/agentlab/internal/returncheck"
)

// WorkTreeHost describes the work tree in a directory for the return check, without its
// names.
func WorkTreeHost(ctx context.Context, top string) returncheck.Host {
	h := returncheck.Host{Links: map[string]string{}, Obeyed: map[string]string{}, FoldsNames: foldsNames(top)}
	tracked, _ := Command{Raw: true}.Run(ctx, top, "ls-files", "--stage", "-z")
	for line := range strings.SplitSeq(tracked, "\x00") {
		if info, name, _ := strings.Cut(line, "\t"); strings.HasPrefix(info, ModeLink+" ") {
			addLink(h.Links, top, name)
		}
	}
	list, _ := os.ReadDir(top)
	for _, e := range list {
		if e.Type()&fs.ModeSymlink != 0 {
			addLink(h.Links, top, e.Name())
		}
	}
	obeyedHooks(ctx, top, h.Obeyed)
	obeyedConfig(ctx, top, h.Obeyed)
	return h
}

// addLink adds a link of a work tree with the place to which it leads, through all links.
func addLink(links map[string]string, top, name string) {
	if to, err := filepath.EvalSymlinks(filepath.Join(top, name)); err == nil {
		if rel := below(top, to); rel != "" {
			links[name] = rel
		}
		return
	}
	// It leads to a file that does not exist yet.
	if to, err := os.Readlink(filepath.Join(top, name)); err == nil {
		if !filepath.IsAbs(to) {
			to = filepath.Join(top, filepath.Dir(name), to)
		}
		if rel := below(top, to); rel != "" {
			links[name] = rel
		}
	}
}

// below returns a path relative to a directory, with slashes; "" if it is not below it.
func below(dir, name string) string {
	rel, err := filepath.Rel(dir, name)
	if err != nil || !filepath.IsLocal(rel) || rel == "." {
		return ""
	}
	return filepath.ToSlash(rel)
}

// obeyedHooks adds the files of a work tree that git runs as hooks: what is in
// core.hooksPath, and what links in the directory of hooks lead to.
func obeyedHooks(ctx context.Context, top string, obeyed map[string]string) {
	const why = "git runs it as a hook of this repository"
	dir := ""
	if common, err := Git(ctx, top, "rev-parse", "--path-format=absolute", "--git-common-dir"); err == nil {
		dir = filepath.Join(common, "hooks")
	}
	all, err := Git(ctx, top, "config", "--type=path", "--get-all", "core.hooksPath")
	if lines := strings.Split(all, "\n"); err == nil && len(lines) > 1 { // gitSafe sets the last value
		if dir = lines[len(lines)-2]; !filepath.IsAbs(dir) {
			dir = filepath.Join(top, dir)
		}
	}
	if at, err := filepath.EvalSymlinks(dir); err == nil {
		dir = at
	}
	if rel := below(top, dir); rel != "" && !strings.HasPrefix(rel, ".git/") {
		obeyed[rel] = why
	}
	if dir == top {
		for _, name := range returncheck.Hooks {
			obeyed[name] = why
		}
	}
	list, _ := os.ReadDir(dir)
	for _, e := range list {
		if e.Type()&fs.ModeSymlink == 0 {
			continue
		}
		links := map[string]string{}
		if to, err := os.Readlink(filepath.Join(dir, e.Name())); err == nil && !filepath.IsAbs(to) {
			links["lexical"] = below(top, filepath.Join(dir, to))
		}
		if to, err := filepath.EvalSymlinks(filepath.Join(dir, e.Name())); err == nil {
			links["real"] = below(top, to)
		}
		for _, rel := range links {
			if rel != "" {
				obeyed[rel] = why
			}
		}
	}
}

// obeyedConfig adds the files of a work tree that the configuration of git includes, or
// that a value names, such as the program of a filter.
func obeyedConfig(ctx context.Context, top string, obeyed map[string]string) {
	out, err := Command{Raw: true}.Run(ctx, top, "config", "--list", "--show-origin", "-z", "--includes")
	if err != nil {
		return
	}
	fields := strings.Split(out, "\x00")
	for i := 0; i+1 < len(fields); i += 2 {
		add := func(name, why string) {
			if !filepath.IsAbs(name) {
				name = filepath.Join(top, name)
			}
			if rel := below(top, name); rel != "" && !strings.HasPrefix(rel, ".git/") {
				obeyed[rel] = why
			}
		}
		if origin, is := strings.CutPrefix(fields[i], "file:"); is {
			add(origin, "the configuration of git includes it")
		}
		key, value, _ := strings.Cut(fields[i+1], "\n")
		for word := range strings.FieldsFuncSeq(value, func(r rune) bool { return unicode.IsSpace(r) || strings.ContainsRune(`"'!;|&`, r) }) {
			name := path.Clean(word)
			if st, err := os.Stat(filepath.Join(top, name)); err == nil && st.Mode().IsRegular() {
				add(name, "the configuration of git names it ("+key+")")
			}
		}
		if strings.HasSuffix(strings.ToLower(key), ".path") && strings.HasPrefix(key, "include") {
			add(includePath(ctx, top, value), "the configuration of git includes it")
		}
	}
}

// includePath returns the path of an included file, which need not exist, relative to the
// directory of git's configuration of the repository.
func includePath(ctx context.Context, top, value string) string {
	common, err := Git(ctx, top, "rev-parse", "--path-format=absolute", "--git-common-dir")
	if err != nil || filepath.IsAbs(value) {
		return value
	}
	return filepath.Join(common, value)
}

// inWayOf returns the files that a merge would overwrite or delete although git does not
// track them: git refuses that only for files that it does not ignore.
func inWayOf(root *os.Root, list []Change) (names []string) {
	gone := map[string]bool{}
	for _, c := range list {
		if c.OldMode != ModeNone {
			gone[c.Path] = true
		}
	}
	seen := map[string]bool{}
	for _, c := range list {
		if c.OldMode != ModeNone || c.NewMode == ModeNone {
			continue
		}
		for dir := path.Dir(c.Path); dir != "." && !seen[dir]; dir = path.Dir(dir) {
			seen[dir] = true
			if st, err := root.Lstat(dir); err == nil && !st.IsDir() && !gone[dir] {
				names = append(names, dir)
			}
		}
		st, err := root.Lstat(c.Path)
		switch {
		case err != nil:
		case !st.IsDir():
			names = append(names, c.Path)
		default:
			names = append(names, untrackedBelow(root, c.Path, gone)...)
		}
		if len(names) > 100 {
			break
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// untrackedBelow returns a file of a directory that a merge does not remove itself.
func untrackedBelow(root *os.Root, dir string, gone map[string]bool) (names []string) {
	_ = fs.WalkDir(root.FS(), dir, func(name string, d fs.DirEntry, err error) error {
		if err != nil || !d.IsDir() && !gone[name] {
			names = append(names, name)
			return fs.SkipAll
		}
		return nil
	})
	return names
}
