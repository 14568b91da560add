// Package returncheck judges files that a guest made before they reach this machine.
//
// A guest is hostile, and some files need no command to do harm: git obeys the
// configuration of a directory that looks like a repository, a shell runs .envrc, an
// editor runs the tasks of .vscode. The package reads names, types and link targets, and
// runs nothing. Its callers collect the files and act on the findings.
package returncheck

import (
	"cmp"
	"maps"
	"path"
	"slices"
	"strings"
)

// Kind is the type of a file.
type Kind byte

// Types of files.
const (
	None    Kind = iota // no file
	File                // a regular file
	Program             // a regular file with an executable bit
	Link                // a symbolic link
	Module              // a commit of a submodule
	Dir                 // a directory, which matters if it can be empty
)

// Entry is a file that a guest adds, changes or deletes.
type Entry struct {
	Path   string // relative to the root, with slashes
	Kind   Kind   // None if the file is deleted
	Was    Kind   // None if the file is new
	Target string // of a Link
}

// Level says what a finding requires.
type Level byte

// Levels, from the most severe one.
const (
	// Refused files are never written to a work tree.
	Refused Level = iota
	// Held files are written only if the user agrees: a program of this machine executes
	// or obeys them without a command of the user.
	Held
	// Named files are only reported: they run with a usual command of the user.
	Named
)

// Finding is a file that the user must know about.
type Finding struct {
	Path   string
	Level  Level
	New    bool   // it does not exist on this machine yet
	Why    string // completes the sentence "PATH: …"
	Source string // where the rule comes from: a manual page or an address
}

// Host describes the place on this machine where the files arrive.
type Host struct {
	// Names returns the names in a directory, relative to the root, before the files
	// arrive; none if the directory does not exist.
	Names func(dir string) []string
	// Top is the directory of the work tree relative to the root: rules for names do not
	// look at what is above it. It is "." or "" for the root itself.
	Top string
	// Links are symbolic links that the host has and the places to which they lead, both
	// relative to Top. A program that obeys a link obeys the file there.
	Links map[string]string
	// Obeyed are further files and directories, relative to the root, that the host obeys,
	// with the reason: the directory of git's hooks, files that its configuration names.
	Obeyed map[string]string
	// FoldsNames says that the file system ignores the case of names.
	FoldsNames bool
}

// Check returns the findings about files, the most severe first. A path has at most one.
func Check(entries []Entry, host Host) []Finding {
	c := &check{host: host, new: map[string]map[string]bool{}, found: map[string]Finding{}, dirs: map[string]*verdict{}, linksTo: map[string][]string{}}
	if c.host.Names == nil {
		c.host.Names = func(string) []string { return nil }
	}
	c.host.Top = cmp.Or(path.Clean(c.host.Top), ".")
	for _, name := range slices.Sorted(maps.Keys(host.Links)) {
		to := host.Links[name]
		c.linksTo[to] = append(c.linksTo[to], name)
	}
	for _, e := range entries {
		if e.Kind != None {
			c.collect(e)
		}
	}
	c.sameNames()
	for _, e := range entries {
		c.entry(e)
	}
	var list []Finding
	for _, f := range c.found {
		list = append(list, f)
	}
	slices.SortFunc(list, func(a, b Finding) int { return cmp.Or(cmp.Compare(a.Level, b.Level), cmp.Compare(a.Path, b.Path)) })
	return list
}

// check is the state of one call of Check.
type check struct {
	host  Host
	new   map[string]map[string]bool // names that arrive, by their directory, and whether it is a file
	same  map[string]string          // names that arrive, by path, and another one that is equal to a file system
	dirs  map[string]*verdict
	found map[string]Finding
	// linksTo has the links of the host by the places to which they lead.
	linksTo map[string][]string
}

// verdict is what matters of a directory for everything below it.
type verdict struct {
	repository bool   // it, or one above it, is or becomes a git repository
	other      string // another name for it, or for one above it
	rule       *rule  // of its name, or of one above it
	tail       []string
}

// collect records the names of a path.
func (c *check) collect(e Entry) {
	isFile := e.Kind != Dir
	for at := e.Path; at != "." && at != "/"; at = path.Dir(at) {
		dir, name := path.Dir(at), path.Base(at)
		if c.new[dir] == nil {
			c.new[dir] = map[string]bool{}
		}
		if was, is := c.new[dir][name]; is {
			c.new[dir][name] = was || isFile
			return
		}
		c.new[dir][name] = isFile
		isFile = false
	}
}

// sameNames finds the names that arrive and that a file system could take for another one
// in the same directory.
func (c *check) sameNames() {
	c.same = map[string]string{}
	for dir, names := range c.new {
		seen := map[string]string{}
		have := map[string]bool{}
		for _, name := range c.host.Names(dir) {
			seen[Fold(name)], have[name] = name, true
		}
		for _, name := range slices.Sorted(maps.Keys(names)) {
			other, is := seen[Fold(name)]
			if is && other != name && !have[name] {
				c.same[path.Join(dir, name)] = other
			}
			if !is {
				seen[Fold(name)] = name
			}
		}
	}
}

