package source

import (
	"bytes"
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/returncheck"
	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
	"github.com/agentlab-vm/agentlab/internal/work/worktest"
)

// A file that a sparse work tree leaves out is written; names can have any characters.
func TestApplyToSparseWorkTree(t *testing.T) {
	t.Parallel()
	user, guest := worktest.NewAgent(t)
	names := []string{" lead", "a b", "tab\there", "\u00e4", "line\nbreak", `"quoted"`, "-n", ":x", "a*b"}
	first, second := map[string]string{"run.sh": "false\n"}, map[string]string{}
	for _, name := range names {
		first[name], second[name] = "1\n", "2\n"
	}
	worktest.Git(t, user, "update-index", "--skip-worktree", "run.sh")
	worktest.Put(t, user, map[string]string{"run.sh": ""})
	if _, err := apply(t, user, worktest.Leave(t, guest, first), false); err != nil {
		t.Fatal(err)
	}
	if got := worktest.Tree(t, user); got["run.sh"] != "false\n" || got["line\nbreak"] != "1\n" || got[`"quoted"`] != "1\n" {
		t.Errorf("files: %q", got)
	}
	worktest.Put(t, user, map[string]string{"line\nbreak": "", `"quoted"`: ""}) // they can be new, but not merged
	if _, err := apply(t, user, worktest.Leave(t, guest, second), false); err != nil {
		t.Fatal(err)
	}
	got := worktest.Tree(t, user)
	for _, name := range names {
		if got[name] != "2\n" {
			t.Errorf("%q is %q", name, got[name])
		}
	}
}

// Files are written as git checks them out, with the line endings and encodings of the
// attributes, and compared and merged as git stores them.
func TestApplyConverts(t *testing.T) {
	t.Parallel()
	user, guest := worktest.NewAgent(t)
	utf16 := func(s string) string {
		text := "\xff\xfe"
		for _, c := range s {
			text += string([]byte{byte(c), 0})
		}
		return text
	}
	for _, dir := range []string{user, guest} {
		worktest.Put(t, dir, map[string]string{".gitattributes": "*.bat eol=crlf\n*.u16 working-tree-encoding=UTF-16LE-BOM\n*.id ident\n", "a.bat": "1\r\n2\r\n3\r\n4\r\n5\r\n", "b.bat": "1\r\n", "c.u16": utf16("one\n"), "d.id": "$Id$\n"})
		worktest.Git(t, dir, "add", "-A")
		worktest.Git(t, dir, "commit", "-q", "-m", "converted", "--date=2020-01-01T00:00:00Z")
	}
	worktest.Git(t, guest, "update-ref", "refs/heads/agentlab/j", "HEAD")
	bundle := worktest.Leave(t, guest, map[string]string{"a.bat": "one\r\n2\r\n3\r\n4\r\n5\r\n", "b.bat": "2\r\n", "c.u16": utf16("two\n"), "d.id": "$Id$\nmore\n", "e.bat": "new\r\n"})
	worktest.Put(t, user, map[string]string{"a.bat": "1\r\n2\r\n3\r\n4\r\nfive\r\n"})
	if _, err := apply(t, user, bundle, true); err != nil {
		t.Fatal(err)
	}
	got := worktest.Tree(t, user)
	for name, want := range map[string]string{"a.bat": "one\r\n2\r\n3\r\n4\r\nfive\r\n", "b.bat": "2\r\n", "c.u16": utf16("two\n"), "e.bat": "new\r\n"} {
		if got[name] != want {
			t.Errorf("%s is %q, want %q", name, got[name], want)
		}
	}
	if !strings.HasPrefix(got["d.id"], "$Id: ") {
		t.Errorf("d.id is %q", got["d.id"])
	}
	worktest.Git(t, user, "add", "-A")
	for _, name := range []string{"b.bat", "c.u16", "d.id", "e.bat"} {
		if mine, theirs := worktest.Git(t, user, "rev-parse", ":"+name), worktest.Git(t, guest, "rev-parse", guestapi.RefChanges+":"+name); mine != theirs {
			t.Errorf("%s: the next commit has %s, and the agent's %s", name, mine, theirs)
		}
	}
	if out, err := apply(t, user, bundle, true); err != nil || out != "" {
		t.Errorf("again: %q, %v", out, err)
	}
}

