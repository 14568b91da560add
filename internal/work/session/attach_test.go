package session

import (
	"encoding/json"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/work/attach"
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
	a := worktest.UI{Out: &notes}
	err := Attach(t.Context(), a, worktest.HandlerClient(t, mux), attach.Terminal{In: strings.NewReader(""), Out: &out, Err: &notes, UI: a, Now: time.Now}, api.Session{ID: "s1", Name: "app", Profile: "interactive"}, Link{}, StartOptions{Agent: ShellOnly})
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

// attach and the editors open a session, a sandbox, or the work tree of a branch in the
// session of the repository: the first of them that exists.
func TestChosenTarget(t *testing.T) {
	repo := worktest.Repo(t)
	l, err := FindLink(t.Context(), repo, "")
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
		worktest.Refuse(w, agentlab.CodeNotFound, http.StatusNotFound)
	})
	c, a := worktest.HandlerClient(t, mux), worktest.UI{Out: io.Discard}
	for _, dir := range []string{repo, t.TempDir()} {
		t.Chdir(dir)
		for arg, want := range map[string]string{
			"": "s1//", "other": "other//", "other/fix-1": "other/fix-1/", "play": "//play", "fix-1": "s1/fix-1/", "fix/1": "s1/fix/1/",
		} {
			got, err := ChooseTarget(t.Context(), a, c, arg)
			if dir != repo && strings.HasPrefix(want, "s1/") {
				if err == nil {
					t.Errorf("%q outside of the repository: %+v", arg, got)
				}
				continue
			}
			if text := got.Session.ID + "/" + got.Worktree + "/" + got.Sandbox; err != nil || text != want {
				t.Errorf("%q: %s, want %s, %v", arg, text, want, err)
			}
		}
	}
}
