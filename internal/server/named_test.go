package server

import (
	"cmp"
	"context"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/auth"
	"github.com/agentlab-vm/agentlab/internal/profile"
)

// namedProfiles has the profile keys, with a secrets bundle; others have none. The session
// vault, the snapshots called keys and the sandbox other have the profile keys.
type namedProfiles struct{ stubProfiles }

func (s namedProfiles) Find(name string) (profile.Entry, error) {
	e := s.entry(name)
	if name == "keys" {
		e.Profile.SecretsBundle = "default"
	}
	return e, nil
}

type namedSandboxes struct{ knownSandboxes }

func (s namedSandboxes) Get(ctx context.Context, name string) (agentlab.Sandbox, error) {
	sb, err := s.knownSandboxes.Get(ctx, name)
	sb.Profile = map[bool]string{true: "keys", false: "plain"}[sb.Name == "other"]
	return sb, err
}

type namedSnapshots struct{ stubSnapshots }

func (namedSnapshots) Snapshots(context.Context, string) ([]agentlab.Snapshot, error) {
	return []agentlab.Snapshot{{Name: "clean", Profile: "plain"}, {Name: "keys", Profile: "plain"}, {Name: "keys", Profile: "keys"}}, nil
}

type namedSessions struct{ stubSessions }

func (namedSessions) Get(_ context.Context, name string) (agentlab.Session, error) {
	return agentlab.Session{ID: "se-" + name, Name: name, Profile: map[bool]string{true: "keys", false: "plain"}[name == "vault"], WorkspaceID: "ws-aaaaaaaaaaaaa"}, nil
}

func (s namedSessions) ForJob(ctx context.Context, name string, r agentlab.JobRequest) (agentlab.JobRequest, error) {
	v, err := s.Get(ctx, name)
	r.Session, r.Profile = v.ID, cmp.Or(r.Profile, v.Profile)
	r.Workspace = &agentlab.WorkspaceSelection{Workspace: v.WorkspaceID}
	return r, err
}