// The version that was applied is the base of the next apply: the agent works on in the same
// lines, and the user in others.
func TestApplyAgain(t *testing.T) {
	t.Parallel()
	user, guest := worktest.NewAgent(t)
	first := map[string]string{"lines.txt": "one\n" + worktest.TenLines[2:], "fresh.txt": "1\n", "run.sh": "false\n"}
	if _, err := apply(t, user, worktest.Leave(t, guest, first), false); err != nil {
		t.Fatal(err)
	}
	second := map[string]string{"lines.txt": "uno\n" + worktest.TenLines[2:], "fresh.txt": "2\n", "run.sh": "exit 1\n"}
	if out, err := apply(t, user, worktest.Leave(t, guest, second), false); err != nil || out != "fresh.txt\nlines.txt\nrun.sh\n" {
		t.Fatalf("again: %q, %v", out, err)
	}
	if got := worktest.Tree(t, user); got["lines.txt"] != second["lines.txt"] || got["fresh.txt"] != "2\n" || got["run.sh"] != "exit 1\n" {
		t.Errorf("files: %q", got)
	}
	worktest.Put(t, user, map[string]string{"lines.txt": second["lines.txt"] + "mine\n", "run.sh": "true\n"}) // a line more, and taken back
	third := worktest.Leave(t, guest, map[string]string{"lines.txt": "due\n" + worktest.TenLines[2:], "run.sh": "exit 2\n"})
	if _, err := apply(t, user, third, false); agentlab.CodeOf(err) != agentlab.CodeConflict || !strings.Contains(err.Error(), "would be changed: lines.txt") {
		t.Errorf("changes of the user: %v", err)
	}
	if _, err := apply(t, user, third, true); err != nil {
		t.Fatal(err)
	}
	refs := func() string { return worktest.Git(t, user, "for-each-ref", appliedRefs) }
	if err := ForgetApplied(t.Context(), user, "other"); err != nil || refs() == "" {
		t.Errorf("of another session: %v", err)
	}
	if err := ForgetApplied(t.Context(), user, "j"); err != nil || refs() != "" {
		t.Errorf("%v: %s", err, refs())
	}
	if got := worktest.Tree(t, user); got["lines.txt"] != "due\n"+worktest.TenLines[2:]+"mine\n" || got["run.sh"] != "exit 2\n" {
		t.Errorf("files: %q", got)
	}
}

// apply applies the changes in a bundle, and returns the files in lines.
func apply(t *testing.T, user, bundle string, force bool, paths ...string) (stdout string, err error) {
	t.Helper()
	dir := t.TempDir()
	b, err := gitsafe.OpenBundle(t.Context(), dir, bundle, user, "refs/heads/agentlab/j", guestapi.RefChanges)
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	got, err := Apply(t.Context(), worktest.UI{Out: io.Discard}, b, OfJob(api.Job{ID: "j"}, b), dir, Options{Paths: paths, Force: force})
	for _, name := range got.Files {
		stdout += name + "\n"
	}
	return stdout, err
}

