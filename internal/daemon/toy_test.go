package daemon

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/backendtest"
	"github.com/agentlab-vm/agentlab/internal/backend/registry"
	"github.com/agentlab-vm/agentlab/internal/config"
	"github.com/agentlab-vm/agentlab/internal/profile"
	"github.com/agentlab-vm/agentlab/internal/stream/streamtest"
)

// toySettings is the section toy of config.yaml.
type toySettings struct {
	Greeting string `yaml:"greeting" doc:"What the host says when it is checked."`
}

func (s *toySettings) Validate(_ config.Config, used bool) error {
	if used && s.Greeting == "" {
		return agentlab.Errorf(agentlab.CodeInvalid, "missing").WithField("toy.greeting")
	}
	return nil
}

// toyOptions are the profile keys of the toy.
var toyOptions = []backend.Option{{Path: "toy.greeting", Name: "greeting", Zero: "", Valid: regexp.MustCompile(`^[a-z]+$`).MatchString, What: "a greeting"}}

// toyBackend is a whole backend: what a new one needs beside one line in the
// list of backends. Its sandboxes outlive its driver, as VMs outlive a daemon.
func toyBackend(world *toyWorld) registry.Backend {
	return registry.Backend{
		Name:    "toy",
		Section: func() config.Section { return &toySettings{Greeting: "hello"} },
		Options: toyOptions,
		Open: func(env registry.Env) (registry.Opened, error) {
			return registry.Opened{Driver: &toy{toyWorld: world, greeting: env.Section.(*toySettings).Greeting}, Images: toyImages{}}, nil
		},
	}
}

type toyImages struct{}

func (toyImages) Check(string) error { return nil }

func (i toyImages) Current(ctx context.Context, name string) (string, error) {
	return i.Ensure(ctx, name, nil)
}

func (toyImages) Ensure(_ context.Context, name string, _ func(string)) (string, error) {
	return name + "@1", nil
}

// toyWorld is where the sandboxes are.
type toyWorld struct {
	mu    sync.Mutex
	boxes map[string]*toyBox // by UID
}

// toyBox is one sandbox. While it runs, control is its guest.
type toyBox struct {
	spec     backend.Spec
	control  *streamtest.Pipes
	identity string
}

// toy is the driver.
type toy struct {
	*toyWorld
	greeting string
}

func (t *toy) Info() backend.Info {
	return backend.Info{Name: "toy", Version: "1", Options: toyOptions, OptionsOK: polite, ConsoleHint: "ask the toy", ControllerURL: "http://192.0.2.1:8844", UploadURL: "http://192.0.2.1:8846/upload"}
}

// polite is backend.Info.OptionsOK.
func polite(o agentlab.Options) error {
	var v struct{ Greeting string }
	if err := o.Decode(&v); err != nil || v.Greeting != "oi" {
		return err
	}
	return agentlab.Errorf(agentlab.CodeUnsupported, "a toy is polite").WithField("toy.greeting")
}

func (t *toy) Check(context.Context) []backend.Finding {
	return []backend.Finding{{Name: "toy", Level: backend.LevelOK, Detail: t.greeting}}
}

func (t *toy) Validate(spec backend.Spec) error {
	if n := spec.Network; n.Mode != agentlab.NetworkNAT || len(n.Deny)+len(n.Ports)+len(n.Layers) > 0 {
		return agentlab.Errorf(agentlab.CodeUnsupported, "a toy enforces no policy").WithField("network.mode")
	}
	if spec.From != nil {
		return agentlab.Errorf(agentlab.CodeUnsupported, "a toy has no snapshots").WithField("from")
	}
	return t.Info().CheckSpec(spec)
}

func (t *toy) Create(_ context.Context, spec backend.Spec) error {
	if err := t.Validate(spec); err != nil {
		return err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.boxes[spec.UID] == nil {
		t.boxes[spec.UID] = &toyBox{spec: spec}
	}
	return nil
}

// with calls f with a sandbox, if there is one.
func (t *toy) with(ref backend.Ref, f func(*toyBox) error) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	b := t.boxes[ref.UID]
	if b == nil {
		return agentlab.Errorf(agentlab.CodeNotFound, "no toy has the mark %s", ref.UID)
	}
	return f(b)
}

