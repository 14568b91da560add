package gitsafe

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"unicode"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/returncheck"
	"github.com/agentlab-vm/agentlab/internal/work"
)

// The values of agentlab.return in the configuration of git: what happens to files of a
// guest that programs of this machine execute or obey by themselves.
const (
	returnAsk   = "ask" // ask on a terminal, else hold
	returnHold  = "hold"
	returnAllow = "allow"
)

// Finding is a finding of the return check under --json.
type Finding struct {
	Path   string `json:"path"`
	Level  string `json:"level"` // refused, held or named
	New    bool   `json:"new"`
	Reason string `json:"reason"`
	Source string `json:"source"`
}

// levelNames are the names of returncheck's levels under --json.
var levelNames = map[returncheck.Level]string{returncheck.Refused: "refused", returncheck.Held: "held", returncheck.Named: "named"}

// FindingsJSON returns findings for output under --json.
func FindingsJSON(found []returncheck.Finding) (list []Finding) {
	for _, f := range found {
		list = append(list, Finding{f.Path, levelNames[f.Level], f.New, f.Why, f.Source})
	}
	return list
}

// OfLevel returns the findings of a level.
func OfLevel(found []returncheck.Finding, level returncheck.Level) []returncheck.Finding {
	return slices.DeleteFunc(slices.Clone(found), func(f returncheck.Finding) bool { return f.Level != level })
}

// Admission is what happens to files of a guest that the return check has judged.
type Admission struct {
	Dir     string // whose configuration of git counts
	Verb    string // what happens to the files: merged, applied, copied
	Show    string // command that shows the files; may be ""
	Instead string // how to get the files if they are held; may be ""
	Quiet   bool   // do not ask: a program has the terminal
}

// Admit returns an error if files must not reach the work tree, because they are refused
// or because the user has not agreed.
func Admit(ctx context.Context, ui work.UI, found []returncheck.Finding, how Admission) error {
	if bad := OfLevel(found, returncheck.Refused); len(bad) > 0 {
		return agentlab.Errorf(agentlab.CodeDenied, "the return check refuses %s: %s; nothing was %s", agentlab.Plural(len(bad), "file"), reasons(bad), how.Verb).
			WithHint("%s", joinHints(how.Show, "remove the files in the sandbox"))
	}
	held := OfLevel(found, returncheck.Held)
	if len(held) == 0 {
		return nil
	}
	policy, err := returnPolicy(ctx, how.Dir)
	if err != nil {
		return err
	}
	if policy == returnAllow {
		return nil
	}
	if policy == returnAsk && !how.Quiet {
		if ui.Asks() {
			ListReturned(ui, held, "programs of this machine execute or obey these files of the sandbox without a command of yours:")
			if how.Show != "" {
				ui.Progressf("  → %s", how.Show)
			}
			if ui.Confirm("Accept them?") {
				return nil
			}
		}
	}
	return agentlab.Errorf(agentlab.CodeDenied, "%s must be confirmed: %s; nothing was %s", agentlab.Plural(len(held), "file"), reasons(held), how.Verb).
		WithHint("%s", joinHints(how.Show, how.Instead, "confirm on a terminal; accept such files always: git config agentlab.return allow"))
}

func joinHints(hints ...string) string {
	return strings.Join(slices.DeleteFunc(hints, func(h string) bool { return h == "" }), "; ")
}

// returnPolicy returns the value of agentlab.return.
func returnPolicy(ctx context.Context, dir string) (string, error) {
	policy, err := Git(ctx, dir, "config", "--get", "agentlab.return")
	if err != nil && ctx.Err() != nil {
		return "", ctx.Err()
	}
	switch policy {
	case "":
		return returnAsk, nil
	case returnAsk, returnHold, returnAllow:
		return policy, nil
	}
	return "", agentlab.Errorf(agentlab.CodeInvalid, "agentlab.return is %q in the configuration of git", policy).
		WithHint("use one of %s, %s, %s: git config agentlab.return %s", returnAsk, returnHold, returnAllow, returnAsk)
}

