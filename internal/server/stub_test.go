package server

import (
	"bytes"
	"context"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab/internal/fleet"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/artifact"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/image"
	"github.com/agentlab-vm/agentlab/internal/profile"
	"github.com/agentlab-vm/agentlab/internal/sandbox"
	"github.com/agentlab-vm/agentlab/internal/secret"
	"github.com/agentlab-vm/agentlab/internal/sockpath"
	"github.com/agentlab-vm/agentlab/internal/verify"
	"github.com/agentlab-vm/agentlab/test/guard"
)

// stub implements all services: it records requests and returns what the test
// sets. The daemon's tests run the same API on the real services.
type stub struct {
	mu     sync.Mutex
	calls  []string
	err    error // answer of every service method, when set
	panics bool
	events []agentlab.Event
	subs   map[chan agentlab.Event]bool
	egress []agentlab.EgressEntry
	more   chan struct{} // closed when egress grows
	far    chan net.Conn // the guest's ends of exec, attach and dial
	image  func(ctx context.Context, progress func(string)) (image.Image, error)
	job    agentlab.JobRequest
	sandbx agentlab.SandboxRequest
	bundle []byte
	log    io.ReadCloser
	list   int // how many sandboxes and jobs there are
	grace  time.Duration
	yaml   string
	stops  chan struct{}

	building map[string]time.Time // images
}

func newStub() *stub {
	return &stub{subs: map[chan agentlab.Event]bool{}, more: make(chan struct{}), far: make(chan net.Conn, 8), stops: make(chan struct{}, 8)}
}

func (st *stub) called(name string) error {
	st.mu.Lock()
	defer st.mu.Unlock()
	st.calls = append(st.calls, name)
	if st.panics {
		panic("secret-of-the-daemon")
	}
	return st.err
}

func (st *stub) services() Services {
	return Services{
		Jobs: stubJobs{st}, Sandboxes: stubSandboxes{st}, Snapshots: stubSnapshots{st}, Artifacts: stubArtifacts{st},
		Profiles: stubProfiles{st}, Secrets: stubSecrets{st}, Images: stubImages{st}, ImageUse: stubImages{st}, Templates: stubTemplates{st}, Workspaces: stubWorkspaces{st}, Sessions: stubSessions{st}, Ports: stubPorts{st}, Events: stubEvents{st}, Messages: stubMessages{st}, Egress: stubEgress{st}, Verify: stubVerify{st}, HostNetwork: stubHostNetwork{st}, System: stubSystem{st}, Doctor: stubSystem{st}, Bundles: stubBundles{st}, Backups: stubSystem{st}, Clock: stubSystem{st}, Metrics: stubSystem{st},
	}
}

// opened is the log, which ends with ctx.
func (st *stub) opened(ctx context.Context) io.ReadCloser {
	log := st.log
	if log != nil {
		context.AfterFunc(ctx, func() { _ = log.(*io.PipeReader).CloseWithError(ctx.Err()) })
	}
	return log
}

const stubJobID = "job-aaaaaaaaaaaaa"

type stubJobs struct{ *stub }

func (s stubJobs) Create(_ context.Context, r agentlab.JobRequest) (agentlab.Job, error) {
	s.job = r
	return agentlab.Job{ID: stubJobID, Task: r.Task, Status: agentlab.JobQueued}, s.called("job.create")
}

func (s stubJobs) Check(_ context.Context, r agentlab.JobRequest) error {
	s.job = r
	return s.called("job.check")
}

func (s stubJobs) Get(_ context.Context, id string) (agentlab.Job, error) {
	err := s.called("job.get")
	if err == nil && id != stubJobID {
		err = agentlab.Errorf(agentlab.CodeNotFound, "there is no job %s", id).WithHint("see 'agentlab job list'")
	}
	return agentlab.Job{ID: id, Status: agentlab.JobRunning, TTL: 61 * time.Second}, err
}

func (s stubJobs) Attempts(context.Context, string) ([]agentlab.Job, error) {
	return nil, s.called("job.attempts")
}

func (s stubJobs) List(_ context.Context, f agentlab.JobFilter) ([]agentlab.Job, error) {
	err := s.called("job.list")
	return []agentlab.Job{{ID: stubJobID, Status: append(f.Statuses, "")[0]}}, err
}

func (s stubJobs) Cancel(_ context.Context, id string) (agentlab.Job, error) {
	return agentlab.Job{ID: id, Status: agentlab.JobRunning, StopRequested: "CANCELLED"}, s.called("job.cancel")
}