func (t *toy) Start(_ context.Context, ref backend.Ref) error {
	return t.with(ref, func(b *toyBox) error {
		if b.control == nil {
			l := streamtest.NewPipes()
			b.control = l
			go func() { _ = http.Serve(l, b.guest(t.toyWorld)) }()
		}
		return nil
	})
}

// guest is guest control.
func (b *toyBox) guest(w *toyWorld) http.Handler {
	mux := http.NewServeMux()
	answer := func(change func(*http.Request)) http.HandlerFunc {
		return func(rw http.ResponseWriter, r *http.Request) {
			w.mu.Lock()
			defer w.mu.Unlock()
			change(r)
			_ = json.NewEncoder(rw).Encode(guestapi.Health{Version: "toy", BootID: "1", Identity: b.identity, System: "running"})
		}
	}
	mux.Handle("GET "+guestapi.PathHealth, answer(func(*http.Request) {}))
	mux.Handle("PUT "+guestapi.PathIdentity, answer(func(r *http.Request) {
		var id guestapi.Identity
		_ = json.NewDecoder(r.Body).Decode(&id)
		b.identity = id.UID
	}))
	return mux
}

func (b *toyBox) stop() {
	if b.control != nil {
		_ = b.control.Close()
	}
	b.control, b.identity = nil, ""
}

func (t *toy) Stop(_ context.Context, ref backend.Ref, _ time.Duration) error {
	return t.with(ref, func(b *toyBox) error { b.stop(); return nil })
}

func (t *toy) Destroy(ctx context.Context, ref backend.Ref) error {
	_ = t.Stop(ctx, ref, 0)
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.boxes, ref.UID)
	return nil
}

func (b *toyBox) instance() backend.Instance {
	in := backend.Instance{Ref: b.spec.Ref(), VMID: b.spec.VMID, Name: b.spec.Name, Power: backend.PowerStopped, Spec: &b.spec}
	in.Ref.Handle = fmt.Sprintf("toy/%d", b.spec.VMID)
	if b.control != nil {
		in.Power = backend.PowerRunning
	}
	return in
}

func (t *toy) Inspect(_ context.Context, ref backend.Ref) (in backend.Instance, err error) {
	err = t.with(ref, func(b *toyBox) error { in = b.instance(); return nil })
	return in, err
}

func (t *toy) List(context.Context) ([]backend.Instance, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	var out []backend.Instance
	for _, b := range t.boxes {
		out = append(out, b.instance())
	}
	return out, nil
}

