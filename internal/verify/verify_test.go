package verify_test

import (
	"context"
	"encoding/json"
	"net"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/agentlab-vm/agentlab/internal/fleet"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/egress/probe"
	"github.com/agentlab-vm/agentlab/internal/egress/probe/probetest"
	"github.com/agentlab-vm/agentlab/internal/stream"
	"github.com/agentlab-vm/agentlab/internal/verify"
)

// driver has only what a Service asks for.
type driver struct{ backend.Driver }

// logging is a driver with an egress log.
type logging struct {
	driver
	backend.Net
	log func() []agentlab.EgressRecord
}

func (driver) Info() backend.Info {
	return backend.Info{
		ControllerURL: "http://10.77.0.1:8844",
		GuestNetwork:  &guestapi.Network{Address: "10.77.0.2/24", Gateway: "10.77.0.1", Address6: "fd77::2/64", Gateway6: "fd77::1"},
	}
}

func (d logging) EgressLog(_ context.Context, _ backend.Ref, after int64, limit int) ([]agentlab.EgressRecord, error) {
	var out []agentlab.EgressRecord
	for _, r := range d.log() {
		if r.Seq > after && len(out) < limit {
			out = append(out, r)
		}
	}
	return out, nil
}

// sandboxes has one sandbox, whose guest is a function.
type sandboxes struct {
	sb    agentlab.Sandbox
	guest func(probes []guestapi.Probe, out *stream.Writer)
	asked chan guestapi.ExecRequest
}

func (s *sandboxes) Get(context.Context, string) (agentlab.Sandbox, error) { return s.sb, nil }

func (s *sandboxes) Exec(_ context.Context, _ int, r guestapi.ExecRequest) (net.Conn, error) {
	s.asked <- r
	near, far := net.Pipe()
	go func() {
		defer far.Close()
		var in []byte
		frames := stream.NewReader(far)
		for {
			t, p, err := frames.Next()
			if err != nil {
				return
			}
			if t == stream.StdinEOF {
				break
			}
			in = append(in, p...)
		}
		var probes []guestapi.Probe
		if json.Unmarshal(in, &probes) == nil {
			s.guest(probes, stream.NewWriter(far))
		}
	}()
	return near, nil
}

func newService(n agentlab.Network, guest func([]guestapi.Probe, *stream.Writer), log func() []agentlab.EgressRecord) (*verify.Service, *sandboxes) {
	var d backend.Driver = driver{}
	if log != nil {
		d = logging{log: log}
	}
	s := &sandboxes{sb: agentlab.Sandbox{VMID: 1001, UID: "u", Backend: d.Info().Name, Name: "box", Network: n}, guest: guest, asked: make(chan guestapi.ExecRequest, 1)}
	return verify.New(verify.Config{Sandboxes: s, Fleet: fleet.Single(d, nil)}), s
}

// reach says for each probe whether it must be reached.
func reach(t *testing.T, n agentlab.Network) map[string]bool {
	t.Helper()
	targets, err := verify.Targets(n, "")
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]bool{"controller": true}
	for _, c := range probe.Table(probe.Env{Network: n, Targets: targets}) {
		for _, p := range c.Probes {
			out[p.ID] = c.Want == probe.Reach
		}
	}
	return out
}

func answer(reached map[string]bool) func([]guestapi.Probe, *stream.Writer) {
	return func(probes []guestapi.Probe, out *stream.Writer) {
		for _, p := range probes {
			r := guestapi.ProbeResult{ID: p.ID, Reached: reached[p.ID]}
			if !r.Reached && p.Kind != "raw" {
				r.Error = "refused\x1b[31m"
			}
			line, _ := json.Marshal(r)
			_ = out.Frame(stream.Stdout, append(line, '\n'))
		}
		_ = out.JSON(stream.Exit, stream.ExitStatus{})
	}
}

func TestRun(t *testing.T) {
	t.Parallel()
	nat := agentlab.Network{Mode: agentlab.NetworkNAT}
	svc, guests := newService(nat, answer(reach(t, nat)), nil)
	sb, rep, err := svc.Run(t.Context(), "box", "")
	if err != nil || sb.VMID != 1001 || !rep.OK() || rep.Skipped != 0 {
		t.Fatalf("%v: %+v", err, probetest.Failures(rep))
	}
	if r := <-guests.asked; r.User != "root" || strings.Join(r.Command, " ") != "agent-runner probe" {
		t.Errorf("asked for %+v", r)
	}
	for _, o := range rep.Outcomes {
		if strings.ContainsRune(o.Detail, '\x1b') {
			t.Errorf("%s: what the guest said came through as it was: %q", o.Check.ID, o.Detail)
		}
	}
}

