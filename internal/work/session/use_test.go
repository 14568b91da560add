package session

import (
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/guestrun"
	"github.com/agentlab-vm/agentlab/internal/work/worktest"
)

// The error for the name of a branch names the flag, and no field of a request.
func TestBranchNamesAreChecked(t *testing.T) {
	for flag, want := range map[string]string{"": `"a..b" is`, "worktree": `--worktree: "a..b" is`} {
		if err := checkBranch("a..b", flag); !isUsage(err) || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%q: %v", flag, err)
		}
	}
	if err := errors.Join(checkBranch("", "worktree"), checkBranch("fix/12", "worktree")); err != nil {
		t.Error(err)
	}
}

// isUsage reports whether the command line exits with 2 after an error.
func isUsage(err error) bool {
	_, is := errors.AsType[work.UsageError](err)
	return is
}

// A branch of the session that is renamed to one below its old name does not block a
// sync, and its commits stay here.
func TestRenamedBranchGivesWay(t *testing.T) {
	t.Parallel()
	w := newSessionWorld(t)
	worktest.Git(t, w.guest, "checkout", "-q", "-b", "topic")
	first := w.commit(map[string]string{"new": "1"})
	w.opened()
	for _, names := range [][2]string{{"topic", "topic/more"}, {"topic/more", "topic"}} {
		worktest.Git(t, w.guest, "branch", "-q", "-m", names[0], "passing")
		worktest.Git(t, w.guest, "branch", "-q", "-m", "passing", names[1])
		head := w.commit(map[string]string{"new": names[1]})
		w.opened()
		refs := w.refs()
		if !strings.Contains(refs, head+" commit\trefs/remotes/agentlab/"+names[1]+"\n") && !strings.HasSuffix(refs, "refs/remotes/agentlab/"+names[1]) {
			t.Errorf("%v: the refs are\n%s", names, refs)
		}
		if !strings.Contains(refs, "refs/agentlab/stale/agentlab/"+first) {
			t.Errorf("%v: the commit of the old name is lost:\n%s", names, refs)
		}
	}
	if !strings.Contains(w.notes.String(), "branch topic of the session is gone") {
		t.Errorf("no note: %s", &w.notes)
	}
}

// Branches of which the names differ only in characters that a session's name cannot have
// have different sessions and remotes.
func TestBranchesWithSimilarNames(t *testing.T) {
	store := &sessionStore{}
	c, app, at := store.client(t), worktest.UI{Out: io.Discard}, appRepo(t)
	ids := map[string]string{}
	for range 2 { // the second time they are found
		for _, branch := range []string{"feature/a", "feature-a", "feature_a"} {
			l, err := FindLink(t.Context(), at.Path, branch)
			if err != nil {
				t.Fatal(err)
			}
			s, _, err := ensureSession(t.Context(), app, c, &l, branch, api.SessionCreate{Profile: "interactive"})
			if err != nil {
				t.Fatal(err)
			}
			if ids[branch] != "" && ids[branch] != s.ID {
				t.Errorf("%s has another session", branch)
			}
			ids[branch] = s.ID
			worktest.Git(t, at.Path, "checkout", "-q", "-B", branch)
			if got, err := currentLink(t.Context(), at.Path); err != nil || got.Session != s.ID || got.Branch != branch {
				t.Errorf("on %s: %+v, %v", branch, got, err)
			}
		}
	}
	if len(store.all) != 3 {
		t.Errorf("the sessions are %+v", store.all)
	}
	t.Chdir(at.Path)
	got := LinkedBranches(t.Context())
	for branch, id := range ids {
		if got[id] != branch {
			t.Errorf("the branches are %v, want %s at %s", got, branch, id)
		}
	}
}

// A program that is missing in a sandbox is named.
func TestMissingProgramIsNamed(t *testing.T) {
	for command, test := range map[string][2]string{
		"rsync --server":                {"", "rsync failed (exit code 127): it is not installed"},
		"agentlab-agent open":           {"agentlab-agent: codex is not installed in this image; x", "codex is not installed in this image; x"},
		"agentlab-agent repo":           {"", "another version of AgentLab"},
		"agentlab-agent repo programs ": {"", "another version of AgentLab"},
	} {
		err := guestrun.GuestFault(guestapi.ExecRequest{Command: strings.Fields(command)}, 127, test[0])
		if agentlab.CodeOf(err) != agentlab.CodeUnsupported || !strings.Contains(err.Error(), test[1]) || agentlab.HintOf(err) == "" {
			t.Errorf("%s: %v (%s)", command, err, agentlab.HintOf(err))
		}
	}
}