func (t *toy) DialControl(_ context.Context, ref backend.Ref) (net.Conn, error) {
	var control *streamtest.Pipes
	err := t.with(ref, func(b *toyBox) error {
		if control = b.control; control == nil {
			return agentlab.Errorf(agentlab.CodeUnavailable, "the toy is off")
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return control.Dial(), nil
}

func (t *toy) DialGuest(_ context.Context, ref backend.Ref, _ uint16) (net.Conn, error) {
	return nil, cmp.Or(t.with(ref, func(*toyBox) error { return nil }), error(agentlab.Errorf(agentlab.CodeUnavailable, "a toy has no ports")))
}

func (t *toy) ListenGuest(_ context.Context, ref backend.Ref) (net.Listener, error) {
	return streamtest.NewPipes(), t.with(ref, func(*toyBox) error { return nil })
}

func (t *toy) Close() error { return nil }

// A backend is one folder (here a file) and one line in the list: the daemon,
// its configuration and its API need nothing else.
func TestToyBackend(t *testing.T) {
	world := &toyWorld{boxes: map[string]*toyBox{}}
	h := newHome(t)
	h.backends = append(slices.Clip(known), toyBackend(world))

	h.configure(t, "backend: toy\ntoy:\n  greting: hi\n")
	if _, err := h.open(t); agentlab.CodeOf(err) != agentlab.CodeInvalid || agentlab.HintOf(err) != `did you mean "toy.greeting"?` {
		t.Errorf("%v (%s)", err, agentlab.HintOf(err))
	}
	h.configure(t, "backend: toy\ntoy:\n  greeting: hi\n")
	stop := h.start(t)
	if p, err := h.client.PutProfile(t.Context(), "sailor", "name: sailor\ntoy: {greeting: ahoy}\n"); err != nil || !p.Usable {
		t.Fatalf("%+v, %v", p, err)
	}
	if p, err := h.client.PutProfile(t.Context(), "other", "name: other\nnetwork: {bridge: br0}\n"); err != nil || !strings.Contains(p.Problem, "only backend proxmox") {
		t.Errorf("%+v, %v", p, err)
	}
	if _, err := h.client.CreateSandbox(t.Context(), api.SandboxCreate{Name: "doll", Profile: "sailor"}); err != nil {
		t.Fatal(err)
	}
	sb := h.await(t, "doll", agentlab.SandboxReady)
	if b := world.boxes[sb.UID]; b == nil || b.spec.Name != "doll" || b.identity != sb.UID || b.spec.Options != `{"greeting":"ahoy"}` {
		t.Errorf("%+v", b)
	}
	checks, err := h.client.HostChecks(t.Context())
	if err != nil || !slices.Contains(checks.Checks, api.Finding{Name: "toy", Level: "ok", Detail: "hi"}) {
		t.Errorf("%+v, %v", checks, err)
	}
	stop()
	h.start(t)
	if again := h.await(t, "doll", agentlab.SandboxReady); again.UID != sb.UID || again.VMID != sb.VMID || again.Handle != fmt.Sprintf("toy/%d", sb.VMID) {
		t.Errorf("%+v after a restart, %+v before", again, sb)
	}
	if _, err := h.client.DestroySandbox(t.Context(), "doll"); err != nil {
		t.Fatal(err)
	}
	h.await(t, strconv.Itoa(sb.VMID), agentlab.SandboxDestroyed)
	if len(world.boxes) != 0 {
		t.Errorf("left: %v", world.boxes)
	}
}

// When another backend is configured, a sandbox is neither changed nor declared
// lost, and says what to do. It continues when its backend is back.
func TestOtherBackend(t *testing.T) {
	world := &toyWorld{boxes: map[string]*toyBox{}}
	h := newHome(t)
	h.backends = append(slices.Clip(known), toyBackend(world))
	h.configure(t, "backend: toy\n")
	stop := h.start(t)
	if p, err := h.client.PutProfile(t.Context(), "sailor", "name: sailor\ntoy: {greeting: ahoy}\n"); err != nil || !p.Usable {
		t.Fatalf("%+v, %v", p, err)
	}
	if _, err := h.client.CreateSandbox(t.Context(), api.SandboxCreate{Name: "doll", Profile: "sailor"}); err != nil {
		t.Fatal(err)
	}
	sb := h.await(t, "doll", agentlab.SandboxReady)
	stop()

	h.configure(t, "backend: fake\n")
	stop = h.start(t)
	if _, err := h.client.CreateSandbox(t.Context(), api.SandboxCreate{Name: "other"}); err != nil {
		t.Fatal(err)
	}
	h.await(t, "other", agentlab.SandboxReady)
	const hint = "add backend toy to config.yaml and restart agentlabd"
	vmid := strconv.Itoa(sb.VMID)
	for what, call := range map[string]func() (api.Sandbox, error){
		"destroy": func() (api.Sandbox, error) { return h.client.DestroySandbox(t.Context(), "doll") },
		"stop":    func() (api.Sandbox, error) { return h.client.StopSandbox(t.Context(), vmid, api.SandboxStop{}) },
		"exec": func() (api.Sandbox, error) {
			_, err := h.client.Exec(t.Context(), vmid, guestapi.ExecRequest{Command: []string{"true"}})
			return sb, err
		},
	} {
		if _, err := call(); agentlab.CodeOf(err) != agentlab.CodeConflict || agentlab.HintOf(err) != hint {
			t.Errorf("%s: %v (%s)", what, err, agentlab.HintOf(err))
		}
	}
	if _, err := h.client.RenewLease(t.Context(), vmid, 60); err != nil {
		t.Error(err)
	}
	h.awaitIt(t, "doll", func(sb api.Sandbox) bool { return sb.State == "READY" && strings.Contains(sb.Waiting, hint) })
	if st, err := h.client.Status(t.Context()); err != nil || !slices.ContainsFunc(st.Findings, func(f api.Finding) bool { return f.Remedy == hint }) {
		t.Errorf("%+v, %v", st.Findings, err)
	}
	stop()

	h.configure(t, "backend: toy\n")
	h.start(t)
	h.awaitIt(t, "doll", func(sb api.Sandbox) bool { return sb.State == "READY" && sb.Waiting == "" })
	if b := world.boxes[sb.UID]; b == nil || b.control == nil {
		t.Error("its VM does not run")
	}
	if _, err := h.client.DestroySandbox(t.Context(), "doll"); err != nil {
		t.Fatal(err)
	}
	h.await(t, vmid, agentlab.SandboxDestroyed)
	if len(world.boxes) != 0 {
		t.Errorf("left: %v", world.boxes)
	}
}

// The profile keys of a backend are known to a daemon with another backend, too,
// which does not use such profiles.
func TestToyProfiles(t *testing.T) {
	all := append(slices.Clip(known), toyBackend(&toyWorld{})).Options()
	on := func(info backend.Info, yaml string) error {
		return profile.NewLibrary(t.TempDir(), info).Options(all).Check("name: p\n" + yaml).Err
	}
	mine, other := (&toy{}).Info(), backend.Info{Name: "fake"}
	for _, tc := range []struct {
		info  backend.Info
		yaml  string
		code  agentlab.Code
		field string
		text  string
	}{
		{mine, "toy: {greeting: ahoy}", "", "", ""},
		{mine, "toy:", "", "", ""},
		{mine, "toy: {greeting: oi}", agentlab.CodeUnsupported, "toy.greeting", "profile p cannot be used on backend toy: a toy is polite"},
		{mine, "toy: {greeting: A}", agentlab.CodeInvalid, "toy.greeting", `line 2: "A" is not a greeting`},
		{mine, "toy: {greting: ahoy}", agentlab.CodeInvalid, "toy.greting", "line 2: unknown key"},
		{mine, "toy: ahoy", agentlab.CodeInvalid, "toy", "line 2: a mapping"},
		{mine, "network: {bridge: br0}", agentlab.CodeUnsupported, "network.bridge", "profile p cannot be used on backend toy: only backend proxmox has this key"},
		{mine, "network: {model: virtio}", agentlab.CodeUnsupported, "network.model", "only backend proxmox, qemu has this key"},
		{other, "toy: {greeting: ahoy}", agentlab.CodeUnsupported, "toy.greeting", "profile p cannot be used on backend fake: only backend toy has this key"},
		{other, "toy: {greeting: A}", agentlab.CodeInvalid, "toy.greeting", "is not a greeting"},
	} {
		err := on(tc.info, tc.yaml)
		e, _ := errors.AsType[*agentlab.Error](err)
		if agentlab.CodeOf(err) != tc.code || err != nil && (e.Field != tc.field || !strings.Contains(e.Message, tc.text)) {
			t.Errorf("%s on %s: %v, want %s %s: %s", tc.yaml, tc.info.Name, err, tc.code, tc.field, tc.text)
		}
	}
	for name, options := range all { // no key may look like a request for a directory of the host
		for _, o := range options {
			parent, key, nested := strings.Cut(o.Path, ".")
			yaml := fmt.Sprintf("%s: {%s: [not a scalar]}", parent, key)
			if !nested {
				yaml = parent + ": [not a scalar]"
			}
			if err := on(other, yaml); agentlab.CodeOf(err) != agentlab.CodeInvalid || !strings.Contains(err.Error(), "expected") {
				t.Errorf("%s of %s: %v", o.Path, name, err)
			}
		}
	}
}

func TestToyConformance(t *testing.T) {
	backendtest.Run(t, backendtest.Config{NoVM: "a toy runs nothing", New: func(*testing.T) *backendtest.Harness {
		world := &toyWorld{boxes: map[string]*toyBox{}}
		uids := map[int]string{}
		return &backendtest.Harness{
			Driver: &toy{toyWorld: world, greeting: "hi"},
			Reopen: func(*testing.T) backend.Driver { return &toy{toyWorld: world, greeting: "hi"} },
			Unsupported: map[string]func(*backend.Spec){
				"toy.greeting": func(s *backend.Spec) { s.Options = `{"greeting":"oi"}` },
			},
			Options: map[string]any{"toy.greeting": "ahoy"},
			Spec: func(n int) backend.Spec {
				uids[n] = cmp.Or(uids[n], agentlab.NewUID())
				return backend.Spec{VMID: 1000 + n, UID: uids[n], Name: "toy", Image: "base@1", Network: agentlab.Network{Mode: agentlab.NetworkNAT},
					Resources: agentlab.Resources{Cores: 1, MemoryMB: 512, RootSizeGB: 5}}
			},
		}
	}})
}