func (s stubJobs) Salvage(_ context.Context, id string) (agentlab.Job, error) {
	return agentlab.Job{ID: "job-22222222222222", Salvages: id, Status: agentlab.JobQueued}, s.called("job.salvage")
}

func (s stubJobs) CreateWithSandbox(ctx context.Context, r agentlab.SandboxRequest) (agentlab.Sandbox, error) {
	return stubSandboxes(s).Create(ctx, r)
}

type stubSandboxes struct{ *stub }

func (s stubSandboxes) Create(_ context.Context, r agentlab.SandboxRequest) (agentlab.Sandbox, error) {
	s.sandbx = r
	return agentlab.Sandbox{VMID: 1, Name: r.Name, State: agentlab.SandboxRequested}, s.called("sandbox.create")
}

func (s stubSandboxes) GetUnique(ctx context.Context, name string) (agentlab.Sandbox, error) {
	return s.Get(ctx, name)
}

func (s stubSandboxes) Get(_ context.Context, name string) (agentlab.Sandbox, error) {
	err := s.called("sandbox.get")
	if err == nil && name != "box" && name != "1" {
		err = agentlab.Errorf(agentlab.CodeNotFound, "there is no sandbox %s", name)
	}
	return agentlab.Sandbox{VMID: 1, Name: "box", State: agentlab.SandboxReady}, err
}

func (s stubSandboxes) List(_ context.Context, f agentlab.SandboxFilter) ([]agentlab.Sandbox, error) {
	err := s.called("sandbox.list")
	var out []agentlab.Sandbox
	for id := f.AfterVMID + 1; id <= s.list && len(out) < f.Limit; id++ {
		out = append(out, agentlab.Sandbox{VMID: id, Name: "box", State: agentlab.SandboxReady})
	}
	return out, err
}

func (s stubSandboxes) Memory(context.Context, agentlab.Sandbox) (backend.Memory, bool) {
	return backend.Memory{}, false
}

func (s stubSandboxes) act(name string) (agentlab.Sandbox, error) {
	return agentlab.Sandbox{VMID: 1, Name: "box"}, s.called(name)
}
func (s stubSandboxes) Suspend(context.Context, int, bool) (agentlab.Sandbox, error) {
	return s.act("sandbox.suspend")
}
func (s stubSandboxes) Resume(context.Context, int) (agentlab.Sandbox, error) {
	return s.act("sandbox.resume")
}
func (s stubSandboxes) Start(context.Context, int) (agentlab.Sandbox, error) {
	return s.act("sandbox.start")
}
func (s stubSandboxes) Stop(_ context.Context, _ int, grace time.Duration) (agentlab.Sandbox, error) {
	s.grace = grace
	return s.act("sandbox.stop")
}
func (s stubSandboxes) Destroy(context.Context, int) (agentlab.Sandbox, error) {
	return s.act("sandbox.destroy")
}
func (s stubSandboxes) Purge(context.Context, int) (agentlab.Sandbox, error) {
	return s.act("sandbox.purge")
}
func (s stubSandboxes) Orphans(context.Context) ([]fleet.Instance, []error, error) {
	return []fleet.Instance{{Instance: backend.Instance{VMID: 7, Ref: backend.Ref{UID: "uid-lost"}, Power: backend.PowerRunning}}}, nil, s.called("orphan.list")
}
func (s stubSandboxes) DestroyOrphan(_ context.Context, id string) (fleet.Instance, error) {
	return fleet.Instance{Instance: backend.Instance{VMID: 7, Ref: backend.Ref{UID: id}, Power: backend.PowerRunning}}, s.called("orphan.destroy")
}
func (s stubSandboxes) ReloadNetworks(context.Context, []int) ([]sandbox.Reloaded, error) {
	return []sandbox.Reloaded{{Sandbox: agentlab.Sandbox{VMID: 1, Name: "box"}}}, s.called("policy.reload")
}
func (s stubSandboxes) RenewLease(context.Context, int, time.Duration) (agentlab.Sandbox, error) {
	return s.act("sandbox.renew")
}

type stubSnapshots struct{ *stub }

func (s stubSnapshots) ExportDisk(context.Context, int, string, string) error { return s.err }
func (s stubSnapshots) Setups(context.Context) ([]agentlab.Snapshot, error)   { return nil, nil }
func (s stubSnapshots) DeleteSetups(context.Context, string) ([]agentlab.Snapshot, error) {
	return nil, s.called("setup.delete")
}

