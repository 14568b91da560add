package e2e

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab/internal/bounded"
	"github.com/agentlab-vm/agentlab/test/sample"
)

// hostilePrograms replaces the programs that the host runs in a guest. They answer with the
// files of /evil, and without such a file they are the real ones.
const hostilePrograms = `set -e
mkdir -p /evil
chmod 777 /evil
cp -L /usr/local/bin/agentlab-agent /evil/real
rm -f /usr/local/bin/agentlab-agent
cat >/usr/local/bin/agentlab-agent <<'END'
#!/bin/bash
case $1 in open) name=open;; *) name=$2;; esac
[ ! -e /evil/$name ] || { [ -t 0 ] || cat >/dev/null; cat /evil/$name; exit 0; }
[ ! -e /evil/fails ] || { cat >/evil/input; cat /evil/fails >&2; exit 1; }
[ ! -e /evil/endless ] || exec cat /dev/zero
exec -a agentlab-agent /evil/real "$@"
END
chmod 755 /usr/local/bin/*`

// escapes are sequences that make a terminal act for the guest: read the clipboard, report
// the title as input, write files, print, take a title with a command.
const escapes = "\x1b]52;c;?\a\x1b]2;;touch owned;\a\x1b[21t\x1b[20t\x1bP+q544e\x1b\\\x1bP0;1|17/6c730a\x1b\\\x1b]1337;File=inline=0:QQ==\a" +
	"\x1b_Gt=f,a=T;L2V0Yy9wYXNzd2Q=\x1b\\\x1b]50;?\a\x1b]7;file:///etc\a\x1b]777;notify;a;b\a\x1b[5i\x05\x1b]0;a\nb\a\x1b]8;;file:///etc/passwd\alink\x1b]8;;\a\x9b21t"

// acting finds what of escapes no terminal may get.
var acting = regexp.MustCompile(`\x1b\]52;[^;]*;\?|\x1b\[2[01]t|\x1b[P_]|\x1b\](1337|50|7|777);|\x1b\[5i|\x05|\x1b\]0;a\n|\x1b\]8;;file`)

// hostile is a session whose guest is.
type hostile struct {
	*lab
	host, repo string // a directory of the user, and the repository in it
}

