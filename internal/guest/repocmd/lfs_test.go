package repocmd

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/test/fakelfs"
)

func lfsObject(content string) (guestapi.LFSObject, string) {
	p, text := fakelfs.Pointer(content)
	return guestapi.LFSObject(p), text
}

// sendLFS offers objects, and sends some contents.
func (l lab) sendLFS(list []guestapi.LFSObject, contents ...string) (got guestapi.RepoLFSReceived) {
	l.Helper()
	line, err := json.Marshal(guestapi.RepoLFS{Objects: list})
	if err != nil {
		l.Fatal(err)
	}
	line = append(line, '\n')
	for _, content := range contents {
		o, _ := lfsObject(content)
		line = fmt.Appendf(line, "%s %d\n%s", o.OID, o.Size, content)
	}
	if err := json.Unmarshal([]byte(l.ok(line, "lfs", "receive")), &got); err != nil {
		l.Fatal(err)
	}
	return got
}

func (l lab) wantFiles(files map[string]string) {
	l.Helper()
	for name, want := range files {
		if got, _ := os.ReadFile(filepath.Join(l.dir, name)); string(got) != want {
			l.Errorf("%s is %q, want %q", name, got, want)
		}
	}
}

// Files of Git LFS are pointers until their objects come, and real files after that if
// git-lfs is there: for the host, and for the git of the agent.
func TestLFSFiles(t *testing.T) {
	l := newLab(t)
	one, oneText := lfsObject("one")
	gone, goneText := lfsObject("gone")
	write(t, filepath.Join(l.host, ".gitattributes"), "*.bin filter=lfs diff=lfs merge=lfs -text\n")
	write(t, filepath.Join(l.host, "sub/a.bin"), oneText)
	write(t, filepath.Join(l.host, "gone.bin"), goneText)
	git(t, l.host, "add", "-A")
	first := commit(t, l.host, "x", "1")
	l.ok(guestapi.RepoInit{Branch: "main"}, "init")
	up := func(commit string) {
		t.Helper()
		if got := l.send(guestapi.RepoReceive{Updates: []guestapi.RepoUpdate{{Branch: "main", Commit: commit}}}, "main"); len(got.Errors) > 0 {
			t.Fatal(got)
		}
	}
	up(first)
	all := []guestapi.LFSObject{one, gone}
	if got := l.sendLFS(all); len(got.Missing) != 2 || got.Installed {
		t.Errorf("%+v", got)
	}
	l.sendLFS(all, "one")
	l.wantFiles(map[string]string{"sub/a.bin": oneText, "gone.bin": goneText})

	fakelfs.Install(t)
	git(t, l.dir, "config", "filter.lfs.clean", lfsClean) // without a process, which the fake does not have
	*l.env = nil
	if got := l.sendLFS(all); len(got.Missing) != 1 || got.Missing[0] != gone.OID || !got.Installed {
		t.Errorf("%+v", got)
	}
	l.wantFiles(map[string]string{"sub/a.bin": "one", "gone.bin": goneText})
	l.agentChangesLFS(first)

	// A newer commit takes the place of the real file, and the objects follow.
	two, twoText := lfsObject("two")
	write(t, filepath.Join(l.host, "sub/a.bin"), twoText)
	git(t, l.host, "add", "-A")
	git(t, l.dir, "reset", "-q", "--hard", first)
	l.sendLFS(all)
	later := time.Now().Add(time.Minute)
	if err := os.Chtimes(filepath.Join(l.dir, "sub/a.bin"), later, later); err != nil { // git reads it again
		t.Fatal(err)
	}
	up(commit(t, l.host, "x", "2"))
	l.wantFiles(map[string]string{"sub/a.bin": twoText})
	l.sendLFS([]guestapi.LFSObject{two}, "two")
	l.wantFiles(map[string]string{"sub/a.bin": "two"})

	for _, bad := range []string{`{"objects":[{"oid":"../x","size":3}]}` + "\n", "{", "[]\n"} {
		if _, err := l.call([]byte(bad), "lfs", "receive"); err == nil {
			t.Errorf("%q was accepted", bad)
		}
	}
}

// agentChangesLFS checks what comes back of files that the agent changes.
func (l lab) agentChangesLFS(first string) {
	l.Helper()
	if got := git(l.T, l.dir, "status", "--porcelain"); got != "" || l.stateNow().Worktrees[0].Uncommitted != 0 {
		l.Errorf("real files count as changed: %q", got)
	}
	three, threeText := lfsObject("three")
	write(l.T, filepath.Join(l.dir, "sub/a.bin"), "three")
	if n := l.stateNow().Worktrees[0].Uncommitted; n != 1 {
		l.Errorf("%d files have changed", n)
	}
	packed := filepath.Join(l.TempDir(), "packed")
	write(l.T, packed, l.ok(guestapi.RepoPack{Branches: []string{"main"}, Have: []string{first}, Changes: true}, "pack"))
	git(l.T, l.host, "fetch", "-q", packed, guestapi.RefChanges+":refs/got")
	if got := git(l.T, l.host, "show", "refs/got:sub/a.bin"); got+"\n" != threeText {
		l.Errorf("the change is %q", got)
	}
	missing, _ := lfsObject("missing")
	if out := l.ok(guestapi.RepoLFS{Objects: []guestapi.LFSObject{missing, three}}, "lfs", "pack"); out != three.OID+" 5\nthree" {
		l.Errorf("the objects are %q", out)
	}
	git(l.T, l.dir, "commit", "-qam", "of the agent")
	if got := git(l.T, l.dir, "show", "HEAD:sub/a.bin"); !strings.Contains(got, three.OID) {
		l.Errorf("the agent has committed %q", got)
	}
}
