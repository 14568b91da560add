package e2e

import (
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/creack/pty"

	"github.com/agentlab-vm/agentlab/test/cast"
	"github.com/agentlab-vm/agentlab/test/fakellm"
)

// envRecord is the file for the recording of TestWorkflow; 'make record' sets it.
const envRecord = "AGENTLAB_TEST_RECORD"

// typist is a user with a shell on a terminal that is recorded.
type typist struct {
	*lab
	tty *os.File
	rec *cast.Recorder
}

const userPrompt = "~/app$"

// newTypist starts a shell in the directory app of a home directory.
func newTypist(l *lab, home string) *typist {
	l.Helper()
	const rows, cols = 30, 100
	cmd := exec.Command("bash", "--norc", "--noprofile", "-i")
	cmd.Dir = filepath.Join(home, "app")
	cmd.Env = append(l.env, "HOME="+home, `PS1=\[\e[1;32m\]\w$\[\e[m\] `, "HISTFILE=", "PAGER=cat", "GIT_PAGER=cat", "TERM=xterm-256color", "COLORTERM=truecolor")
	tty, err := pty.StartWithSize(cmd, &pty.Winsize{Rows: rows, Cols: cols})
	if err != nil {
		l.Fatal(err)
	}
	u := &typist{l, tty, cast.NewRecorder(cols, rows, "agentlab claude, sync and stop in a repository", time.Now)}
	read := make(chan struct{})
	l.Cleanup(func() {
		_ = tty.Close()
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		<-read
		u.rec.Close()
	})
	go func() {
		defer close(read)
		_, _ = io.Copy(u.rec, tty) // ends with an error when the other side closes
	}()
	u.sees(userPrompt)
	return u
}

// sees waits until the terminal shows a text, and fails if it shows a question.
func (u *typist) sees(want string) {
	u.Helper()
	u.until(want, func(text string) bool { return strings.Contains(text, want) })
}

// prompted waits until the shell waits for a command after a text.
func (u *typist) prompted(after string) {
	u.Helper()
	u.until(after+" and a prompt", func(text string) bool {
		return strings.Contains(text, after) && strings.HasSuffix(text, "\n"+userPrompt)
	})
}

func (u *typist) until(what string, ok func(text string) bool) {
	u.Helper()
	var text string
	if !eventually(commandLimit, func() bool {
		text = u.rec.Text()
		return ok(text) || hasDialog(text) != ""
	}) || hasDialog(text) != "" {
		u.Fatalf("no %q on the terminal (question: %q):\n%s", what, hasDialog(text), text)
	}
}

// types types a line like a person: each key after the terminal has shown the last one.
func (u *typist) types(line string) {
	u.Helper()
	u.rec.Typing(line)
	for i := range line {
		before := u.rec.Text()
		if _, err := u.tty.WriteString(line[i : i+1]); err != nil {
			u.Fatal(err)
		}
		if line[i] == ' ' { // it may not be visible
			continue
		}
		u.until(line[:i+1], func(text string) bool { return text != before })
	}
	u.sees(line)
}

// press presses one key. What follows takes at most a time in the recording.
func (u *typist) press(key string, limit time.Duration) {
	u.Helper()
	u.rec.Step(limit)
	if _, err := u.tty.WriteString(key); err != nil {
		u.Fatal(err)
	}
}

// The workflow of the README, as a person does it on a terminal: start the real agent,
// give it a task, detach, fetch its commit, stop the VM.
func TestWorkflow(t *testing.T) {
	t.Parallel()
	l, n := newNetLab(t)
	n.HandleHTTP("llm.example.com", 80, fakellm.New(agentScript...))
	l.secret("env.ANTHROPIC_BASE_URL", "http://llm.example.com")
	l.secret("env.ANTHROPIC_API_KEY", "sk-ant-test-0123456789-0123456789-0123456789")
	l.workProfile("interactive", "agents")
	home := t.TempDir()
	repo := filepath.Join(home, "app")
	if err := os.Rename(sampleRepo(t), repo); err != nil {
		t.Fatal(err)
	}
	u := newTypist(l, home)
	u.types("agentlab claude")
	u.press("\r", 4*time.Second)
	u.sees("bypass permissions on")
	u.types("Fix the greeting so that its test passes, and commit.")
	u.press("\r", 8*time.Second)
	u.sees("I mended the greeting and committed it.")
	u.press("\x1d", time.Second) // Ctrl-]
	u.prompted("session app keeps running")
	u.types("agentlab sync")
	u.press("\r", 2*time.Second)
	u.prompted("main")
	u.types("git log --oneline")
	u.press("\r", time.Second)
	u.prompted("A greeting with a slip")
	u.types("agentlab stop")
	u.press("\r", 2*time.Second)
	u.prompted("is STOPPED")
	if got := git(t, repo, "show", "HEAD:greeting.txt"); got != "hello" {
		t.Errorf("after sync the file is %q", got)
	}
	if file := os.Getenv(envRecord); file != "" && !t.Failed() {
		u.save(file)
	}
	l.in(repo, "rm", "--yes", "--force")
}

// save writes the recording.
func (u *typist) save(file string) {
	u.Helper()
	f, err := os.Create(file)
	if err != nil {
		u.Fatal(err)
	}
	_, err = u.rec.Cast().WriteTo(f)
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		u.Fatal(err)
	}
}