// answer replaces the answers of the guest.
func (h *hostile) answer(files map[string]string) {
	h.Helper()
	var archive bytes.Buffer
	w := tar.NewWriter(&archive)
	for name, text := range files {
		err := w.WriteHeader(&tar.Header{Name: name, Mode: 0o755, Size: int64(len(text))})
		if err == nil {
			_, err = io.WriteString(w, text)
		}
		if err != nil {
			h.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		h.Fatal(err)
	}
	r := h.runInput("", &archive, "exec", "-i", "--user", "root", h.sandboxOf("app"), "--", "bash", "-euc",
		`cd /evil; find . -maxdepth 1 -type f ! -name real -delete; /usr/bin/tar -xf -`)
	if r.code != 0 {
		h.Fatalf("%v", r)
	}
}

// seen describes everything of the user that a guest could change, but for what git
// writes in any case.
func (h *hostile) seen() string {
	h.Helper()
	var all strings.Builder
	err := filepath.WalkDir(h.host, func(name string, d fs.DirEntry, err error) error {
		rel, _ := filepath.Rel(h.repo, name)
		if err != nil || rel == ".git/objects" || rel == ".git/index" || rel == ".git/FETCH_HEAD" {
			if d != nil && d.IsDir() {
				return fs.SkipDir
			}
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		text := []byte{}
		switch {
		case d.Type() == fs.ModeSymlink:
			to, _ := os.Readlink(name)
			text = []byte(to)
		case d.Type().IsRegular():
			text, err = os.ReadFile(name)
		}
		fmt.Fprintf(&all, "%s %s %x\n", rel, info.Mode(), sha256.Sum256(text))
		return err
	})
	if err != nil {
		h.Fatal(err)
	}
	return all.String()
}

// archiveOf has a directory and entries.
func archiveOf(t testing.TB, entries ...tar.Header) string {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, e := range append([]tar.Header{{Name: "./", Typeflag: tar.TypeDir, Mode: 0o755}}, entries...) {
		if err := w.WriteHeader(&e); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

// attack is what a guest answers to a command, and what the error of the command has.
type attack struct {
	answer  map[string]string
	command []string
	want    string
}

// attacks are refused: the command fails, and nothing of the user has changed.
func attacks(t testing.TB) map[string]attack {
	const id, tree = "abababababababababababababababababababab", ".worktrees/x"
	state := func(branch, commit, dir string) map[string]string {
		text, _ := json.Marshal(map[string]any{"branches": map[string]string{branch: commit}, "worktrees": []any{
			map[string]string{"dir": "", "branch": "main"}, map[string]string{"dir": dir, "branch": "main"},
		}})
		return map[string]string{"state": string(text)}
	}
	pack := func(text string) map[string]string {
		files := state("main", id, tree)
		files["pack"] = text
		return files
	}
	archive := func(entries ...tar.Header) map[string]string {
		return map[string]string{"pull": archiveOf(t, entries...)}
	}
	sync, fetch, cp := []string{"sync"}, []string{"git", "fetch", "agentlab"}, []string{"cp", "SANDBOX:/srv", "../in"}
	artifacts := []string{"sync", "--artifacts", "**", "--force"}
	return map[string]attack{
		"sync: a branch above its refs":           {state("../../heads/main", id, tree), sync, "invalid data"},
		"sync: a branch with a command for git":   {state("a\ndelete refs/heads/main", id, tree), sync, "invalid data"},
		"sync: a branch that is an option":        {state("--upload-pack=touch owned", id, tree), sync, "invalid data"},
		"sync: a commit that is an option":        {state("a", "--all", tree), sync, "invalid data"},
		"sync: a commit that does not exist":      {pack(""), sync, "the refs of the session cannot be set"},
		"sync: a work tree elsewhere":             {state("a", id, ".worktrees/../../x"), sync, "invalid data"},
		"sync: no bundle":                         {pack("garbage"), sync, "git rejects"},
		"sync: a bundle without its objects":      {pack("# v2 git bundle\n" + id + " refs/heads/main\n\n"), sync, "git rejects"},
		"sync: an endless answer":                 {map[string]string{"endless": ""}, sync, "too large"},
		"sync: an error with escape sequences":    {map[string]string{"fails": escapes}, sync, "touch owned"},
		"git fetch: a branch above its refs":      {state("../../heads/main", id, tree), fetch, "invalid data"},
		"git fetch: another line of the protocol": {state("a\n@refs/heads/a HEAD", id, tree), fetch, "invalid data"},
		"git fetch: no bundle":                    {pack("garbage"), fetch, "git rejects"},
		"worktree list: escape sequences":         {state("\x1b]2;x\a", id, tree), []string{"worktree", "list"}, "invalid data"},
		"rm: a state that hides work":             {map[string]string{"state": `{"branches":{"a":"` + id + `"},"worktrees":[]}`}, []string{"rm", "--yes"}, "cannot find out"},
		"cp: a name above the directory":          {archive(tar.Header{Name: "../owned", Mode: 0o644}), cp, "leaves the directory"},
		"cp: an absolute name":                    {archive(tar.Header{Name: "/tmp/owned", Mode: 0o644}), cp, "leaves the directory"},
		"cp: a hard link to a file of the host":   {archive(tar.Header{Name: "./l", Typeflag: tar.TypeLink, Linkname: "/etc/passwd"}), cp, "hard link"},
		"cp: a file through a link":               {archive(tar.Header{Name: "./l", Typeflag: tar.TypeSymlink, Linkname: "."}, tar.Header{Name: "./l/owned"}), cp, "twice"},
		"cp: not an archive":                      {map[string]string{"pull": strings.Repeat("text", 1000)}, cp, "damaged"},
		"cp: an error with escape sequences":      {map[string]string{"fails": escapes}, cp, "file:///etc/passwd"},
		"artifacts: a name above the work tree":   {map[string]string{"list": "../owned\x00"}, artifacts, "invalid data"},
		"artifacts: an absolute name":             {map[string]string{"list": "/tmp/owned\x00"}, artifacts, "invalid data"},
		"artifacts: a hook of git":                {map[string]string{"list": ".git/hooks/post-merge\x00"}, artifacts, "belongs to git"},
		"artifacts: a file that git tracks":       {map[string]string{"list": "greeting.txt\x00"}, artifacts, "git tracks it"},
		"artifacts: another file than requested":  {map[string]string{"list": "a\x00", "pull": archiveOf(t, tar.Header{Name: "./owned", Mode: 0o755})}, artifacts, "not requested"},
		"artifacts: a link instead of a file":     {map[string]string{"list": "a\x00", "pull": archiveOf(t, tar.Header{Name: "./a", Typeflag: tar.TypeSymlink, Linkname: "../outside"})}, artifacts, "can be copied"},
		"sync-env: an error with escapes":         {map[string]string{"fails": escapes}, []string{"sync-env", "SANDBOX"}, "file:///etc/passwd"},
	}
}

// A hostile guest, whose root has replaced the programs that the host runs in it, changes
// nothing of the user by the ways out of its VM: sync, cp, artifacts, environment files,
// ports and terminals. Each row of attacks is one test, and a run that is not full selects
// some of them; internal/cli, internal/devproxy,
// internal/termfilter and internal/control have larger tables for their parts.
func TestHostileGuest(t *testing.T) {
	t.Parallel()
	l, repo := newWorkLab(t)
	h := &hostile{l, filepath.Dir(repo), repo}
	if err := os.WriteFile(filepath.Join(h.host, "outside"), []byte("of the user\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("agentlab", filepath.Join(l.bin, "git-remote-agentlab")); err != nil && !errors.Is(err, fs.ErrExist) {
		t.Fatal(err)
	}
	l.in(repo, "sync")
	l.ok("exec", "--user", "root", l.sandboxOf("app"), "--", "bash", "-c", hostilePrograms)
	all := attacks(t)
	for _, name := range sample.Of(t, 10, slices.Sorted(maps.Keys(all))) {
		h.run(t, name, func(h *hostile) { h.refused(all[name]) })
	}
	h.run(t, "sync: a tree with .git", (*hostile).gitInTree)
	h.run(t, "apply: a file through a link of the user", (*hostile).applyThroughLink)
	h.run(t, "sync-env: the guest gets nothing else", (*hostile).onlyEnvFiles)
	h.run(t, "port: escape sequences in names, a flood, a reset", (*hostile).ports)
	h.run(t, "terminal: title, clipboard and other sequences", (*hostile).terminals)
}

// run is a subtest, after which nothing of the user has changed.
func (h *hostile) run(t *testing.T, name string, check func(*hostile)) {
	t.Run(name, func(t *testing.T) {
		l := *h.lab
		l.TB = t
		sub := &hostile{&l, h.host, h.repo}
		before := sub.seen()
		check(sub)
		if after := sub.seen(); after != before {
			t.Errorf("files of the user have changed:\n%s\nbefore:\n%s", after, before)
		}
	})
}

// refused expects that a command fails because of what the guest answers.
func (h *hostile) refused(a attack) {
	h.answer(a.answer)
	args := strings.Split(strings.ReplaceAll(strings.Join(a.command, "\x00"), "SANDBOX", h.sandboxOf("app")), "\x00")
	var r result
	if args[0] == "git" {
		cmd := exec.Command("git", args[1:]...)
		cmd.Dir, cmd.Env = h.repo, h.env
		out, err := cmd.CombinedOutput()
		r.stderr = string(out)
		if err != nil {
			r.code = 1
		}
	} else {
		r = h.lab.run(h.repo, args...)
	}
	if r.code == 0 || !strings.Contains(r.stderr, a.want) {
		h.Errorf("no %q: %v", a.want, r)
	}
	if strings.ContainsAny(r.stdout+r.stderr, "\x1b\a\x05\u009b") {
		h.Errorf("the output has control characters: %q", r)
	}
}

// gitInTree has a commit whose tree has a directory .git with a hook.
func (h *hostile) gitInTree() {
	h.answer(nil)
	h.guest("app", `blob=$(printf '#!/bin/sh\ntouch /tmp/owned\n' | git hash-object -w --stdin)
hooks=$(printf '100755 blob %s\tpost-merge\n' $blob | git mktree)
dir=$(printf '040000 tree %s\thooks\n' $hooks | git mktree)
tree=$(printf '040000 tree %s\t.git\n' $dir | git mktree)
git branch -f evil $(git commit-tree -p HEAD -m Evil $tree)`)
	if r := h.lab.run(h.repo, "sync"); r.code == 0 || !strings.Contains(r.stderr, "git rejects") {
		h.Errorf("%v", r)
	}
	h.guest("app", "git branch -D evil")
}

// applyThroughLink has a change to a file below a name that is a link on the host.
func (h *hostile) applyThroughLink() {
	h.answer(nil)
	if err := os.Symlink("..", filepath.Join(h.repo, "up")); err != nil {
		h.Fatal(err)
	}
	before := h.seen()
	h.guest("app", "mkdir up; echo owned >up/outside; ln -s ../outside link")
	r := h.lab.run(h.repo, "apply", "--force")
	h.guest("app", "rm -r up link")
	if after := h.seen(); r.code == 0 || after != before {
		h.Errorf("%v\n%s\nbefore:\n%s", r, after, before)
	}
	if err := os.Remove(filepath.Join(h.repo, "up")); err != nil {
		h.Fatal(err)
	}
}

// onlyEnvFiles records what arrives in the guest.
func (h *hostile) onlyEnvFiles() {
	h.answer(map[string]string{"fails": "no"})
	sandbox := h.sandboxOf("app")
	if r := h.lab.run(h.repo, "sync-env", sandbox); r.code == 0 {
		h.Errorf("%v", r)
	}
	if got := h.ok("exec", sandbox, "--", "/usr/bin/tar", "-tf", "/evil/input"); got != "new/.env\nend\n" {
		h.Errorf("the guest got %q", got)
	}
}

// badServer listens on a port as a process with a hostile name, in a hostile directory. A
// connection gets a flood, and is reset when the host has sent a line.
const badServer = `import os, socket, struct, sys
d = "/work/repo/.worktrees/\x1b]2;x\a"
os.makedirs(d, exist_ok=True)
os.chdir(d)
open("/proc/self/comm", "w").write("\x1b]52;c;?\a")
s = socket.create_server(("127.0.0.1", int(sys.argv[1])))
while True:
    c, _ = s.accept()
    c.recv(100)
    c.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    try:
        c.settimeout(1)
        c.sendall(b"\x1b]52;c;?\a" * 1000000)
    except OSError:
        pass
    c.close()
`

// ports lists and forwards the port of badServer.
func (h *hostile) ports() {
	h.answer(nil)
	sandbox := h.sandboxOf("app")
	h.ok("exec", sandbox, "--", "sh", "-c", `printf %s "$1" >/tmp/bad.py; setsid -f python3 /tmp/bad.py 33791 >/dev/null 2>&1 </dev/null`, "sh", badServer)
	p := h.served(33791)
	if text := h.ok("port", "list") + p.URL + p.Program; strings.ContainsAny(text, "\x1b\a") {
		h.Errorf("%q", text)
	}
	cmd := exec.Command(filepath.Join(h.bin, "agentlab"), "--json", "port", "forward", sandbox, "0:33791")
	errOut := bounded.Tail{Max: 4 << 10}
	cmd.Env, cmd.Stderr = h.env, &errOut
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		h.Fatal(err)
	}
	defer func() {
		_ = cmd.Process.Signal(syscall.SIGINT)
		_ = cmd.Wait()
		if strings.ContainsAny(errOut.String(), "\x1b\a") {
			h.Errorf("%q", errOut.String())
		}
	}()
	var got struct{ Forwarded []struct{ Address string } }
	if err := json.NewDecoder(out).Decode(&got); err != nil || len(got.Forwarded) != 1 {
		h.Fatalf("%+v, %v", got, err)
	}
	at := got.Forwarded[0].Address
	if host, _, err := net.SplitHostPort(at); err != nil || host != "127.0.0.1" {
		h.Errorf("it listens on %s", at)
	}
	for range 3 { // each connection ends, and the next one is possible
		c, err := net.Dial("tcp", at)
		if err != nil {
			h.Fatal(err)
		}
		_ = c.SetDeadline(time.Now().Add(settleLimit))
		fmt.Fprintln(c, "hello")
		n, err := io.Copy(io.Discard, c)
		if timeout := net.Error(nil); n == 0 || errors.As(err, &timeout) && timeout.Timeout() {
			h.Errorf("%d bytes, %v", n, err)
		}
		_ = c.Close()
	}
}

// terminals shows escapes on the user's terminal in each way that there is.
func (h *hostile) terminals() {
	const end = "=END="
	h.answer(map[string]string{"open": escapes + "text" + end})
	sandbox := h.sandboxOf("app")
	for name, args := range map[string][]string{
		"attach":       {"attach"},
		"start":        {"start", "--agent", "none"},
		"exec -t":      {"exec", "-t", sandbox, "--", "cat", "/evil/open"},
		"exec":         {"exec", sandbox, "--", "cat", "/evil/open"},
		"its stderr":   {"exec", sandbox, "--", "sh", "-c", "cat /evil/open >&2"},
		"without tmux": {"attach", sandbox},
	} {
		o := h.terminalTo(h.repo, args...)
		if name == "without tmux" {
			o.keys("cat /evil/open\r")
		}
		got := o.until("text" + end)
		if bad := acting.FindString(got); bad != "" || strings.Contains(got, "\x9b") {
			h.Errorf("%s: the terminal got %q in %q", name, bad, got)
		}
		o.drain()
		if name == "without tmux" {
			o.detach()
			continue
		}
		<-o.done
		_ = o.cmd.Wait()
	}
	h.answer(nil)
	h.guest("app", `printf 'x\033]52;c;?\a\033[21ttext`+end+`\n' >"$(printf 'a\033]2;x\a')"`)
	for _, args := range [][]string{{"diff"}, {"diff", "--stat"}, {"sync"}} {
		o := h.terminalTo(h.repo, args...)
		o.drain()
		<-o.done
		_ = o.cmd.Wait()
		got := o.out.String()
		if bad := acting.FindString(got); bad != "" || got == "" || strings.Contains(got, "\x1b]") {
			h.Errorf("%v: the terminal got %q in %q", args, bad, got)
		}
	}
	h.guest("app", "git clean -fdq")
}
