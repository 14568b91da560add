package cli

import (
	"encoding/json"
	"io"
	"net"
	"net/http"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/creack/pty"
	"golang.org/x/sys/unix"
	"golang.org/x/term"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/stream"
	"github.com/agentlab-vm/agentlab/internal/work/session"
	"github.com/agentlab-vm/agentlab/internal/work/worktest"
)

// The terminal is the first command of an attach in a running sandbox, because the user
// waits for it. If the VM has ended unnoticed, the session is resumed again.
func TestAttachIsOneCommand(t *testing.T) {
	t.Parallel()
	var commands []string
	resumed := 0
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/profiles/interactive", func(w http.ResponseWriter, _ *http.Request) { _ = json.NewEncoder(w).Encode(api.Profile{}) })
	mux.HandleFunc("POST /v1/sessions/s1/resume", func(w http.ResponseWriter, _ *http.Request) {
		resumed++
		_ = json.NewEncoder(w).Encode(api.Sandbox{VMID: 6 + resumed, State: string(agentlab.SandboxReady)})
	})
	mux.HandleFunc("POST /v1/sandboxes/7/exec", func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusServiceUnavailable)
	})
	mux.HandleFunc("POST /v1/sandboxes/8/exec", worktest.CommandHandler(t, func(command []string, _ []byte) ([]byte, string, int) {
		commands = append(commands, strings.Join(command, " "))
		return []byte("shown"), "", 0
	}))
	var out strings.Builder
	var notes strings.Builder
	a := &App{Stdin: strings.NewReader(""), Stdout: &out, Stderr: &notes, Now: time.Now}
	err := a.attachSession(t.Context(), worktest.HandlerClient(t, mux), api.Session{ID: "s1", Name: "app", Profile: "interactive"}, session.Link{}, startOptions{agent: shellOnly}, false)
	if err != nil || out.String() != "shown" || resumed != 2 {
		t.Errorf("%v, %q, resumed %d times", err, out.String(), resumed)
	}
	if !strings.HasSuffix(notes.String(), "session app keeps running\n  → agentlab stop app\n") {
		t.Errorf("said %q", notes.String())
	}
	if want := []string{"agentlab-agent open --session main --dir " + guestapi.RepoDir}; !slices.Equal(commands, want) {
		t.Errorf("ran %q", commands)
	}
}

// After a stop of the process, for example by 'kill -STOP' or the shell, 'fg' makes the
// terminal raw again, and programs in the guest draw again, because their size changes.
func TestTerminalAfterStop(t *testing.T) {
	ptmx, tty, err := pty.Open()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _, _ = ptmx.Close(), tty.Close() }()
	if err := pty.Setsize(tty, &pty.Winsize{Rows: 30, Cols: 90}); err != nil {
		t.Fatal(err)
	}
	fd := int(tty.Fd())
	cooked, err := term.GetState(fd)
	if err != nil {
		t.Fatal(err)
	}
	here, there := net.Pipe()
	defer func() { _ = there.Close() }()
	a := &App{Stdin: tty, Stdout: tty, Stderr: io.Discard}
	restore, err := a.attached().RawTerminal(stream.NewWriter(here))
	if err != nil {
		t.Fatal(err)
	}
	sizes := stream.NewReader(there)
	rows := func() uint16 {
		var size stream.WindowSize
		kind, p, err := sizes.Next()
		if err == nil {
			err = json.Unmarshal(p, &size)
		}
		if err != nil || kind != stream.Resize || size.Cols != 90 {
			t.Fatalf("%v %s: %v", kind, p, err)
		}
		return size.Rows
	}
	if got := rows(); got != 30 {
		t.Errorf("%d rows at the begin", got)
	}
	raw, err := term.GetState(fd)
	if err != nil || reflect.DeepEqual(raw, cooked) {
		t.Fatalf("the terminal is not raw: %v", err)
	}
	if err := term.Restore(fd, cooked); err != nil { // as a shell does it
		t.Fatal(err)
	}
	if err := unix.Kill(os.Getpid(), unix.SIGCONT); err != nil {
		t.Fatal(err)
	}
	if got := []uint16{rows(), rows()}; !slices.Equal(got, []uint16{29, 30}) {
		t.Errorf("sizes %d", got)
	}
	if now, err := term.GetState(fd); err != nil || !reflect.DeepEqual(now, raw) {
		t.Errorf("the terminal is not raw: %+v, %v", now, err)
	}
	restore()
	if now, err := term.GetState(fd); err != nil || !reflect.DeepEqual(now, cooked) {
		t.Errorf("the terminal is not as before: %+v, %v", now, err)
	}
}

// attach and the editors open a session, a sandbox, or the work tree of a branch in the
// session of the repository: the first of them that exists.
func TestChosenTarget(t *testing.T) {
	repo := worktest.Repo(t)
	l, err := session.FindLink(t.Context(), repo, "")
	if err == nil {
		err = l.Set(t.Context(), "s1", "")
	}
	if err != nil {
		t.Fatal(err)
	}
	mux := http.NewServeMux()
	for _, id := range []string{"s1", "other"} {
		mux.HandleFunc("GET /v1/sessions/"+id, func(w http.ResponseWriter, _ *http.Request) { _ = json.NewEncoder(w).Encode(api.Session{ID: id}) })
	}
	mux.HandleFunc("GET /v1/sandboxes/play", func(w http.ResponseWriter, _ *http.Request) { _ = json.NewEncoder(w).Encode(api.Sandbox{Name: "play"}) })
	mux.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) {
		refuse(w, agentlab.CodeNotFound, http.StatusNotFound)
	})
	c, a := worktest.HandlerClient(t, mux), &App{Stderr: io.Discard}
	for _, dir := range []string{repo, t.TempDir()} {
		t.Chdir(dir)
		for arg, want := range map[string]string{
			"": "s1//", "other": "other//", "other/fix-1": "other/fix-1/", "play": "//play", "fix-1": "s1/fix-1/", "fix/1": "s1/fix/1/",
		} {
			got, err := a.chosenTarget(t.Context(), c, arg)
			if dir != repo && strings.HasPrefix(want, "s1/") {
				if err == nil {
					t.Errorf("%q outside of the repository: %+v", arg, got)
				}
				continue
			}
			if text := got.session.ID + "/" + got.worktree + "/" + got.sandbox; err != nil || text != want {
				t.Errorf("%q: %s, want %s, %v", arg, text, want, err)
			}
		}
	}
}
