package transfer

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/bmatcuk/doublestar/v4"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/bounded"
	"github.com/agentlab-vm/agentlab/internal/projectfile"
	"github.com/agentlab-vm/agentlab/internal/returncheck"
	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
	"github.com/agentlab-vm/agentlab/internal/work/guestrun"
)

const (
	maxArtifacts    = 10000    // files that one sync copies
	maxArtifactList = 64 << 20 // bytes of the names that a guest lists
)

// ArtifactOptions are what 'agentlab sync --artifacts' was asked for.
type ArtifactOptions struct {
	Patterns []string
	Worktree string
	Session  string
	Force    bool
	Gib      int
}

// ArtifactPatterns returns the patterns of the arguments, or else those that the project
// file of the work tree here declares. The file of the guest does not count: it would
// decide which files are written to this machine.
func ArtifactPatterns(top string, args []string) ([]string, error) {
	where, patterns := "the arguments", args
	if len(args) == 0 {
		where = projectfile.Name
		text, err := readProjectFile(top)
		if err != nil {
			return nil, err
		}
		p, err := projectfile.Parse(text)
		if err != nil {
			return nil, agentlab.Errorf(agentlab.CodeInvalid, "%s: %w", projectfile.Name, err).WithHint("correct it, or name patterns: agentlab sync --artifacts 'dist/**'")
		}
		patterns = p.Outputs
	}
	if len(patterns) == 0 {
		return nil, agentlab.Errorf(agentlab.CodeNotFound, "no artifacts are declared: %s of this work tree has no outputs", projectfile.Name).
			WithHint("add them, e.g. outputs: [\"dist/**\"], or name patterns: agentlab sync --artifacts 'dist/**'")
	}
	if err := projectfile.CheckOutputs(patterns); err != nil {
		return nil, agentlab.Errorf(agentlab.CodeOf(err), "%s: %w", where, err).WithHint("%s", agentlab.HintOf(err))
	}
	clean := make([]string, len(patterns))
	for i, p := range patterns {
		clean[i] = path.Clean(p)
	}
	return clean, nil
}

