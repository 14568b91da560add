package e2e

import (
	"encoding/base64"
	"strings"
	"testing"
)

// Terminals of a session: criteria of seed 004, in one VM.
func TestSessionTerminals(t *testing.T) {
	t.Parallel()
	l, repo := newWorkLab(t)
	for _, c := range []struct {
		name  string
		check func(l *lab, repo string)
	}{
		{"US 2.1, FR-009, FR-024: attach, detach and attach", (*lab).checkAttach},
		{"US 2.2, US 2.3: each work tree has its own terminal", (*lab).checkTerminalOfWorktree},
		{"US 1.2, FR-022: commits come while attached", (*lab).checkAutomaticSync},
		{"edge case: the VM crashes", (*lab).checkCrash},
	} {
		if !t.Run(c.name, func(t *testing.T) {
			sub := *l
			sub.TB = t
			c.check(&sub, repo)
		}) {
			return
		}
	}
}

// checkAttach leaves a terminal and comes back to it. Its shell has the variables of the
// environment file, and can copy to the clipboard.
func (l *lab) checkAttach(repo string) {
	o := l.terminalTo(repo, "attach")
	o.until("agent@")
	o.keys("HERE=one; echo file-$FROM_FILE-$((40+2))\r")
	o.until("file-" + sentValue + "-42")
	o.keys(`printf '\033]52;c;%s\a' "$(printf copied | base64)"` + "\r")
	if got := o.until(base64.StdEncoding.EncodeToString([]byte("copied"))); !strings.Contains(got, "\x1b]52;") {
		l.Errorf("not copied: %q", got)
	}
	o.drain()
	o.detach()
	o = l.terminalTo("/", "attach", "app")
	o.until("file-" + sentValue + "-42") // what it showed
	o.keys("echo still-$HERE-$((1+1))\r")
	o.until("still-one-2")
	o.drain()
	o.detach()
}

func (l *lab) checkTerminalOfWorktree(repo string) {
	if r := l.run("/", "attach", "app/fix"); r.code != 2 || !strings.Contains(r.stderr, "requires a terminal") {
		l.Errorf("without a terminal: %v", r)
	}
	l.in(repo, "worktree", "add", "fix")
	o := l.terminalTo("/", "attach", "app/fix")
	o.until("agent@")
	o.keys("echo at-$PWD-$HERE-$((40+2)); HERE=two\r")
	o.until("at-/work/repo/.worktrees/fix--42") // not the one of the other terminal
	o.drain()
	o.detach()
	o = l.terminalTo(repo, "attach")
	o.until("agent@")
	o.keys("echo again-$HERE-$((40+2))\r")
	o.until("again-one-42")
	o.drain()
	o.detach()
	if got := l.guest("app", "cd .worktrees/fix; git rev-parse --abbrev-ref HEAD"); got != "fix" {
		l.Errorf("the work tree has branch %q", got)
	}
}

// checkAutomaticSync commits while a terminal is attached.
func (l *lab) checkAutomaticSync(repo string) {
	for _, mode := range []string{"on-commit", "on-idle"} {
		o := l.terminalTo(repo, "start", "--agent", "none", "--sync", mode)
		o.until("agent@")
		o.drain()
		subject := "While attached, " + mode
		l.guest("app", "echo "+mode+" >greeting.txt; git commit -qam '"+subject+"'")
		if !eventually(settleLimit, func() bool { return git(l, repo, "log", "-1", "--format=%s") == subject }) {
			l.Errorf("the branch has %q", git(l, repo, "log", "-1", "--format=%s"))
		}
		o.detach()
	}
	if r := l.run(repo, "start", "--detach", "--sync", "always"); r.code != 2 || !strings.Contains(r.stderr, "manual, on-commit, on-idle") {
		l.Errorf("an unknown mode: %v", r)
	}
}

// checkCrash ends the VM. Its files are kept, and the next attach starts it again with a
// new terminal.
func (l *lab) checkCrash(repo string) {
	l.guest("app", "echo unfinished >work.txt; sync")
	s, err := l.client().Session(l.Context(), "app")
	if err == nil {
		err = l.killQEMU(s.SandboxVMID)
	}
	if err != nil {
		l.Fatal(err)
	}
	o := l.terminalTo(repo, "attach")
	o.until("agent@")
	o.keys("cat work.txt; git log -1 --format=%s; echo end-$HERE-$((40+2))\r")
	got := o.until("end--42")
	if !strings.Contains(got, "unfinished") || !strings.Contains(got, "While attached") {
		l.Errorf("after the crash: %q", got)
	}
	o.drain()
	o.detach()
}