// A guest that commits all the time is read less and less often, and fetches stop at a
// total.
func TestAutomaticSyncIsBounded(t *testing.T) {
	wait := syncEvery
	for range 20 {
		wait = nextSync(wait)
	}
	if wait != 2*time.Minute {
		t.Errorf("the interval is %s", wait)
	}
	w := newSessionWorld(t)
	w.commit(map[string]string{"new": "1"})
	s, err := w.open(w.honest)
	if err != nil {
		t.Fatal(err)
	}
	left := int64(100)
	s.Left = &left
	_, err = fetchSession(t.Context(), w.app, s)
	if agentlab.CodeOf(err) != agentlab.CodeLimit || !errors.Is(err, errSyncTotal) || left != 0 {
		t.Errorf("%v, %d bytes left", err, left)
	}
	left = 1 << 20
	if got, err := fetchSession(t.Context(), w.app, s); err != nil || len(got.Fetched) != 1 || left >= 1<<20 {
		t.Errorf("%+v, %v, %d bytes left", got, err, left)
	}
}

// A work tree in which programs run is not removed without a confirmation.
func TestWorktreeInUse(t *testing.T) {
	w := newSessionWorld(t)
	running := guestapi.RepoPrograms{Names: []string{"claude", "vi\x1bte"}, Shells: 2}
	s, err := w.open(func(verb string, in []byte) ([]byte, string, int) {
		if verb == "programs" {
			out, _ := json.Marshal(running)
			return out, "", 0
		}
		return w.honest(verb, in)
	})
	if err != nil {
		t.Fatal(err)
	}
	tree := guestapi.RepoWorktree{Dir: guestapi.WorktreesDir + "/fix", Branch: "fix"}
	err = endPrograms(t.Context(), w.app, s, tree, false)
	if agentlab.CodeOf(err) != agentlab.CodeConflict || !strings.Contains(err.Error(), "claude, vi") || strings.Contains(err.Error(), "\x1b") {
		t.Errorf("%v", err)
	}
	if err := endPrograms(t.Context(), w.app, s, tree, true); err != nil {
		t.Errorf("confirmed: %v", err)
	}
	// A sandbox that is in use is not stopped.
	s.WasStopped = true
	Leave(t.Context(), w.app, s)
	if !strings.Contains(w.notes.String(), "still runs: it is in use") {
		t.Errorf("the notes are %q", &w.notes)
	}
	running = guestapi.RepoPrograms{Shells: 1}
	if err := endPrograms(t.Context(), w.app, s, tree, false); err != nil {
		t.Errorf("shells that wait: %v", err)
	}
	running.Names = make([]string, 1000)
	if err := endPrograms(t.Context(), w.app, s, tree, false); agentlab.CodeOf(err) != agentlab.CodeDenied {
		t.Errorf("too many: %v", err)
	}
}

// A sandbox that a command has started is stopped again at its end, unless it ran before.
func TestStoppedSessionIsStoppedAgain(t *testing.T) {
	w, stops := newSessionWorld(t), 0
	guest := worktest.CommandHandler(t, func([]string, []byte) ([]byte, string, int) { return []byte(`{"names":[],"shells":0}`), "", 0 })
	c := worktest.HandlerClient(t, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		switch {
		case strings.HasSuffix(r.URL.Path, "/exec"):
			guest(rw, r)
			return
		case strings.HasSuffix(r.URL.Path, "/sandboxes/7/stop"):
			stops++
		}
		rw.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(rw).Encode(map[string]any{"vmid": 7, "name": "s", "state": "STOPPED", "items": []any{}})
	}))
	for state, want := range map[string]int{"READY": 0, "SUSPENDED": 0, "STOPPED": 1, "": 1} {
		before := api.Session{ID: "se-1", Name: "s", Sandbox: "s", SandboxVMID: 7, State: state}
		if state == "" {
			before.Sandbox, before.SandboxVMID = "", 0
		}
		stops = 0
		w.notes.Reset()
		Leave(t.Context(), w.app, newOpened(c, before, api.Sandbox{VMID: 7, Name: "s", State: "READY"}, Link{Path: w.user}))
		if stops != want || want == 1 != strings.Contains(w.notes.String(), "is stopped again") {
			t.Errorf("%q before: %d stops, %q", state, stops, &w.notes)
		}
	}
}
