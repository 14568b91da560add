package transfer

import (
	"bytes"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/work/worktest"
)

// pushTo sends a local file or directory to a directory as to a guest.
func pushTo(t testing.TB, home, from, to, force string, stdin io.Reader) (got Copied, code int, text string) {
	t.Helper()
	archive, p := archived(t, from, stdin)
	_, code, text = worktest.GuestFiles(home, bytes.NewReader(archive), p.pushArgs(Place{Path: to}, filepath.Base(from), force != "")...)
	return p.got, code, text
}

// archived returns the archive of a local file or directory.
func archived(t testing.TB, from string, stdin io.Reader) ([]byte, *packer) {
	t.Helper()
	p, err := openPacker(from, stdin)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = p.Close() }()
	var archive bytes.Buffer
	if err := p.pack(&archive); err != nil {
		t.Fatal(err)
	}
	return archive.Bytes(), p
}

// A directory comes back from a guest as it was sent.
func TestCopyToAndFrom(t *testing.T) {
	host, guest := t.TempDir(), t.TempDir()
	worktest.Fill(t, host, map[string]string{
		"src/a": "text", "src/empty": "", "src/dir./b": "b", "src/none/": "", "src/odd\nname": "odd", "src/-rf": "x", "src/ünï": "u", "src/link": "-> dir./b",
		"src/" + strings.Repeat("long", 50): "long", "src/.git/config": "no", "src/dir./.git": "no", "src/.hidden": "h",
	})
	if err := os.Chmod(filepath.Join(host, "src/a"), 0o4755); err != nil {
		t.Fatal(err)
	}
	if err := os.Link(filepath.Join(host, "src/.hidden"), filepath.Join(host, "src/hard")); err != nil {
		t.Fatal(err)
	}
	got, code, text := pushTo(t, guest, filepath.Join(host, "src"), "new", "", nil)
	if code != 0 || got.Files != 9 || got.Links != 1 || got.Directories != 3 || len(got.Skipped) != 2 {
		t.Fatalf("%d, %s, %+v", code, text, got)
	}
	archive, code, text := worktest.GuestFiles(guest, nil, "pull", "tree", "~/new")
	if code != 0 {
		t.Fatalf("%d: %s", code, text)
	}
	back := t.TempDir()
	if _, isDir, err := unpackTo(t, back, archive, 1<<20); err != nil || !isDir {
		t.Fatal(err)
	}
	for _, drop := range []string{"src/.git", "src/dir./.git"} {
		if err := os.RemoveAll(filepath.Join(host, drop)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chmod(filepath.Join(host, "src/a"), 0o755); err != nil {
		t.Fatal(err)
	}
	if have, want := listing(t, filepath.Join(back, "top")), listing(t, filepath.Join(host, "src")); !slices.Equal(have, want) {
		t.Errorf("has\n%q\nnot\n%q", have, want)
	}
	if left, err := filepath.Glob(filepath.Join(guest, ".*")); err != nil || len(left) > 0 {
		t.Errorf("the guest has %q, %v", left, err)
	}
}

// Destinations are found as cp does, relative to the home.
func TestPushDestinations(t *testing.T) {
	for name, tc := range map[string]struct {
		from, to, force string
		code            int
		want            string // the new file
	}{
		"new file":                  {"file", "x", "", 0, "x"},
		"into a directory":          {"file", "dir", "", 0, "dir/file"},
		"into a directory, slash":   {"file", "dir/", "", 0, "dir/file"},
		"home":                      {"file", ".", "", 0, "file"},
		"tilde":                     {"file", "~/x", "", 0, "x"},
		"tilde only":                {"file", "~", "", 0, "file"},
		"name like an option":       {"file", "-x", "", 0, "-x"},
		"missing directory":         {"file", "no/x", "", guestapi.FilesNoTarget, ""},
		"slash, but no directory":   {"file", "no/", "", guestapi.FilesNoTarget, ""},
		"existing file":             {"file", "taken", "", guestapi.FilesExists, ""},
		"existing file, forced":     {"file", "taken", "force", 0, "taken"},
		"existing link, forced":     {"file", "dangling", "force", 0, "dangling"},
		"existing link":             {"file", "dangling", "", guestapi.FilesExists, ""},
		"directory with the name":   {"dirname/file", "dir2", "force", guestapi.FilesIsDir, ""},
		"new directory":             {"tree", "new", "", 0, "new/x"},
		"new directory, slash":      {"tree", "new/", "", 0, "new/x"},
		"directory into another":    {"tree", "dir", "", 0, "dir/tree/x"},
		"content into another":      {"tree/.", "dir", "", 0, "dir/x"},
		"content over a file":       {"tree/.", "full", "", guestapi.FilesExists, ""},
		"content over it, forced":   {"tree/.", "full", "force", 0, "full/x"},
		"directory over a file":     {"tree", "taken", "force", guestapi.FilesNotADir, ""},
		"standard input":            {"-", "x", "", 0, "x"},
		"through a link to a place": {"file", "todir", "", 0, "dir/file"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			host, guest := t.TempDir(), t.TempDir()
			worktest.Fill(t, host, map[string]string{"file": "new", "dirname/file": "new", "tree/x": "new", "tree/sub/y": "y"})
			worktest.Fill(t, guest, map[string]string{"dir/": "", "taken": "old", "dangling": "-> nothing", "dir2/file/": "", "full/x": "old", "full/sub/z": "z", "todir": "-> dir"})
			before := listing(t, guest)
			from := tc.from
			if from != "-" {
				from = host + "/" + from
			}
			_, code, text := pushTo(t, guest, from, tc.to, tc.force, strings.NewReader("new"))
			if code != tc.code {
				t.Fatalf("exit code %d, not %d: %s", code, tc.code, text)
			}
			if tc.want == "" {
				if after := listing(t, guest); !slices.Equal(after, before) {
					t.Errorf("the guest has %q, not %q", after, before)
				}
				return
			}
			if st, err := os.Lstat(filepath.Join(guest, tc.want)); err != nil || !st.Mode().IsRegular() {
				t.Errorf("%v: %q", err, listing(t, guest))
			}
			if text, err := os.ReadFile(filepath.Join(guest, tc.want)); err != nil || string(text) != "new" {
				t.Errorf("%q, %v", text, err)
			}
			if left := strings.Join(listing(t, guest), "\n"); strings.Contains(left, ".agentlab") {
				t.Errorf("left %s", left)
			}
			if tc.force != "" && strings.HasPrefix(tc.to, "full") {
				if text, err := os.ReadFile(filepath.Join(guest, "full/sub/z")); err != nil || string(text) != "z" {
					t.Errorf("a file was lost: %v", err)
				}
			}
		})
	}
}

// A copy that is cut off anywhere changes nothing in the guest.
func TestCutPushChangesNothing(t *testing.T) {
	t.Parallel()
	host, guest := t.TempDir(), t.TempDir()
	worktest.Fill(t, host, map[string]string{"tree/a": "a", "tree/b": strings.Repeat("b", 600), "file": strings.Repeat("c", 700)})
	worktest.Fill(t, guest, map[string]string{"tree/a": "old", "file": "old"})
	before := listing(t, guest)
	for _, from := range []string{"tree", "file", "-"} {
		source := filepath.Join(host, from)
		if from == "-" {
			source = "-"
		}
		archive, p := archived(t, source, strings.NewReader(strings.Repeat("d", maxPart+5)))
		to := map[string]string{"tree": ".", "file": "file", "-": "file"}[from]
		complete := len(archive) - 1024 // the two blocks at the end may miss
		for n := 0; n < complete; n += max(512, len(archive)/20/512*512) {
			if _, code, _ := worktest.GuestFiles(guest, bytes.NewReader(archive[:n]), p.pushArgs(Place{Path: to}, from, true)...); code == 0 {
				t.Errorf("%s: %d of %d bytes were taken for all", from, n, len(archive))
			}
		}
		if after := listing(t, guest); !slices.Equal(after, before) {
			t.Fatalf("%s: the guest has %q, not %q", from, after, before)
		}
	}
}

// What cannot be read ends the archive before its last entry.
func TestPackFailsWithItsSource(t *testing.T) {
	p, err := openPacker("-", io.MultiReader(strings.NewReader(strings.Repeat("x", maxPart)), iotest.ErrReader(errors.New("lost"))))
	if err != nil {
		t.Fatal(err)
	}
	var archive bytes.Buffer
	if err := p.pack(&archive); err == nil || !strings.Contains(err.Error(), "lost") {
		t.Error(err)
	}
	guest := t.TempDir()
	if _, code, _ := worktest.GuestFiles(guest, &archive, "push", "file", "x"); code == 0 {
		t.Error("an incomplete file was taken for all")
	}
	short, err := openPacker(os.Args[0], nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = short.Close() }()
	short.size++
	if err := short.pack(io.Discard); agentlab.CodeOf(err) != agentlab.CodeConflict {
		t.Error(err)
	}
	if _, err := openPacker("/dev/null", nil); agentlab.CodeOf(err) != agentlab.CodeInvalid {
		t.Error(err)
	}
	if _, err := openPacker(filepath.Join(guest, "missing"), nil); agentlab.CodeOf(err) != agentlab.CodeNotFound {
		t.Error(err)
	}
}

// A link of the local tree is sent as a link: what it leads to is not read.
func TestPushDoesNotFollowLinks(t *testing.T) {
	host, guest := t.TempDir(), t.TempDir()
	worktest.Fill(t, host, map[string]string{"secret/key": "hidden", "tree/out": "-> ../secret", "tree/key": "-> " + filepath.Join(host, "secret/key"), "top": "-> tree"})
	archive, _ := archived(t, filepath.Join(host, "top"), nil)
	if bytes.Contains(archive, []byte("hidden")) {
		t.Error("a file outside of the directory was sent")
	}
	if got, code, text := pushTo(t, guest, filepath.Join(host, "top"), "x", "", nil); code != 0 || got.Links != 2 || got.Files != 0 {
		t.Errorf("%+v, %d, %s", got, code, text)
	}
}

func TestPullFromGuest(t *testing.T) {
	guest := t.TempDir()
	worktest.Fill(t, guest, map[string]string{"dir/x": "text", "dir/.git/config": "no", "link": "-> dir", "flink": "-> dir/x", "-rf": "text", "odd\n": "text", "dangling": "-> none"})
	if err := os.WriteFile(filepath.Join(guest, "empty"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("mkfifo", filepath.Join(guest, "pipe")).CombinedOutput(); err != nil {
		t.Fatalf("%s, %v", out, err)
	}
	for name, tc := range map[string]struct {
		path, kind string
		code       int
	}{
		"missing":     {"none", "tree", guestapi.FilesMissing},
		"no size":     {"/proc/cpuinfo", "tree", guestapi.FilesUnsized},
		"empty":       {"empty", "tree", 0},
		"dangling":    {"dangling", "tree", guestapi.FilesMissing},
		"pipe":        {"pipe", "tree", guestapi.FilesSpecial},
		"directory":   {"dir", "file", guestapi.FilesIsDir},
		"tree":        {"dir", "tree", 0},
		"linked":      {"link", "tree", 0},
		"linked file": {"flink", "file", 0},
		"option":      {"-rf", "file", 0},
		"odd name":    {"odd\n", "file", 0},
		"absolute":    {filepath.Join(guest, "dir/x"), "tree", 0},
	} {
		archive, code, text := worktest.GuestFiles(guest, nil, "pull", "--", tc.kind, tc.path)
		if code != tc.code {
			t.Errorf("%s: exit code %d, not %d: %s", name, code, tc.code, text)
			continue
		}
		if code != 0 {
			continue
		}
		if bytes.Contains(archive, []byte("config")) {
			t.Errorf("%s: sends .git", name)
		}
		dir := t.TempDir()
		if _, _, err := unpackTo(t, dir, archive, 1<<20); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestSplitCopy(t *testing.T) {
	for arg, want := range map[string]Place{
		"play:x": {"play", "x"}, "play:/a:b": {"play", "/a:b"}, "play:": {"play", ""}, "x": {"", "x"}, "./a:b": {"", "./a:b"}, "/a:b": {"", "/a:b"}, ":x": {"", ":x"}, "-": {"", "-"}, "1001:~": {"1001", "~"},
	} {
		if got := SplitCopy(arg); got != want || got.String() != arg {
			t.Errorf("%s: %+v", arg, got)
		}
	}
	for arg, want := range map[string]bool{"p:a": false, "p:a/.": true, "p:.": true, "p:/": true, "p:~": true, "p:~/": true, "p:~/a": false, "~": false, "a/..": true, "p:a/~": false} {
		if got := SplitCopy(arg).content(); got != want {
			t.Errorf("%s: %v", arg, got)
		}
	}
}

// What exists on this machine is replaced only with force, nothing is moved through a
// link, and a refused copy changes nothing.
func TestInstall(t *testing.T) {
	for name, tc := range map[string]struct {
		to    string
		force bool
		want  string // in the error
		files map[string]string
	}{
		"new":               {"new", false, "", map[string]string{"new/x": "new", "new/sub/y": "y"}},
		"merge":             {"other", false, "", map[string]string{"other/x": "new", "other/sub/y": "y", "other/z": "old"}},
		"into the parent":   {".", false, "", map[string]string{"x": "new", "sub/y": "y", "other/z": "old"}},
		"existing":          {"full", false, "full/sub/y exists", nil},
		"existing, forced":  {"full", true, "", map[string]string{"full/x": "new", "full/sub/y": "y", "full/sub/z": "old"}},
		"file":              {"file", true, "not a directory", nil},
		"link to directory": {"todir", true, "not a directory", nil},
		"link in the way":   {"linked", true, "linked/sub exists and is not a directory", nil},
		"directory for x":   {"turned", true, "turned/x is a directory", nil},
	} {
		dir := t.TempDir()
		worktest.Fill(t, dir, map[string]string{
			"stage/top/x": "new", "stage/top/sub/y": "y", "outside/sub/": "", "other/z": "old", "full/sub/y": "old", "full/sub/z": "old", "file": "old",
			"todir": "-> other", "linked/sub": "-> ../outside/sub", "turned/x/": "",
		})
		before := listing(t, dir)
		root, err := os.OpenRoot(dir)
		if err != nil {
			t.Fatal(err)
		}
		err = installer{root, tc.force}.install("stage/top", tc.to)
		_ = root.Close()
		if tc.want != "" {
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("%s: %v does not contain %q", name, err, tc.want)
			}
			if after := listing(t, dir); !slices.Equal(after, before) {
				t.Errorf("%s: has %q, not %q", name, after, before)
			}
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
		for file, want := range tc.files {
			if text, err := os.ReadFile(filepath.Join(dir, file)); err != nil || string(text) != want {
				t.Errorf("%s: %s has %q, %v", name, file, text, err)
			}
		}
	}
}

// A copy from a sandbox never becomes git's files, whatever the user types.
func TestPullRefusesGitNames(t *testing.T) {
	dir := t.TempDir()
	from := Place{"play", "/workspace/config"}
	if _, err := findTarget(from, filepath.Join(dir, ".git")); agentlab.CodeOf(err) != agentlab.CodeDenied {
		t.Error(err)
	}
	into, err := findTarget(from, dir)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := into.name(Place{"play", "/workspace/.git"}, true); agentlab.CodeOf(err) != agentlab.CodeDenied {
		t.Error(err)
	}
	if _, err := findTarget(from, filepath.Join(dir, "no/x")); agentlab.CodeOf(err) != agentlab.CodeNotFound {
		t.Error(err)
	}
	slash, err := findTarget(from, filepath.Join(dir, "x")+"/")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := slash.name(from, false); agentlab.CodeOf(err) != agentlab.CodeNotFound {
		t.Error(err)
	}
	if name, err := slash.name(from, true); name != "x" || err != nil {
		t.Error(name, err)
	}
}

// The error of a copy says why it failed.
func TestCopyFault(t *testing.T) {
	at := Place{"play", "/a b/c"}
	for text, want := range map[string]struct {
		code         int
		is           agentlab.Code
		message, tip string
	}{
		"agentlab-agent: open /x: permission denied":   {guestapi.FilesDenied, agentlab.CodeDenied, "sandbox: open /x: permission denied", "--user root"},
		"agentlab-agent: write x: no space left":       {guestapi.FilesNoSpace, agentlab.CodeNoSpace, "no space left", ""},
		"agentlab-agent: would be replaced:\n/a b/c/d": {guestapi.FilesExists, agentlab.CodeExists, "play:/a b/c/d exists", "--force"},
		"":                           {guestapi.FilesNoTarget, agentlab.CodeNotFound, "directory of play:/a b/c", "mkdir -p '/a b'"},
		" ":                          {99, agentlab.CodeUnavailable, "exit code 99", ""},
		"agentlab-agent: unknown ar": {2, agentlab.CodeUnsupported, "another version of AgentLab", "start"},
	} {
		err := copyFault(at, want.code, strings.TrimSpace(text))
		if agentlab.CodeOf(err) != want.is || !strings.Contains(err.Error(), want.message) || !strings.Contains(agentlab.HintOf(err), want.tip) {
			t.Errorf("%q: %v (%s), %s", text, err, agentlab.CodeOf(err), agentlab.HintOf(err))
		}
	}
}

// A conflict names the whole file, and copies have the times of their sources.
func TestPushNamesAndTimes(t *testing.T) {
	host, guest := t.TempDir(), t.TempDir()
	worktest.Fill(t, host, map[string]string{"tree/a\nb": "1", "tree/sub/x": "1"})
	old := time.Date(2020, 2, 3, 4, 5, 6, 0, time.UTC)
	if err := os.Chtimes(filepath.Join(host, "tree/sub/x"), old, old); err != nil {
		t.Fatal(err)
	}
	if _, code, text := pushTo(t, guest, filepath.Join(host, "tree"), "copy", "", nil); code != 0 {
		t.Fatal(code, text)
	}
	if st, err := os.Stat(filepath.Join(guest, "copy/sub/x")); err != nil || !st.ModTime().Equal(old) {
		t.Errorf("%v, %v", st, err)
	}
	if err := os.Remove(filepath.Join(host, "tree/sub/x")); err != nil {
		t.Fatal(err)
	}
	if _, code, text := pushTo(t, guest, host+"/tree/.", "copy", "", nil); code != guestapi.FilesExists || !strings.HasSuffix(text, "\n"+strconv.Quote(filepath.Join(guest, "copy/a\nb"))) {
		t.Errorf("%d, %q", code, text)
	}
}