// ListReturned prints a table of findings under a title. A guest chooses the names: each
// reason has a line, so that many harmless files cannot hide one.
func ListReturned(ui work.UI, found []returncheck.Finding, title string) {
	const shown = 5 // of each reason
	ui.Progressf("%s", title)
	width := 0
	for _, f := range found {
		width = min(max(width, len(agentlab.WithoutControls(f.Path))), 60)
	}
	count := map[string]int{}
	var order []string
	for _, f := range found {
		if count[f.Why]++; count[f.Why] == 1 {
			order = append(order, f.Why)
		}
	}
	for _, why := range order[:min(len(order), maxReasons)] {
		n := 0
		for _, f := range found {
			if f.Why != why {
				continue
			}
			if n++; n > shown {
				ui.Progressf("  and %d more: %s", count[why]-shown, agentlab.WithoutControls(why))
				break
			}
			state := "changed"
			if f.New {
				state = "new"
			}
			ui.Progressf("  %-*s  %-7s  %s", width, agentlab.WithoutControls(f.Path), state, agentlab.WithoutControls(why))
		}
	}
	if n := len(order) - maxReasons; n > 0 {
		ui.Progressf("  and files with %d other reasons", n)
	}
}

// maxReasons limits the reasons in a table.
const maxReasons = 60

// reasons joins findings for a sentence.
func reasons(found []returncheck.Finding) string {
	const shown = 5
	var parts []string
	for _, f := range found[:min(shown, len(found))] {
		parts = append(parts, fmt.Sprintf("%.200s (%s)", agentlab.WithoutControls(f.Path), agentlab.WithoutControls(f.Why)))
	}
	text := strings.Join(parts, ", ")
	if n := len(found) - shown; n > 0 {
		text += fmt.Sprintf(" and %d more", n)
	}
	return text
}

// NoteNamed names, in one line, files that the user should read before they run.
func NoteNamed(ui work.UI, found []returncheck.Finding) {
	var order []string
	paths := map[string][]string{}
	for _, f := range OfLevel(found, returncheck.Named) {
		if paths[f.Why] == nil {
			order = append(order, f.Why)
		}
		paths[f.Why] = append(paths[f.Why], f.Path)
	}
	var parts []string
	for _, why := range order[:min(4, len(order))] {
		parts = append(parts, work.JoinNames(paths[why])+" ("+agentlab.WithoutControls(why)+")")
	}
	if n := len(order) - 4; n > 0 {
		parts = append(parts, fmt.Sprintf("files with %d other reasons", n))
	}
	if len(parts) > 0 {
		ui.Progressf("note: read before you run: %s", strings.Join(parts, "; "))
	}
}

// NoteFetched names all findings about commits that were fetched and not merged.
func NoteFetched(ui work.UI, found []returncheck.Finding, show string) {
	list := append(OfLevel(found, returncheck.Refused), OfLevel(found, returncheck.Held)...)
	if len(list) > 0 {
		ListReturned(ui, list, "note: these commits have files that do harm in a work tree, or that programs of this machine execute or obey without a command of yours:")
		if show != "" {
			ui.Progressf("  → %s", show)
		}
	}
	NoteNamed(ui, found)
}

// DirNames returns the names in a directory; none if it cannot be read.
func DirNames(root *os.Root, dir string) []string {
	f, err := root.Open(dir)
	if err != nil {
		return nil
	}
	defer func() { _ = f.Close() }()
	names, _ := f.Readdirnames(-1)
	return names
}

// foldsNames reports whether the file system of a directory ignores the case of names: it
// then finds an entry of the directory under another case.
func foldsNames(dir string) bool {
	other := func(name string) string {
		return strings.Map(func(r rune) rune {
			if unicode.IsUpper(r) {
				return unicode.ToLower(r)
			}
			return unicode.ToUpper(r)
		}, name)
	}
	same := func(dir, name string) bool {
		a, err := os.Lstat(filepath.Join(dir, name))
		b, otherErr := os.Lstat(filepath.Join(dir, other(name)))
		return err == nil && otherErr == nil && name != other(name) && os.SameFile(a, b)
	}
	f, err := os.Open(dir)
	if err != nil {
		return false
	}
	defer func() { _ = f.Close() }()
	names, _ := f.Readdirnames(20)
	return slices.ContainsFunc(names, func(name string) bool { return same(dir, name) })
}