func (s stubSnapshots) Snapshots(context.Context, string) ([]agentlab.Snapshot, error) {
	return []agentlab.Snapshot{{Name: "clean"}}, s.called("snapshot.list")
}

func (s stubSnapshots) SaveSnapshot(_ context.Context, _ int, name string, _ bool) (agentlab.Snapshot, error) {
	return agentlab.Snapshot{Name: name}, s.called("snapshot.save")
}

func (s stubSnapshots) RestoreSnapshot(context.Context, int, string) (agentlab.Sandbox, error) {
	return stubSandboxes(s).act("snapshot.restore")
}

func (s stubSnapshots) DeleteSnapshot(_ context.Context, _, name string) (agentlab.Snapshot, error) {
	return agentlab.Snapshot{Name: name}, s.called("snapshot.delete")
}

func (s stubSnapshots) Fork(context.Context, int, agentlab.ForkRequest) ([]agentlab.Sandbox, error) {
	return []agentlab.Sandbox{{VMID: 2, Name: "box-1"}}, s.called("sandbox.fork")
}

func (s stubSandboxes) conn(name string) (net.Conn, error) {
	if err := s.called(name); err != nil {
		return nil, err
	}
	near, far := tcpPair()
	s.far <- far
	return near, nil
}
func (s stubSandboxes) Exec(context.Context, int, guestapi.ExecRequest) (net.Conn, error) {
	return s.conn("sandbox.exec")
}
func (s stubSandboxes) Attach(context.Context, int, guestapi.AttachRequest) (net.Conn, error) {
	return s.conn("sandbox.attach")
}
func (s stubSandboxes) DialGuest(context.Context, int, uint16) (net.Conn, error) {
	return s.conn("sandbox.dial")
}
func (s stubSandboxes) SSHKey(_ context.Context, _ int, r guestapi.SSHKeyRequest) (guestapi.SSHKeyResponse, error) {
	return guestapi.SSHKeyResponse{User: r.User, Port: 22}, s.called("sandbox.sshkey")
}
func (s stubSandboxes) ConsoleLog(ctx context.Context, _ int, _ bool) (io.ReadCloser, error) {
	return s.opened(ctx), s.called("sandbox.console")
}

type stubArtifacts struct{ *stub }

func (s stubArtifacts) List(context.Context, string) ([]agentlab.Artifact, error) {
	return []agentlab.Artifact{{Path: "a/b.txt", Size: 5}}, s.called("artifact.list")
}
func (s stubArtifacts) Open(_ context.Context, _, path string) (agentlab.Artifact, io.ReadCloser, error) {
	return agentlab.Artifact{Path: path, Size: 5, MIME: "text/html"}, io.NopCloser(strings.NewReader("hello")), s.called("artifact.open " + path)
}
func (s stubArtifacts) Bundle(context.Context, string) (io.ReadCloser, error) {
	return io.NopCloser(strings.NewReader("tar")), s.called("artifact.bundle")
}
func (s stubArtifacts) Log(ctx context.Context, _ string, _ int64, _ bool) (io.ReadCloser, error) {
	return s.opened(ctx), s.called("artifact.log")
}
func (s stubArtifacts) DeleteBundle(id string) error { return s.called("artifact.delete-bundle " + id) }
func (s stubArtifacts) PutBundle(_ context.Context, r io.Reader) (artifact.Bundle, error) {
	if err := s.called("artifact.put"); err != nil {
		return artifact.Bundle{}, err
	}
	var err error
	s.bundle, err = io.ReadAll(r)
	return artifact.Bundle{ID: "b1", Size: int64(len(s.bundle))}, err
}

type stubProfiles struct{ *stub }

func (s stubProfiles) List() ([]profile.Entry, error) { return nil, s.called("profile.list") }
func (s stubProfiles) Find(name string) (profile.Entry, error) {
	return s.entry(name), s.called("profile.get")
}
func (s stubProfiles) Remove(name, sum string) error {
	return s.called("profile.remove " + name + " " + sum)
}
func (s stubProfiles) Put(name, yaml string) (profile.Entry, error) {
	s.yaml = yaml
	return profile.Entry{Name: name, YAML: yaml}, s.called("profile.put")
}
func (s stubProfiles) Check(yaml string) profile.Entry {
	s.yaml = yaml
	return profile.Entry{Name: "valid", Err: s.called("profile.validate")}
}
func (s stubProfiles) entry(name string) profile.Entry {
	return profile.Entry{Name: name, Profile: agentlab.Profile{Name: name, Network: agentlab.Network{Mode: agentlab.NetworkNAT}}}
}