func TestApply(t *testing.T) {
	t.Parallel()
	user, bundle := worktest.AgentLeft(t, map[string]string{
		"lines.txt": "one\n" + worktest.TenLines[2:], "gone.txt": "", "dir/bin": "\x00\x02", "new/file": "new\n", "link": "-> dir/bin",
	})
	if err := os.Chmod(filepath.Join(user, "lines.txt"), 0o755); err != nil {
		t.Fatal(err)
	}
	worktest.Git(t, user, "config", "core.fileMode", "false")
	// The user went on meanwhile: the file is merged.
	worktest.Put(t, user, map[string]string{"lines.txt": worktest.TenLines + "11\n"})
	worktest.Git(t, user, "commit", "-q", "-a", "-m", "eleven")
	head, index := worktest.Git(t, user, "rev-parse", "HEAD"), worktest.Git(t, user, "ls-files", "--stage")
	out, err := apply(t, user, bundle, false)
	if err != nil || out != "dir/bin\ngone.txt\nlines.txt\nlink\nnew/file\n" {
		t.Fatalf("%q, %v", out, err)
	}
	got := worktest.Tree(t, user)
	if got["lines.txt"] != "one\n"+worktest.TenLines[2:]+"11\n" || got["dir/bin"] != "\x00\x02" || got["new/file"] != "new\n" || got["run.sh"] != "true\n" {
		t.Errorf("the work tree holds %q", got)
	}
	if _, there := got["gone.txt"]; there {
		t.Error("gone.txt is still there")
	}
	if target, err := os.Readlink(filepath.Join(user, "link")); err != nil || target != "dir/bin" {
		t.Errorf("the link is %q, %v", target, err)
	}
	if worktest.Git(t, user, "rev-parse", "HEAD") != head || worktest.Git(t, user, "ls-files", "--stage") != index {
		t.Error("HEAD or the index changed")
	}
	// Again: the merged file is dirty now, the others have the changes.
	worktest.Put(t, user, map[string]string{"lines.txt": "one\n" + worktest.TenLines[2:]})
	if out, err := apply(t, user, bundle, false); err != nil || out != "" {
		t.Errorf("the second time: %q, %v", out, err)
	}
}

func TestApplyPaths(t *testing.T) {
	user, bundle := worktest.AgentLeft(t, map[string]string{"run.sh": "false\n", "dir/bin": "\x00\x02", "dir/x": "x\n"})
	t.Chdir(filepath.Join(user, "dir"))
	for _, bad := range []string{"../../elsewhere", "/etc/passwd", "../lines.txt"} {
		if _, err := apply(t, user, bundle, false, bad); err == nil {
			t.Errorf("the path %s was taken", bad)
		}
	}
	if out, err := apply(t, user, bundle, false, "x", "."); err != nil || out != "dir/bin\ndir/x\n" {
		t.Errorf("%q, %v", out, err)
	}
	if got := worktest.Tree(t, user)["run.sh"]; got != "true\n" {
		t.Errorf("a file that was not named is %q", got)
	}
}