// topOf returns the top of the work tree that a directory of this machine is in; "" if
// there is none. It runs nothing.
func topOf(dir string) string {
	for at := dir; ; at = filepath.Dir(at) {
		if _, err := os.Lstat(filepath.Join(at, ".git")); err == nil {
			return at
		}
		if at == filepath.Dir(at) {
			return ""
		}
	}
}

// judgedFiles are files of a guest in a staging directory, with the findings about them.
type judgedFiles struct {
	Found  []returncheck.Finding // their paths are relative to the destination
	Staged map[string]string     // where the files and directories are, by the paths of findings
}

// JudgeFiles is the return check of the files from in a staging directory, which are about
// to become to in the directory parent.
func JudgeFiles(ctx context.Context, stage *os.Root, from, parent, to string) (judgedFiles, error) {
	got := judgedFiles{Staged: map[string]string{}}
	abs, err := filepath.Abs(parent)
	if err == nil {
		abs, err = filepath.EvalSymlinks(abs)
	}
	if err != nil {
		return got, work.LocalFault(parent, err)
	}
	root, err := os.OpenRoot("/")
	if err != nil {
		return got, err
	}
	defer func() { _ = root.Close() }()
	place := strings.TrimPrefix(filepath.ToSlash(abs), "/")
	var entries []returncheck.Entry
	err = fs.WalkDir(stage.FS(), from, func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		here := path.Join(to, strings.TrimPrefix(name, from)) // below parent
		if d.IsDir() && here == "." {
			return nil
		}
		e := returncheck.Entry{Path: path.Join(place, here)}
		if e.Kind, e.Target, err = fileKind(stage, name); err == nil {
			e.Was, _, err = fileKind(root, e.Path)
		}
		entries, got.Staged[here] = append(entries, e), name
		return err
	})
	if err != nil {
		return got, work.LocalFault(parent, err)
	}
	for _, f := range returncheck.Check(entries, placeHost(ctx, root, abs)) {
		here := strings.TrimPrefix(strings.TrimPrefix(f.Path, place), "/")
		if f.Level != returncheck.Refused && SameContent(stage, got.Staged[here], root, f.Path) {
			continue
		}
		f.Path = here
		got.Found = append(got.Found, f)
	}
	return got, nil
}

// JudgeFile is the return check of one file of a guest that is about to be written. It
// finds nothing in a directory that does not exist.
func JudgeFile(ctx context.Context, name string) ([]returncheck.Finding, error) {
	abs, err := filepath.Abs(name)
	if err == nil {
		var dir string
		if dir, err = filepath.EvalSymlinks(filepath.Dir(abs)); errors.Is(err, fs.ErrNotExist) {
			return nil, nil // it cannot be written
		}
		abs = filepath.Join(dir, filepath.Base(abs))
	}
	if err != nil {
		return nil, work.LocalFault(name, err)
	}
	root, err := os.OpenRoot("/")
	if err != nil {
		return nil, err
	}
	defer func() { _ = root.Close() }()
	e := returncheck.Entry{Path: strings.TrimPrefix(filepath.ToSlash(abs), "/"), Kind: returncheck.File}
	if e.Was, _, err = fileKind(root, e.Path); err != nil {
		return nil, work.LocalFault(name, err)
	}
	found := returncheck.Check([]returncheck.Entry{e}, placeHost(ctx, root, filepath.Dir(abs)))
	for i := range found {
		found[i].Path = name
	}
	return found, nil
}

// placeHost describes a directory of this machine for the return check of paths below
// root, which is the root directory.
func placeHost(ctx context.Context, root *os.Root, dir string) returncheck.Host {
	host := returncheck.Host{FoldsNames: foldsNames(dir)}
	if top := topOf(dir); top != "" {
		host = WorkTreeHost(ctx, top)
		host.Top = strings.TrimPrefix(filepath.ToSlash(top), "/")
		obeyed := map[string]string{}
		for name, why := range host.Obeyed {
			obeyed[path.Join(host.Top, name)] = why
		}
		host.Obeyed = obeyed
	}
	host.Names = func(dir string) []string { return DirNames(root, dir) }
	return host
}

