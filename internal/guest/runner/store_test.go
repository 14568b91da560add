package runner

import (
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/artifact"
)

const storeToken = "token-of-the-artifact-store"

// A store outside gets a copy of each artifact, with its own token only; when
// it refuses, the job is as good as without.
func TestArtifactStore(t *testing.T) {
	for name, refuse := range map[string]bool{"takes": false, "refuses": true} {
		t.Run(name, func(t *testing.T) {
			var mu sync.Mutex
			got := map[string]string{}
			store := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				mu.Lock()
				defer mu.Unlock()
				p, err := io.ReadAll(r.Body)
				if err != nil || r.Method != http.MethodPut || r.Header.Get("Authorization") != "Bearer "+storeToken {
					t.Errorf("%s %s %v, %v", r.Method, r.URL, r.Header, err)
				}
				got[r.URL.Path] = string(p)
				if refuse {
					w.WriteHeader(http.StatusForbidden)
					return
				}
				w.WriteHeader(http.StatusCreated)
			}))
			defer store.Close()
			s := newSandbox(t, guestapi.BootstrapResponse{
				Job: shellJob("echo token-of-the-artifact-store; mkdir -p artifacts; echo fruit >artifacts/a.txt"), ArtifactStore: &guestapi.ArtifactTarget{Endpoint: store.URL + "/bucket/", Token: storeToken},
			}, artifact.Limits{})
			rep := s.finish()
			if rep.Status != "COMPLETED" {
				t.Fatalf("%+v", rep)
			}
			mu.Lock()
			defer mu.Unlock()
			if refuse {
				if len(got) != 1 || !strings.Contains(rep.Message, "the artifact store answers 403") {
					t.Errorf("%d calls, %q", len(got), rep.Message)
				}
				return
			}
			base := "/bucket/" + s.JobID + "/"
			if got[base+"agent.log"] != "[redacted]\n" || !strings.Contains(got[base+"report.json"], s.JobID) {
				t.Errorf("%q", got)
			}
			if strings.Contains(s.Log(), storeToken) {
				t.Error("the log holds the store's token")
			}
		})
	}
}

// The agent's ssh finds its keys, and nothing of them is left.
func TestSSHKeys(t *testing.T) {
	const key = "-----BEGIN OPENSSH PRIVATE KEY-----\nsecretbytes\n-----END OPENSSH PRIVATE KEY-----"
	s := newSandbox(t, guestapi.BootstrapResponse{
		Job:     shellJob("cat ~/.ssh/config; ssh -G git.example.com | grep -i -e ^identityfile -e ^stricthost; stat -L -c %a ~/.ssh/config; cat ~/.ssh/config | grep -o /.*ssh-key-git.example.com | xargs cat"),
		SSHKeys: map[string]string{"git.example.com": key},
	}, artifact.Limits{})
	if err := os.MkdirAll(filepath.Join(s.cfg.Home, ".ssh"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(s.cfg.Home, ".ssh/config"), []byte("Host other\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	rep := s.finish()
	log := s.Log()
	if rep.Status != "COMPLETED" || !strings.Contains(log, "Host git.example.com") || !strings.Contains(log, "\n600\n") || strings.Contains(log, "secretbytes") {
		t.Errorf("%+v: %s", rep, log)
	}
	if _, err := os.Lstat(filepath.Join(s.cfg.Home, ".ssh/config")); err == nil {
		t.Error("the link is left")
	}
}