// What the body of a request names needs its own verb: otherwise a token that may create
// sandboxes reads the secrets of any profile and any workspace.
func TestNamedThingsNeedTheirVerbs(t *testing.T) {
	l := startAccess(t, func(c *Config) {
		c.DefaultProfile = "keys"
		c.Services.Profiles = namedProfiles{c.Services.Profiles.(stubProfiles)}
		c.Services.Sandboxes = namedSandboxes{c.Services.Sandboxes.(knownSandboxes)}
		c.Services.Snapshots = namedSnapshots{c.Services.Snapshots.(stubSnapshots)}
		c.Services.Sessions = namedSessions{c.Services.Sessions.(stubSessions)}
	})
	l.err = nil
	const sandboxes, jobs, validate, sessions, forks, images = "/v1/sandboxes", "/v1/jobs", "/v1/jobs/validate", "/v1/sessions", "/v1/forks", "/v1/images"
	for _, test := range []struct {
		path, body string
		needs      string // verbs, that of the route first
	}{
		{sandboxes, `{"profile":"plain"}`, "sandbox.create"},
		{sandboxes, `{"profile":"keys"}`, "sandbox.create secret.read"},
		{sandboxes, `{}`, "sandbox.create secret.read"},
		{sandboxes, `{"profile":"plain","workspace":"data"}`, "sandbox.create workspace.write"},
		{sandboxes, `{"profile":"plain","workspace":"data","workspace_create":{}}`, "sandbox.create workspace.write"},
		{sandboxes, `{"profile":"plain","workspace":"data","maintenance":"files"}`, "sandbox.create workspace.write"},
		{sandboxes, `{"maintenance":"disk"}`, "sandbox.create"},
		{sandboxes, `{"from_snapshot":"box/clean"}`, "sandbox.create sandbox.snapshot"},
		{sandboxes, `{"from_snapshot":"box/keys"}`, "sandbox.create sandbox.snapshot secret.read"},
		{sandboxes, `{"from_snapshot":"box/keys","profile":"plain"}`, "sandbox.create sandbox.snapshot secret.read"},
		{sandboxes, `{"from_snapshot":"box/clean","profile":"keys"}`, "sandbox.create sandbox.snapshot secret.read"},
		{sandboxes, `{"from_snapshot":"box/clean","maintenance":"disk"}`, "sandbox.create sandbox.snapshot"},
		{sandboxes, `{"job":{"task":"env","profile":"plain"}}`, "sandbox.create job.run"},
		{sandboxes, `{"profile":"plain","job":{"task":"env"}}`, "sandbox.create job.run"},
		{sandboxes, `{"job":{"task":"env","profile":"keys"}}`, "sandbox.create job.run secret.read"},
		{sandboxes, `{"profile":"keys","job":{"task":"env"}}`, "sandbox.create job.run secret.read"},
		{sandboxes, `{"job":{"task":"env","profile":"plain","workspace":"data"}}`, "sandbox.create job.run workspace.write"},
		{jobs, `{"task":"env","profile":"plain"}`, "job.run"},
		{jobs, `{"task":"env"}`, "job.run secret.read"},
		{jobs, `{"task":"env","profile":"keys","attempts":{"count":2}}`, "job.run secret.read"},
		{jobs, `{"task":"env","profile":"plain","workspace":"data"}`, "job.run workspace.write"},
		{jobs, `{"task":"env","session":"fix"}`, "job.run session.write"},
		{jobs, `{"task":"env","session":"vault"}`, "job.run session.write secret.read"},
		{jobs, `{"task":"env","session":"fix","profile":"keys"}`, "job.run session.write secret.read"},
		{validate, `{"task":"env","profile":"keys"}`, "job.run secret.read"},
		{validate, `{"task":"env","session":"fix"}`, "job.run session.write"},
		{sessions, `{"name":"fix","profile":"plain"}`, "session.write"},
		{sessions, `{"name":"fix","profile":"plain","workspace_create":{"size_gb":1}}`, "session.write"}, // a new one
		{sessions, `{"name":"fix","profile":"plain","workspace":"data"}`, "session.write workspace.write"},
		{sessions, `{"name":"fix"}`, "session.write secret.read"},
		{sessions + "/fix/resume", `{}`, "session.write"},
		{sessions + "/vault/resume", `{}`, "session.write secret.read"},
		{sessions + "/fix/fork", `{"name":"copy"}`, "session.write"},
		{sessions + "/vault/fork", `{"name":"copy"}`, "session.write secret.read"},
		{forks, `{"sandbox":"box","count":1}`, "sandbox.create"},
		{forks, `{"sandbox":"other","count":1}`, "sandbox.create secret.read"},
		{images, `{"name":"mine","sandbox":"box"}`, "image.write sandbox.snapshot"},
	} {
		needs := strings.Fields(test.needs)
		if status, text := l.postWith(t, test.path, test.body, needs); status >= 300 {
			t.Errorf("%s %s with %s: %d %s", test.path, test.body, test.needs, status, text)
		}
		for i, lacks := range needs[1:] {
			verbs := append(append([]string{}, needs[:i+1]...), needs[i+2:]...)
			l.mu.Lock()
			l.calls = nil
			l.mu.Unlock()
			status, text := l.postWith(t, test.path, test.body, verbs)
			if status != http.StatusForbidden || !strings.Contains(text, lacks) || l.numCalls() != 0 {
				t.Errorf("%s %s without %s: %d %s, services %v", test.path, test.body, lacks, status, text, l.calls)
			}
		}
	}
}

// postWith makes a call with a new token that has the verbs.
func (l *accessLab) postWith(t *testing.T, path, body string, verbs []string) (status int, text string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+l.tcp+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Authorization", "Bearer "+l.make(t, auth.Request{Role: agentlab.RoleAdmin, Verbs: verbs}))
	resp, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}).Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(b)
}