// NoteArchive names, in one line, what an archive of a guest has for those who extract it.
func NoteArchive(ui work.UI, found []returncheck.Finding) {
	if list := append(OfLevel(found, returncheck.Refused), OfLevel(found, returncheck.Held)...); len(list) > 0 {
		ui.Progressf("note: programs execute or obey files of the archive where it is extracted: %s", reasons(list))
	}
}

// maxArchiveNames limits the names that are kept of an archive of a guest, in bytes.
const maxArchiveNames = 64 << 20

// ArchiveNames collects the entries of an archive for the return check.
type ArchiveNames struct {
	entries []returncheck.Entry
	bytes   int
	git     map[string]bool // directories of git, which count once
}

// See adds an entry of an archive, unless there are too many.
func (n *ArchiveNames) See(h *tar.Header, _ io.Reader) error {
	n.add(h)
	return nil
}

func (n *ArchiveNames) add(h *tar.Header) {
	name := path.Clean(h.Name)
	if h.Typeflag == tar.TypeDir || n.bytes > maxArchiveNames {
		return
	}
	parts := strings.Split(name, "/")
	if i := slices.IndexFunc(parts, returncheck.GitDir); i >= 0 {
		if name = strings.Join(parts[:i+1], "/"); n.git[name] {
			return
		}
		if n.git == nil {
			n.git = map[string]bool{}
		}
		n.git[name] = true
	}
	e := returncheck.Entry{Path: name, Kind: returncheck.File}
	if h.Typeflag == tar.TypeSymlink {
		e.Kind, e.Target = returncheck.Link, h.Linkname
	}
	n.bytes += len(name) + len(e.Target) + 64
	n.entries = append(n.entries, e)
}

// Findings judges what was collected.
func (n *ArchiveNames) Findings() []returncheck.Finding {
	found := returncheck.Check(n.entries, returncheck.Host{})
	if n.bytes > maxArchiveNames {
		found = append(found, returncheck.Finding{Path: "other files", Level: returncheck.Held, Why: "there are too many to check"})
	}
	return found
}

// fileKind returns the kind of a file, and the target of a link. A file that does not
// exist, or is a device, a pipe or a socket, is None.
func fileKind(root *os.Root, name string) (returncheck.Kind, string, error) {
	st, err := root.Lstat(name)
	switch {
	case errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR):
		return returncheck.None, "", nil
	case err != nil:
		return returncheck.None, "", err
	case st.Mode()&fs.ModeSymlink != 0:
		target, err := root.Readlink(name)
		return returncheck.Link, target, err
	case st.IsDir():
		return returncheck.Dir, "", nil
	case !st.Mode().IsRegular():
		return returncheck.None, "", nil
	case st.Mode()&0o111 != 0:
		return returncheck.Program, "", nil
	}
	return returncheck.File, "", nil
}

// SameContent reports whether two files are equal.
func SameContent(a *os.Root, aName string, b *os.Root, bName string) bool {
	aKind, aTarget, aErr := fileKind(a, aName)
	bKind, bTarget, bErr := fileKind(b, bName)
	if aErr != nil || bErr != nil || aKind != bKind || aTarget != bTarget || aKind == returncheck.None || aKind == returncheck.Dir {
		return false
	}
	if aKind == returncheck.Link {
		return true
	}
	aFile, aErr := a.Open(aName)
	if aErr != nil {
		return false
	}
	defer func() { _ = aFile.Close() }()
	bFile, bErr := b.Open(bName)
	if bErr != nil {
		return false
	}
	defer func() { _ = bFile.Close() }()
	aBuf, bBuf := make([]byte, 64<<10), make([]byte, 64<<10)
	for {
		n, aErr := io.ReadFull(aFile, aBuf)
		m, bErr := io.ReadFull(bFile, bBuf)
		if !bytes.Equal(aBuf[:n], bBuf[:m]) {
			return false
		}
		if aErr != nil || bErr != nil {
			return ended(aErr) && ended(bErr)
		}
	}
}

// ended reports whether io.ReadFull has reached the end of a file.
func ended(err error) bool { return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) }