// A file with uncommitted work of the user is not touched without --force,
// and with it the work is merged, not lost. When one file cannot be merged,
// none is changed.
func TestApplyToDirtyFiles(t *testing.T) {
	t.Parallel()
	changed := map[string]string{"lines.txt": "one\n" + worktest.TenLines[2:], "run.sh": "false\n", "new.txt": "new\n"}
	for name, tt := range map[string]struct {
		mine  map[string]string
		force bool
		want  map[string]string // nil: nothing changes
	}{
		"dirty":           {mine: map[string]string{"lines.txt": worktest.TenLines + "11\n"}},
		"dirty, force":    {mine: map[string]string{"lines.txt": worktest.TenLines + "11\n"}, force: true, want: map[string]string{"lines.txt": "one\n" + worktest.TenLines[2:] + "11\n", "new.txt": "new\n", "run.sh": "false\n"}},
		"conflict":        {mine: map[string]string{"lines.txt": "eins\n" + worktest.TenLines[2:]}, force: true},
		"untracked":       {mine: map[string]string{"new.txt": "mine\n"}, force: true},
		"deleted":         {mine: map[string]string{"run.sh": ""}, force: true},
		"other is dirty":  {mine: map[string]string{"a.txt": "mine\n"}, want: map[string]string{"a.txt": "mine\n", "new.txt": "new\n", "run.sh": "false\n"}},
		"a link is there": {mine: map[string]string{"new.txt": "-> /etc/passwd"}, force: true},
		"a folder":        {mine: map[string]string{"new.txt/file": "mine\n"}, force: true},
	} {
		t.Run(name, func(t *testing.T) {
			user, bundle := worktest.AgentLeft(t, changed)
			worktest.Put(t, user, tt.mine)
			before := worktest.Tree(t, user)
			_, err := apply(t, user, bundle, tt.force)
			after := worktest.Tree(t, user)
			if tt.want == nil {
				if agentlab.CodeOf(err) != agentlab.CodeConflict || tt.force && !strings.Contains(agentlab.HintOf(err), "job fetch --with-changes j,") {
					t.Errorf("got %v (%s), want a conflict", err, agentlab.HintOf(err))
				}
				want, _ := json.Marshal(before)
				if got, _ := json.Marshal(after); !bytes.Equal(got, want) {
					t.Errorf("the work tree changed to %s\nfrom %s", got, want)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			for name, want := range tt.want {
				if after[name] != want {
					t.Errorf("%s is %q, want %q", name, after[name], want)
				}
			}
		})
	}
}

// Links that lead out of the repository are left out; the rest is applied.
func TestApplyHostileChanges(t *testing.T) {
	t.Parallel()
	for name, changed := range map[string]map[string]string{
		"absolute link": {"a-new": "x\n", "link": "-> /etc/passwd"},
		"link outside":  {"a-new": "x\n", "dir/link": "-> ../../outside"},
		"link to .git":  {"a-new": "x\n", "dir/link": "-> ../.git/config"},
	} {
		user, bundle := worktest.AgentLeft(t, changed)
		if out, err := apply(t, user, bundle, true); err != nil || out != "a-new\n" {
			t.Errorf("%s: applied %q, %v", name, out, err)
		}
		for _, link := range []string{"link", "dir/link"} {
			if _, err := os.Lstat(filepath.Join(user, link)); err == nil {
				t.Errorf("%s: there is a link", name)
			}
		}
	}
	// A folder of the user that is a link now.
	user, bundle := worktest.AgentLeft(t, map[string]string{"dir/new": "x\n"})
	outside := t.TempDir()
	if err := os.RemoveAll(filepath.Join(user, "dir")); err != nil {
		t.Fatal(err)
	}
	worktest.Put(t, user, map[string]string{"dir": "-> " + outside})
	if _, err := apply(t, user, bundle, true); agentlab.CodeOf(err) != agentlab.CodeConflict {
		t.Errorf("below a link: got %v", err)
	}
	if got, _ := os.ReadDir(outside); len(got) != 0 {
		t.Errorf("a file was written to %v", got)
	}
	for _, p := range []string{"", ".", "..", "../x", "/x", "a/../../x", "a//b", "a/", ".git", ".git/hooks/x", "a/.GIT/config", "a/.git", "GIT~1/x", `a\..\b`, ".g\u200cit/config", "a/.git. ./x", ".git::$INDEX_ALLOCATION/config", "git~1 /x"} {
		if returncheck.BadPath(p) == "" {
			t.Errorf("the path %q is taken", p)
		}
	}
	for _, p := range []string{"a", "a/b", ".gitignore", "a..b", ".github/workflows/x"} {
		if err := returncheck.BadPath(p); err != "" {
			t.Errorf("%q: %v", p, err)
		}
	}
}

// The error for changes that do not fit says why, for each file.
func TestApplyConflictReasons(t *testing.T) {
	user, bundle := worktest.AgentLeft(t, map[string]string{
		"dir/bin": "", "dir": "-> work.txt", // a directory became a link
		"lines.txt": "one\n" + worktest.TenLines[2:], "run.sh": "", "gone.txt": "new\n", "fresh": "-> work.txt",
	})
	worktest.Put(t, user, map[string]string{"run.sh": "mine\n", "gone.txt": "", "fresh": "mine\n"})
	worktest.Git(t, user, "rm", "-q", "gone.txt")
	_, err := apply(t, user, bundle, true)
	for _, want := range []string{
		"dir (the path dir is a directory here)", "run.sh (it was deleted in the sandbox, but it differs from the version there)",
		"gone.txt (the file does not exist)", "fresh (it was created in the sandbox, but the path exists)", "nothing was applied",
	} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q is not in %v", want, err)
		}
	}
	if agentlab.CodeOf(err) != agentlab.CodeConflict || strings.Contains(err.Error(), "lines.txt") {
		t.Error(err)
	}
	worktest.Put(t, user, map[string]string{"run.sh": "true\n", "lines.txt": "two\n" + worktest.TenLines[2:]})
	_, err = apply(t, user, bundle, true, "lines.txt")
	if want := "lines.txt (its changes conflict with yours)"; err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("%q is not in %v", want, err)
	}
}