type stubSecrets struct{ *stub }

func (s stubSecrets) Init() error { return s.called("secret.init") }
func (s stubSecrets) Public() (string, []string, error) {
	return "age1x", []string{}, s.called("secret.public")
}
func (s stubSecrets) Rotate(context.Context, []string, []string) (secret.Rotation, error) {
	return secret.Rotation{PublicKey: "age1y", Recipients: []string{}}, s.called("secret.rotate")
}
func (s stubSecrets) Bundles(context.Context) ([]secret.Info, error) {
	return []secret.Info{{Name: "default", Format: "age", Keys: []string{"env.A"}}}, s.called("secret.bundles")
}
func (s stubSecrets) Create(context.Context, string) error { return s.called("secret.create") }
func (s stubSecrets) Keys(context.Context, string) ([]string, error) {
	return []string{"env.A"}, s.called("secret.keys")
}
func (s stubSecrets) Entries(context.Context, string, bool) ([]secret.Entry, error) {
	return []secret.Entry{{Key: "env.A"}}, s.called("secret.entries")
}
func (s stubSecrets) Set(_ context.Context, _, _ string, value io.Reader, _ bool) error {
	text, err := io.ReadAll(value)
	if err != nil {
		return err
	}
	s.yaml = string(text)
	return s.called("secret.set")
}
func (s stubSecrets) Unset(context.Context, string, string) error { return s.called("secret.unset") }
func (s stubSecrets) Text(context.Context, string) (text, version string, err error) {
	return "env: {}\n", "v1", s.called("secret.text")
}
func (s stubSecrets) Replace(_ context.Context, _, text, _ string) error {
	s.yaml = text
	return s.called("secret.replace")
}
func (s stubSecrets) Validate(context.Context, string, bool) ([]string, []secret.Finding, error) {
	return nil, nil, s.called("secret.validate")
}

type stubImages struct{ *stub }

func (s stubImages) List(context.Context) ([]image.Image, error) {
	return nil, s.called("image.list")
}
func (s stubImages) ImagesInUse(context.Context) (map[string]int, error) {
	return nil, s.called("image.use")
}
func (s stubImages) Resolve(_ context.Context, name string) (image.Image, error) {
	return image.Image{Stamp: image.Stamp{Name: name}}, s.called("image.get")
}
func (s stubImages) Commit(context.Context, string, image.Image, func(context.Context, string) error, func(string)) (image.Image, error) {
	return image.Image{}, s.err
}

func (s stubImages) Build(ctx context.Context, _ image.BuildRequest, progress func(string)) (image.Image, error) {
	if err := s.called("image.build"); err != nil || s.image == nil {
		return image.Image{}, err
	}
	return s.image(ctx, progress)
}
func (s stubImages) Building() map[string]time.Time { return s.building }
func (s stubImages) Layers() []image.Layer          { return nil }
func (s stubImages) RemoveLayers() ([]image.Layer, error) {
	return nil, s.called("image.remove-layers")
}
func (s stubImages) Remove(context.Context, string) error { return s.called("image.remove") }

type stubMessages struct{ *stub }

func (s stubMessages) Post(_ context.Context, m agentlab.Message) (agentlab.Message, error) {
	return m, s.called("message.post")
}

func (s stubMessages) List(context.Context, agentlab.MessageFilter) ([]agentlab.Message, error) {
	return nil, s.called("messages")
}

func (s stubMessages) AwaitMessages(ctx context.Context, _ agentlab.MessageFilter) ([]agentlab.Message, error) {
	<-ctx.Done()
	return nil, s.called("messages.wait")
}

type stubEvents struct{ *stub }

func (s stubEvents) Events(_ context.Context, f agentlab.EventFilter) ([]agentlab.Event, error) {
	if err := s.called("events"); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []agentlab.Event
	for _, e := range s.events {
		if f.Match(e) {
			out = append(out, e)
		}
	}
	if len(out) > f.Limit {
		if f.Tail {
			return out[len(out)-f.Limit:], nil
		}
		return out[:f.Limit], nil
	}
	return out, nil
}

func (s stubEvents) Subscribe() (<-chan agentlab.Event, func()) {
	ch := make(chan agentlab.Event, 4)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.subs[ch] = true
	return ch, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.subs, ch)
	}
}