// The backend's records count for more than what the guest says.
func TestRunReadsRecords(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) { // it waits for records that never come
		off := agentlab.Network{Mode: agentlab.NetworkOff}
		asked := 0
		svc, _ := newService(off, answer(map[string]bool{"controller": true}), func() []agentlab.EgressRecord {
			if asked++; asked == 1 {
				return nil
			}
			return []agentlab.EgressRecord{{Seq: 1, Proto: "tcp", Addr: "10.1.2.3", Port: 80, Allow: true, Rule: "mode.nat"}}
		})
		_, rep, err := svc.Run(t.Context(), "box", "")
		if err != nil || rep.OK() {
			t.Fatalf("%v: passed without records", err)
		}
		for _, o := range probetest.Failures(rep) {
			if o.Check.ID == "lan-10" && !strings.Contains(o.Detail, "allowed by mode.nat") && !strings.Contains(o.Detail, "no record") {
				t.Errorf("lan-10: %s", o.Detail)
			}
		}
	})
}

func TestHostileGuests(t *testing.T) {
	t.Parallel()
	nat := agentlab.Network{Mode: agentlab.NetworkNAT}
	for name, guest := range map[string]func([]guestapi.Probe, *stream.Writer){
		"silent end": func([]guestapi.Probe, *stream.Writer) {},
		"no JSON": func(_ []guestapi.Probe, w *stream.Writer) {
			_ = w.Frame(stream.Stdout, []byte("{"))
			_ = w.JSON(stream.Exit, stream.ExitStatus{})
		},
		"nothing": func(_ []guestapi.Probe, w *stream.Writer) { _ = w.JSON(stream.Exit, stream.ExitStatus{}) },
		"other results": func(_ []guestapi.Probe, w *stream.Writer) {
			_ = w.Frame(stream.Stdout, []byte(`{"id":"x"}`))
			_ = w.JSON(stream.Exit, stream.ExitStatus{})
		},
		"a failure": func(_ []guestapi.Probe, w *stream.Writer) {
			_ = w.Frame(stream.Stderr, []byte("\x1b]0;owned\a"))
			_ = w.JSON(stream.Exit, stream.ExitStatus{Code: 127, Error: "not found"})
		},
		"a flood": func(_ []guestapi.Probe, w *stream.Writer) {
			for w.Frame(stream.Stdout, make([]byte, 64<<10)) == nil {
			}
		},
	} {
		svc, _ := newService(nat, guest, nil)
		_, _, err := svc.Run(t.Context(), "box", "")
		if code := agentlab.CodeOf(err); code != agentlab.CodeUnavailable && code != agentlab.CodeLimit || strings.ContainsAny(err.Error(), "\x1b\a") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestTargets(t *testing.T) {
	t.Parallel()
	allow := func(texts ...string) (out []agentlab.NetworkRule) {
		for _, s := range texts {
			out = append(out, agentlab.NetworkRule{Rule: s})
		}
		return out
	}
	for name, tt := range map[string]struct {
		n    agentlab.Network
		site string
		ok   func(probe.Targets) bool
		code agentlab.Code
	}{
		"nat": {n: agentlab.Network{Mode: "nat"}, ok: func(t probe.Targets) bool { return t.Site == "example.com" && !t.NoHTTP && t.StrangerAddr.IsValid() }},
		"nat, deny": {n: agentlab.Network{Mode: "nat", Deny: allow("example.com", "10.0.0.0/8", "1.2.3.0/24")}, ok: func(t probe.Targets) bool {
			return t.Site == "" && t.Denied == "example.com" && t.DeniedAddrRule == "1.2.3.0/24"
		}},
		"ports": {n: agentlab.Network{Mode: "nat", Ports: []string{"22", "443"}}, ok: func(t probe.Targets) bool { return !t.StrangerAddr.IsValid() && t.NoHTTP }},
		"allowlist": {n: agentlab.Network{Mode: "allowlist", Allow: allow("*.github.com", "github.com")}, ok: func(t probe.Targets) bool {
			return t.Site == "github.com" && t.Stranger == "example.org" && t.NoHTTP && t.OtherPort == 8443
		}},
		"no port":   {n: agentlab.Network{Mode: "allowlist", Allow: allow("github.com:22", "9.9.9.9")}, ok: func(t probe.Targets) bool { return t.Site == "" && !t.StrangerAddr.IsValid() }},
		"off":       {n: agentlab.Network{Mode: "off"}, ok: func(t probe.Targets) bool { return t.Site == "" && t.Stranger != "" }},
		"own site":  {n: agentlab.Network{Mode: "nat"}, site: "github.com", ok: func(t probe.Targets) bool { return t.Site == "github.com" }},
		"forbidden": {n: agentlab.Network{Mode: "allowlist", Allow: allow("github.com")}, site: "gitlab.com", code: agentlab.CodeInvalid},
		"address":   {n: agentlab.Network{Mode: "nat"}, site: "1.2.3.4", code: agentlab.CodeInvalid},
		"no policy": {n: agentlab.Network{Mode: "?"}, code: agentlab.CodeInvalid},
	} {
		got, err := verify.Targets(tt.n, tt.site)
		if agentlab.CodeOf(err) != tt.code || tt.ok != nil && !tt.ok(got) {
			t.Errorf("%s: %+v, %v", name, got, err)
		}
	}
}