// add records a finding, unless the path has a more severe one.
func (c *check) add(e Entry, level Level, why, source string) {
	if f, is := c.found[e.Path]; !is || level < f.Level {
		c.found[e.Path] = Finding{Path: e.Path, Level: level, New: e.Was == None, Why: why, Source: source}
	}
}

// entry judges one file.
func (c *check) entry(e Entry) {
	if e.Kind == None {
		if why := BadPath(e.Path); why != "" {
			c.add(e, Refused, why, "path_resolution(7)")
			return
		}
		if rule := c.rule(e); rule != nil && rule.level == Held {
			c.add(e, Named, "is deleted: "+rule.why, rule.source)
		}
		return
	}
	if why := BadPath(e.Path); why != "" {
		c.add(e, Refused, why, "git-check-ref-format(1), path_resolution(7)")
		return
	}
	if e.Kind == Link {
		if why := BadLink(e.Path, e.Target); why != "" {
			c.add(e, Refused, why, "symlink(7)")
		}
	}
	dir := c.dir(path.Dir(e.Path))
	if dir.repository {
		c.add(e, Refused, "its directory is or becomes a git repository, whose configuration runs programs", "gitrepository-layout(5)")
	}
	if other := cmp.Or(c.same[e.Path], dir.other); other != "" {
		level := Named
		if c.host.FoldsNames {
			level = Refused
		}
		c.add(e, level, "has the name of "+other+" where case or Unicode forms do not count", "path_resolution(7), git-config(1) core.ignoreCase")
	}
	if rule := c.rule(e); rule != nil && e.Kind != Dir {
		c.add(e, rule.level, rule.why, rule.source)
	}
	switch {
	case e.Kind == Module:
		c.add(e, Named, "is a submodule; 'git submodule update' gets the commits that its remote has", "gitsubmodules(7)")
	case e.Kind == Program && e.Was != Program:
		c.add(e, Named, "is a new program", "chmod(1)")
	}
}

// dir returns the verdict on a directory.
func (c *check) dir(p string) *verdict {
	if v := c.dirs[p]; v != nil {
		return v
	}
	v := &verdict{}
	top := c.host.Top
	if p != "." && p != "/" {
		above := c.dir(path.Dir(p))
		v.repository, v.other = above.repository, cmp.Or(c.same[p], above.other)
		if top == "." || strings.HasPrefix(p, top+"/") {
			v.tail = tailOf(above.tail, path.Base(p))
			v.rule = stricter(above.rule, findName(v.tail, true))
		}
	}
	if top == "." || p == top || strings.HasPrefix(p, top+"/") {
		v.repository = v.repository || c.repository(p)
	}
	c.dirs[p] = v
	return v
}

// repository reports whether git takes a directory for a repository once the files have
// arrived. See is_git_directory in git's setup.c: HEAD, which is a file, and objects with
// refs, or a file that says where they are.
func (c *check) repository(dir string) bool {
	var has [4]bool
	marks := [4]string{"head", "objects", "refs", "commondir"}
	see := func(name string, isFile bool) {
		if i := slices.Index(marks[:], Fold(name)); i > 0 || i == 0 && isFile {
			has[i] = true
		}
	}
	for name, isFile := range c.new[dir] {
		see(name, isFile)
	}
	if len(c.new[dir]) == 0 {
		return false // nothing arrives in it, or in one below it
	}
	for _, name := range c.host.Names(dir) {
		see(name, true)
	}
	return has[0] && (has[1] && has[2] || has[3])
}

// rule returns the rule for the name of a file; nil if there is none.
func (c *check) rule(e Entry) *rule {
	p := c.belowTop(e.Path)
	dir := c.dir(path.Dir(e.Path))
	tail := tailOf(dir.tail, path.Base(p))
	best := stricter(dir.rule, findName(tail, false))
	if e.Kind == Link {
		best = stricter(best, findParent(tail))
	}
	for at := e.Path; at != "." && at != "/" && len(c.host.Obeyed) > 0; at = path.Dir(at) {
		if why := c.host.Obeyed[at]; why != "" {
			best = stricter(best, &rule{level: Held, why: why, source: "git-config(1), githooks(5)"})
		}
	}
	for at := p; at != "." && at != "/" && len(c.linksTo) > 0; at = path.Dir(at) {
		for _, name := range c.linksTo[at] {
			if r := find(path.Join(name, strings.TrimPrefix(p, at))); r != nil {
				best = stricter(best, &rule{level: r.level, why: "the link " + name + " leads to it: " + r.why, source: r.source})
			}
		}
	}
	return best
}

// belowTop returns a path relative to the top of the work tree.
func (c *check) belowTop(p string) string {
	if c.host.Top == "." {
		return p
	}
	return strings.TrimPrefix(p, c.host.Top+"/")
}

func stricter(a, b *rule) *rule {
	if a == nil || b != nil && b.level < a.level {
		return b
	}
	return a
}