// readProjectFile returns the content of the project file; a missing one is empty.
func readProjectFile(top string) ([]byte, error) {
	root, err := os.OpenRoot(top)
	if err != nil {
		return nil, work.LocalFault(top, err)
	}
	defer func() { _ = root.Close() }()
	st, err := root.Stat(projectfile.Name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err == nil && (!st.Mode().IsRegular() || st.Size() > projectfile.MaxBytes) {
		return nil, agentlab.Errorf(agentlab.CodeInvalid, "%s is not a file of at most %s", projectfile.Name, work.ByteSize(projectfile.MaxBytes))
	}
	var text []byte
	if err == nil {
		text, err = root.ReadFile(projectfile.Name)
	}
	if err != nil {
		return nil, work.LocalFault(projectfile.Name, err)
	}
	return text, nil
}

// ListArtifacts returns the matching files of a work tree in the guest.
func ListArtifacts(ctx context.Context, ui work.UI, c *client.Client, from Place, patterns []string) ([]string, error) {
	args := []string{"list", from.Path}
	for _, p := range patterns {
		base, _ := doublestar.SplitPattern(p)
		args = append(args, ":(literal)"+base)
	}
	list := bounded.Head{Max: maxArtifactList, Fail: gitsafe.ErrOutputTooLarge}
	code, text, err := runFiles(ctx, c, from, "", args, nil, &list)
	switch {
	case errors.Is(err, gitsafe.ErrOutputTooLarge):
		return nil, agentlab.Errorf(agentlab.CodeLimit, "the session has too many files that git does not carry").WithHint("choose patterns that begin with a directory")
	case err != nil:
		return nil, err
	case code != 0:
		return nil, copyFault(from, code, text)
	}
	var names []string
	for name := range strings.SplitSeq(list.String(), "\x00") {
		if name == "" || !slices.ContainsFunc(patterns, func(p string) bool { return doublestar.MatchUnvalidated(p, name) }) {
			continue
		}
		if len(name) > maxEntryName || !localName(name) || path.Clean(name) != name {
			return nil, guestrun.Invalid("the file %.200q", name)
		}
		if names = append(names, name); len(names) > maxArtifacts {
			return nil, agentlab.Errorf(agentlab.CodeLimit, "more than %d files of the session match", maxArtifacts).WithHint("choose narrower patterns, or archive the files in the session")
		}
	}
	slices.Sort(names)
	return slices.Compact(names), nil
}

// WantedArtifacts leaves out what must not come from a guest: files that git tracks here
// or that belong to another repository, files that the return check refuses or holds, and
// what .agentlabignore names.
func WantedArtifacts(ctx context.Context, root *os.Root, top string, names []string, got *Copied) ([]string, error) {
	tracked, err := trackedNames(ctx, top)
	if err != nil {
		return nil, err
	}
	ignored, err := IgnoredNames(ctx, top, names)
	if err != nil {
		return nil, err
	}
	host := gitsafe.WorkTreeHost(ctx, top)
	host.Names = func(dir string) []string { return gitsafe.DirNames(root, dir) }
	entries := make([]returncheck.Entry, len(names))
	for i, name := range names {
		entries[i] = returncheck.Entry{Path: name, Kind: returncheck.File}
	}
	held := map[string]string{}
	for _, f := range returncheck.Check(entries, host) {
		if f.Level != returncheck.Named {
			held[f.Path] = f.Why
		}
	}
	var wanted []string
	for _, name := range names {
		reason := ""
		switch {
		case held[name] != "":
			reason = held[name]
		case returncheck.Fold(path.Base(name)) == ".gitignore":
			reason = "it configures git"
		case ignored[name]:
			reason = IgnoreFile + " names it"
		}
		for at := name; at != "." && reason == ""; at = path.Dir(at) {
			_, gitErr := root.Lstat(path.Join(at, ".git"))
			switch {
			case tracked[strings.ToLower(at)]:
				reason = "git tracks it here"
			case at != name && gitErr == nil:
				reason = "it belongs to another repository here"
			}
		}
		if reason != "" {
			got.skip(name, reason)
			continue
		}
		wanted = append(wanted, name)
	}
	return wanted, nil
}

// trackedNames returns the files that git tracks, in lower case: a file system can
// ignore case.
func trackedNames(ctx context.Context, top string) (map[string]bool, error) {
	out, err := gitsafe.Command{Raw: true}.Run(ctx, top, "ls-files", "-z", "--cached", "--full-name")
	if err != nil {
		return nil, err
	}
	tracked := map[string]bool{}
	for name := range strings.SplitSeq(out, "\x00") {
		tracked[strings.ToLower(name)] = true
	}
	return tracked, nil
}

// IgnoredNames returns those of the names, which need not exist, that the file
// .agentlabignore of a work tree names. It asks git in an empty repository, where no
// other rule applies.
func IgnoredNames(ctx context.Context, top string, names []string) (map[string]bool, error) {
	root, err := os.OpenRoot(top)
	if err != nil {
		return nil, work.LocalFault(top, err)
	}
	defer func() { _ = root.Close() }()
	rules, err := root.ReadFile(IgnoreFile)
	if errors.Is(err, fs.ErrNotExist) || err == nil && len(names) == 0 {
		return map[string]bool{}, nil
	}
	if err != nil {
		return nil, work.LocalFault(IgnoreFile, err) // otherwise more would be copied than the user wants
	}
	empty, remove, err := gitsafe.TempDir("agentlab-ignore-*")
	if err != nil {
		return nil, err
	}
	defer remove()
	if _, err := gitsafe.Git(ctx, empty, "init", "--quiet", "--template="); err != nil {
		return nil, err
	}
	// The last rule has a file that is always named, so that git succeeds.
	const sentinel = ".agentlab-none"
	rules = append(rules, "\n/"+sentinel+"\n"...)
	if err := os.WriteFile(path.Join(empty, ".gitignore"), rules, 0o600); err != nil {
		return nil, err
	}
	in := gitsafe.Command{Stdin: strings.NewReader(strings.Join(append(slices.Clone(names), sentinel), "\x00") + "\x00"), Raw: true}
	out, err := in.Run(ctx, empty, "-c", "core.excludesFile="+os.DevNull, "check-ignore", "--no-index", "-z", "--stdin")
	if err != nil {
		return nil, agentlab.Errorf(agentlab.CodeInvalid, "git cannot apply %s: %w", IgnoreFile, err)
	}
	ignored := map[string]bool{}
	for name := range strings.SplitSeq(out, "\x00") {
		ignored[name] = true
	}
	return ignored, nil
}

// InstallArtifacts copies files to the top of a work tree, and returns their names and the
// findings about them. They are complete and checked before the first one is moved to its
// place.
func InstallArtifacts(ctx context.Context, ui work.UI, c *client.Client, top *os.Root, from Place, names []string, o ArtifactOptions, got *Copied) ([]string, []returncheck.Finding, error) {
	stage, remove, err := gitsafe.StageDir(top)
	if err != nil {
		return nil, nil, err
	}
	defer remove()
	// After a crash git must not take the directory for work of the user.
	if err := top.WriteFile(path.Join(stage, ".gitignore"), []byte("*\n"), 0o600); err != nil {
		return nil, nil, work.LocalFault(top.Name(), err)
	}
	root, err := top.OpenRoot(stage)
	if err != nil {
		return nil, nil, work.LocalFault(top.Name(), err)
	}
	defer func() { _ = root.Close() }()
	m := ui.Meter()
	defer m.Done()
	list := strings.NewReader(".\x00" + strings.Join(names, "\x00") + "\x00")
	got.Changed, err = fetchArchive(ctx, c, from, "", guestapi.FilesTree, list, func(archive io.Reader) error {
		isDir, err := Unpack(root, archive, int64(o.Gib)<<30, got, func() { moved(m, "receiving", *got) })
		if err == nil && !isDir {
			err = errArchive("it is not a directory")
		}
		return err
	})
	m.Done()
	if err != nil {
		return nil, nil, err
	}
	files, err := checkArtifacts(root, names, got)
	if err != nil {
		return nil, nil, err
	}
	j, err := gitsafe.JudgeFiles(ctx, root, "top", top.Name(), ".")
	if err == nil { // what it refuses or holds by name alone is left out before
		err = gitsafe.Admit(ctx, ui, j.Found, gitsafe.Admission{Dir: top.Name(), Verb: "copied"})
	}
	if err != nil {
		return nil, nil, err
	}
	return files, j.Found, (installer{top, o.Force}).install(path.Join(stage, "top"), ".")
}

// checkArtifacts checks that an extracted archive has nothing but what was asked for, and
// removes its links. It returns the files.
func checkArtifacts(root *os.Root, names []string, got *Copied) (files []string, err error) {
	wanted := map[string]bool{}
	for _, name := range names {
		wanted[name] = true
		for dir := path.Dir(name); dir != "."; dir = path.Dir(dir) {
			wanted[dir+"/"] = true
		}
	}
	err = fs.WalkDir(root.FS(), "top", func(at string, d fs.DirEntry, err error) error {
		if err != nil {
			return work.LocalFault(at, err)
		}
		name := strings.TrimPrefix(at, "top/")
		switch {
		case at == "top" || d.IsDir() && wanted[name+"/"]:
			return nil
		case d.IsDir() || !wanted[name]:
			return errArchive("it has %.200q, which was not requested", name)
		case !d.Type().IsRegular():
			got.skip(name, "it is a link")
			return root.Remove(at)
		}
		files = append(files, name)
		return nil
	})
	if err == nil && len(files) == 0 {
		err = agentlab.Errorf(agentlab.CodeNotFound, "no file that matches can be copied").WithHint("artifacts are regular files; links are left out")
	}
	return files, err
}

// AdmitFile is the return check of one file of a guest that is about to be written. It
// returns the findings, and names them unless quiet is set.
func AdmitFile(ctx context.Context, ui work.UI, name string, quiet bool) ([]returncheck.Finding, error) {
	found, err := gitsafe.JudgeFile(ctx, name)
	if err != nil {
		return nil, err
	}
	if !quiet {
		gitsafe.NoteNamed(ui, found)
	}
	return found, gitsafe.Admit(ctx, ui, found, gitsafe.Admission{Dir: filepath.Dir(name), Verb: "written"})
}