// commit records an event and publishes it like the bus.
func (st *stub) commit(e agentlab.Event) {
	st.mu.Lock()
	defer st.mu.Unlock()
	e.ID = int64(len(st.events) + 1)
	st.events = append(st.events, e)
	for ch := range st.subs {
		select {
		case ch <- e:
		default:
			close(ch)
			delete(st.subs, ch)
		}
	}
}

type stubBundles struct{ *stub }

func (s stubBundles) Make(_ context.Context, kind, id string) ([]byte, error) {
	return []byte(kind + " " + id), s.called("doctor")
}

type stubSystem struct{ *stub }

func (s stubSystem) Health() api.Health {
	_ = s.called("health")
	return api.Health{Status: "ok"}
}
func (s stubSystem) Status(context.Context) (api.Status, error) {
	return api.Status{PID: 7}, s.called("status")
}
func (s stubSystem) Backends() []api.Backend { return []api.Backend{{Name: "lab", Up: true}} }

func (s stubSystem) Drain(_ context.Context, name string, drain bool) (api.Backend, error) {
	return api.Backend{Name: name, Drained: drain}, s.called("backend.drain " + name)
}

func (s stubSystem) CheckBackend(_ context.Context, name string) (api.HostChecks, error) {
	return api.HostChecks{Backend: name}, s.called("backend.check " + name)
}

func (s stubSystem) Checks(context.Context) (api.HostChecks, error) {
	return api.HostChecks{Checks: []api.Finding{}}, s.called("host.checks")
}
func (s stubSystem) Make(context.Context) (api.Backup, error) {
	return api.Backup{}, s.called("backup")
}
func (s stubSystem) Confirm(context.Context) (api.Clock, error) {
	return api.Clock{}, s.called("confirm clock")
}
func (s stubSystem) Text(context.Context) ([]byte, error) {
	return []byte("agentlab_build_info 1\n"), s.called("metrics")
}

func (s stubSystem) Stop() { _ = s.called("stop"); s.stops <- struct{}{} }

func tcpPair() (net.Conn, net.Conn) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		panic(err)
	}
	defer func() { _ = l.Close() }()
	a, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		panic(err)
	}
	b, err := l.Accept()
	if err != nil {
		panic(err)
	}
	return a, b
}

// harness is a Server on a unix socket.
type harness struct {
	*stub
	srv    *Server
	socket string
	client *client.Client
	logged *lockedBuffer
}

// start serves st until the test ends. change may alter the configuration.
func start(t *testing.T, change func(*Config)) *harness {
	t.Helper()
	st := newStub()
	logged := &lockedBuffer{}
	cfg := Config{
		Services: st.services(), Rules: Rules{OwnUID: uint32(getuid())},
		Logger: textLogger(logged), Version: "test",
	}
	if change != nil {
		change(&cfg)
	}
	srv, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	socket := filepath.Join(t.TempDir(), "api.sock")
	l, err := sockpath.Listen(socket, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- srv.Serve(l) }()
	c := client.New(socket)
	t.Cleanup(func() {
		c.Close()
		ctx, cancel := context.WithTimeout(context.Background(), guard.Patience)
		defer cancel()
		if err := srv.Shutdown(ctx); err != nil {
			t.Errorf("shutdown: %v", err)
		}
		if err := <-served; err != nil {
			t.Errorf("serve: %v", err)
		}
	})
	return &harness{stub: st, srv: srv, socket: socket, client: c, logged: logged}
}

// do sends a raw request and returns status, header and body.
func (h *harness) do(t *testing.T, method, path, contentType, body string) (int, http.Header, string) {
	t.Helper()
	hc := &http.Client{Transport: &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return sockpath.Dial(ctx, h.socket)
		},
		DisableKeepAlives: true,
	}}
	req, err := http.NewRequestWithContext(t.Context(), method, "http://x"+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	if contentType != "" {
		req.Header.Set("Content-Type", contentType)
	}
	resp, err := hc.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, resp.Header, string(b)
}

func (st *stub) wasCalled(name string) bool {
	st.mu.Lock()
	defer st.mu.Unlock()
	return slices.Contains(st.calls, name)
}

func (st *stub) numCalls() int {
	st.mu.Lock()
	defer st.mu.Unlock()
	return len(st.calls)
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

type stubVerify struct{ st *stub }

func (s stubVerify) Run(_ context.Context, sandbox, site string) (agentlab.Sandbox, verify.Report, error) {
	err := s.st.called("sandbox.verify " + sandbox + " " + site)
	return agentlab.Sandbox{VMID: 1001, Name: sandbox}, verify.Report{Mode: "nat", Passed: 1, Seen: []string{"records"}}, err
}