// What was applied is the base only while the agent's commit is the same.
func TestApplyAfterCommits(t *testing.T) {
	t.Parallel()
	user, guest := worktest.NewAgent(t)
	text := func(first, middle, last string) string {
		return first + "2\n3\n4\n5\n" + middle + "6\n7\n8\n9\n" + last
	}
	if _, err := apply(t, user, worktest.Leave(t, guest, map[string]string{"lines.txt": text("1\n", "L\n", "10\n")}), false); err != nil {
		t.Fatal(err)
	}
	worktest.Put(t, guest, map[string]string{"lines.txt": text("1\n", "", "ten\n")})
	worktest.Git(t, guest, "commit", "-q", "-a", "-m", "without L")
	worktest.Git(t, guest, "update-ref", "refs/heads/agentlab/j", "HEAD")
	worktest.Git(t, user, "checkout", "-q", "--", ".")
	worktest.Git(t, user, "pull", "-q", guest, "agentlab/j")
	worktest.Put(t, user, map[string]string{"lines.txt": text("1\n", "L\n", "ten\n")})
	worktest.Git(t, user, "commit", "-q", "-a", "-m", "with L")
	if _, err := apply(t, user, worktest.Leave(t, guest, map[string]string{"lines.txt": text("one\n", "", "ten\n")}), false); err != nil {
		t.Fatal(err)
	}
	if got := worktest.Tree(t, user)["lines.txt"]; got != text("one\n", "L\n", "ten\n") {
		t.Errorf("lines.txt is %q", got)
	}
	// A file that was deleted and is there again.
	if _, err := apply(t, user, worktest.Leave(t, guest, map[string]string{"gone.txt": ""}), false); err != nil {
		t.Fatal(err)
	}
	if _, err := apply(t, user, worktest.Leave(t, guest, map[string]string{"gone.txt": "back\n"}), false); err != nil || worktest.Tree(t, user)["gone.txt"] != "back\n" {
		t.Errorf("gone.txt: %v", err)
	}
}

// Line endings in the index decide about others, and attributes that arrive count.
func TestApplyWithAttributes(t *testing.T) {
	t.Parallel()
	user, guest := worktest.NewAgent(t)
	crlf := "1\r\n2\r\n3\r\n4\r\n5\r\n6\r\n7\r\n8\r\n"
	for _, dir := range []string{user, guest} {
		worktest.Put(t, dir, map[string]string{"w.txt": crlf})
		worktest.Git(t, dir, "add", "-A")
		worktest.Git(t, dir, "commit", "-q", "-m", "crlf", "--date=2020-01-01T00:00:00Z")
		worktest.Put(t, dir, map[string]string{".gitattributes": "* text=auto\n"})
		worktest.Git(t, dir, "add", ".gitattributes")
		worktest.Git(t, dir, "commit", "-q", "-m", "attributes", "--date=2020-01-01T00:00:00Z")
	}
	worktest.Git(t, user, "config", "agentlab.return", "allow")
	worktest.Git(t, guest, "update-ref", "refs/heads/agentlab/j", "HEAD")
	first := map[string]string{"w.txt": "one\r\n" + crlf, ".gitattributes": "* text=auto\n*.bat eol=crlf\n", "new.bat": "x\r\n"}
	if _, err := apply(t, user, worktest.Leave(t, guest, first), false); err != nil {
		t.Fatal(err)
	}
	if got := worktest.Tree(t, user); got["new.bat"] != "x\r\n" || got["w.txt"] != first["w.txt"] {
		t.Errorf("files: %q", got)
	}
	if out, err := apply(t, user, worktest.Leave(t, guest, nil), false); err != nil || out != "" {
		t.Errorf("nothing has changed: %q, %v", out, err)
	}
	if _, err := apply(t, user, worktest.Leave(t, guest, map[string]string{"w.txt": "ONE\r\n" + crlf}), false); err != nil {
		t.Errorf("the agent continues: %v", err)
	}
	if names := worktest.Git(t, user, "diff", "--name-only"); !slices.Contains(strings.Fields(names), "w.txt") {
		t.Errorf("git diff has %s", names)
	}
}
