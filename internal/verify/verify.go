// Package verify runs the probe table in a live sandbox, to check that its
// network allows exactly what its policy allows.
//
// The guest's own agent-runner sends the probes, so its results are reliable
// only if the guest is not compromised. The backend's egress records, if there
// are any, are checked too and do not depend on the guest. A newly created
// sandbox gives more reliable results.
package verify

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/netip"
	"net/url"
	"strconv"
	"time"

	"github.com/agentlab-vm/agentlab/internal/fleet"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/egress/probe"
	"github.com/agentlab-vm/agentlab/internal/stream"
)

const (
	execLimit    = 3 * time.Minute
	maxOutput    = 4 << 20 // bytes of results
	maxErrOutput = 4 << 10 // bytes of standard error
	maxText      = 200     // bytes of one text from a guest
	recordPage   = 1000
)

// Report is the result of the table.
type Report = probe.Report

// Sandboxes are the sandboxes that can be verified.
type Sandboxes interface {
	Get(ctx context.Context, nameOrVMID string) (agentlab.Sandbox, error)
	Exec(ctx context.Context, vmid int, r guestapi.ExecRequest) (net.Conn, error)
}

// Config is the configuration of a Service.
type Config struct {
	Sandboxes Sandboxes
	Fleet     *fleet.Fleet
}

// Service verifies sandboxes.
type Service struct{ cfg Config }

// New returns a Service.
func New(cfg Config) *Service { return &Service{cfg: cfg} }

// Run runs the table in a running sandbox. site is a public host name that the
// policy allows and that answers on ports 80 and 443; "" selects it by the
// policy. A failed row is not an error. Codes: not_found, conflict (it does
// not run), invalid (site), unavailable (the guest does not answer correctly).
func (s *Service) Run(ctx context.Context, sandbox, site string) (agentlab.Sandbox, Report, error) {
	sb, err := s.cfg.Sandboxes.Get(ctx, sandbox)
	if err != nil {
		return sb, Report{}, err
	}
	env, err := s.env(sb, site)
	if err != nil {
		return sb, Report{}, err
	}
	ctx, cancel := context.WithTimeout(ctx, execLimit+time.Minute)
	defer cancel()
	rep, err := probe.Run(ctx, func(ctx context.Context, probes []guestapi.Probe) ([]guestapi.ProbeResult, error) {
		return s.exec(ctx, sb.VMID, probes)
	}, env)
	return sb, rep, err
}

// env returns the environment of the sandbox for the table.
func (s *Service) env(sb agentlab.Sandbox, site string) (probe.Env, error) {
	targets, err := Targets(sb.Network, site)
	if err != nil {
		return probe.Env{}, err
	}
	b := s.cfg.Fleet.Of(sb.Backend)
	info := b.Info()
	env := probe.Env{Network: sb.Network, Targets: targets, Frames: true, MayBeOffline: true}
	if n := info.GuestNetwork; n != nil {
		place(&env, n)
	}
	if u, err := url.Parse(info.ControllerURL); err == nil {
		if p, err := strconv.ParseUint(u.Port(), 10, 16); err == nil {
			env.ControllerPort = uint16(p)
		}
	}
	if l := b.Net; l != nil {
		ref := backend.RefOf(sb)
		var all []agentlab.EgressRecord
		env.Records = func(ctx context.Context) ([]agentlab.EgressRecord, error) {
			for {
				after := int64(0)
				if len(all) > 0 {
					after = all[len(all)-1].Seq
				}
				page, err := l.EgressLog(ctx, ref, after, recordPage)
				if err != nil {
					return nil, err
				}
				all = append(all, page...)
				if len(page) < recordPage {
					return all, nil
				}
			}
		}
	}
	return env, nil
}

// place sets the guest's addresses, and an address where a neighbour could be.
func place(env *probe.Env, n *guestapi.Network) {
	if p, err := netip.ParsePrefix(n.Address); err == nil {
		env.Guest4 = p.Addr()
		if next := p.Addr().Next(); p.Contains(next) {
			env.Neighbour4 = next
		}
	}
	env.Gateway4, _ = netip.ParseAddr(n.Gateway)
	if p, err := netip.ParsePrefix(n.Address6); err == nil {
		env.Guest6 = p.Addr()
		if next := p.Addr().Next(); p.Contains(next) {
			env.Neighbour6 = next
		}
	}
	env.Gateway6, _ = netip.ParseAddr(n.Gateway6)
}

// exec runs agent-runner probe as root in the guest.
func (s *Service) exec(ctx context.Context, vmid int, probes []guestapi.Probe) ([]guestapi.ProbeResult, error) {
	in, err := json.Marshal(probes)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, execLimit)
	defer cancel()
	conn, err := s.cfg.Sandboxes.Exec(ctx, vmid, guestapi.ExecRequest{Command: []string{"agent-runner", "probe"}, User: "root", Dir: "/"})
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	sent := make(chan error, 1)
	go func() { // the guest writes while it reads
		w := stream.NewWriter(conn)
		sent <- errors.Join(w.Frame(stream.Stdin, in), w.Frame(stream.StdinEOF, nil))
	}()
	out, err := receive(conn)
	if err != nil && ctx.Err() != nil {
		err = agentlab.Errorf(agentlab.CodeTimeout, "the guest did not finish the probes within %s", execLimit)
	}
	if err != nil {
		_ = conn.Close() // ends the sender too
		return nil, err
	}
	return results(out)
}

// receive reads a process's output to its end.
func receive(conn net.Conn) ([]byte, error) {
	var out, errOut bytes.Buffer
	frames := stream.NewReader(conn)
	for {
		t, p, err := frames.Next()
		if err != nil {
			return nil, agentlab.Errorf(agentlab.CodeUnavailable, "the guest ended the connection during the probes: %w", err)
		}
		switch t {
		case stream.Stdout:
			if out.Len()+len(p) > maxOutput {
				return nil, agentlab.Errorf(agentlab.CodeLimit, "the guest's results exceed %d bytes", maxOutput)
			}
			out.Write(p)
		case stream.Stderr:
			errOut.Write(p[:min(len(p), max(0, maxErrOutput-errOut.Len()))])
		case stream.Exit:
			var st stream.ExitStatus
			if err := json.Unmarshal(p, &st); err != nil || st.Code != 0 {
				return nil, agentlab.Errorf(agentlab.CodeUnavailable, "agent-runner probe failed in the guest (exit code %d): %s", st.Code, agentlab.OneLine(st.Error+" "+errOut.String(), maxText)).
					WithHint("the sandbox may run another version of agent-runner: create a new sandbox")
			}
			return out.Bytes(), nil
		}
	}
}

// results parses one result per line. The results are not trusted: texts are
// shortened and sanitised, addresses are parsed.
func results(out []byte) ([]guestapi.ProbeResult, error) {
	var all []guestapi.ProbeResult
	dec := json.NewDecoder(bytes.NewReader(out))
	for {
		var r guestapi.ProbeResult
		err := dec.Decode(&r)
		if errors.Is(err, io.EOF) {
			return all, nil
		}
		if err != nil {
			return nil, agentlab.Errorf(agentlab.CodeUnavailable, "the guest's probe results are not valid JSON")
		}
		r.Answer, r.Error = agentlab.OneLine(r.Answer, maxText), agentlab.OneLine(r.Error, maxText)
		for i, a := range r.Addrs {
			r.Addrs[i] = agentlab.OneLine(a, maxText)
		}
		all = append(all, r)
	}
}
