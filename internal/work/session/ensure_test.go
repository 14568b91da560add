package session

import (
	"encoding/json"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/internal/work/worktest"
)

// sessionStore has the sessions of a daemon.
type sessionStore struct {
	mu     sync.Mutex
	all    []api.Session
	unseen string // name of a session that is created after it was looked up; "" for none
}

func (s *sessionStore) find(name string) *api.Session {
	for i := range s.all {
		if s.all[i].Name == name || s.all[i].ID == name {
			return &s.all[i]
		}
	}
	return nil
}

func (s *sessionStore) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	status, answer := http.StatusOK, any(nil)
	fail := func(code agentlab.Code, as int) {
		status, answer = as, map[string]any{"code": code, "message": string(code)}
	}
	if r.Method == http.MethodGet {
		if got := s.find(filepath.Base(r.URL.Path)); got != nil && got.Name != s.unseen {
			answer = *got
		} else {
			fail(agentlab.CodeNotFound, http.StatusNotFound)
		}
	} else {
		var c api.SessionCreate
		_ = json.NewDecoder(r.Body).Decode(&c)
		switch got := s.find(c.Name); {
		case got == nil:
			s.all = append(s.all, api.Session{ID: agentlab.NewSessionID(), Name: c.Name, Profile: c.Profile, Image: c.Image})
			answer = s.all[len(s.all)-1]
		case c.IfMissing:
			answer = *got
		default:
			fail(agentlab.CodeExists, http.StatusConflict)
		}
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(answer)
}

func (s *sessionStore) client(t *testing.T) *client.Client {
	t.Helper()
	dir, err := os.MkdirTemp("", "al")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	l, err := net.Listen("unix", filepath.Join(dir, "s"))
	if err != nil {
		t.Fatal(err)
	}
	srv := &http.Server{Handler: s}
	go func() { _ = srv.Serve(l) }()
	t.Cleanup(func() { _ = srv.Close() })
	return client.New(filepath.Join(dir, "s"))
}

// appRepo makes a repository in a directory with the name app.
func appRepo(t *testing.T) Link {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "app")
	worktest.Git(t, worktest.Repo(t), "clone", "-q", ".", dir)
	return Link{Path: dir, Remote: remoteName}
}

// Repositories with the same name never share a session, also if the first start of one
// was interrupted, or if both start at once.
func TestRepositoriesWithOneName(t *testing.T) {
	t.Parallel()
	store := &sessionStore{}
	c, app := store.client(t), worktest.UI{Out: io.Discard}
	ensure := func(l Link) api.Session {
		t.Helper()
		s, _, err := ensureSession(t.Context(), app, c, &l, "", api.SessionCreate{Profile: "interactive"})
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	first, second := appRepo(t), appRepo(t)
	if err := first.Set(t.Context(), "app", ""); err != nil { // and then it was killed
		t.Fatal(err)
	}
	theirs := ensure(second)
	store.find("app").History = []api.SessionSandbox{{SandboxVMID: 1}}
	mine := ensure(first)
	if theirs.Name != "app" || mine.ID == theirs.ID || !strings.HasPrefix(mine.Name, "app-") {
		t.Errorf("got %+v and %+v", mine, theirs)
	}
	if again := ensure(first); again.ID != mine.ID {
		t.Errorf("the next start has another session: %+v", again)
	}

	third := appRepo(t)
	if err := third.Set(t.Context(), "app", ""); err != nil {
		t.Fatal(err)
	}
	store.all = nil
	if s := ensure(third); s.Name != "app" {
		t.Errorf("after a crash before the session was created: %+v", s)
	}
	if err := third.Set(t.Context(), "app", ""); err != nil { // killed before the ID was written
		t.Fatal(err)
	}
	if s := ensure(third); s.Name != "app" || len(store.all) != 1 {
		t.Errorf("after a crash before the ID was written: %+v", s)
	}

	store.all = nil
	fourth := appRepo(t)
	got := make([]api.Session, 4)
	var wg sync.WaitGroup
	for i := range got {
		wg.Go(func() {
			l := fourth
			s, _, err := ensureSession(t.Context(), app, c, &l, "", api.SessionCreate{Profile: "interactive"})
			if got[i] = s; err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	for _, s := range got {
		if s.ID != got[0].ID {
			t.Errorf("one repository has several sessions: %+v", got)
		}
	}
}

// A session whose name another repository takes at the same time has the image of the
// request, too.
func TestImageOfSessionWithTakenName(t *testing.T) {
	store := &sessionStore{all: []api.Session{{ID: agentlab.NewSessionID(), Name: "app"}}, unseen: "app"}
	l := appRepo(t)
	s, created, err := ensureSession(t.Context(), worktest.UI{Out: io.Discard}, store.client(t), &l, "", api.SessionCreate{Profile: "interactive", Image: "agents"})
	if err != nil || !created || s.Name == "app" || s.Image != "agents" {
		t.Errorf("%+v, %v, %v", s, created, err)
	}
}
