package job

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/egress"
)

// maxModelDenials is how many denials of its model's endpoints a job may get,
// without an allowed connection, before it is ended. One attempt has two of
// them if a client asks DNS for both address families.
const maxModelDenials = 6

// modelDenials counts the denials of a job's model endpoints.
type modelDenials struct {
	count      int
	host, rule string // of the last one
	reachable  string // the endpoint of the last allowed connection
	id         int64  // of the last record that was counted
}

func (d modelDenials) String() string {
	return fmt.Sprintf("its model host %s is denied by the network policy (rule %s)", d.host, d.rule)
}

// maxFirstRead is how many records the first read for a job returns.
const maxFirstRead = 1000

// readDenials counts the egress records of a job since the last call, and
// returns the sum. With fresh, it waits a short time for records that are not
// stored yet. It detects a running job whose agent requests its model
// repeatedly and is always denied: the job would only run until its deadline.
func (s *Service) readDenials(ctx context.Context, j agentlab.Job, fresh bool) modelDenials {
	if len(j.ModelHosts) == 0 || s.cfg.Egress == nil {
		return modelDenials{}
	}
	s.mu.Lock()
	f := agentlab.EgressFilter{JobID: j.ID, AfterID: s.track(j.ID).denials.id}
	s.mu.Unlock()
	if fresh || f.AfterID == 0 {
		f.Tail, f.Limit = true, maxFirstRead
	}
	list, err := s.cfg.Egress.List(ctx, f)
	if err != nil && ctx.Err() == nil {
		s.log.Warn("cannot read the network records of a job", "job", j.ID, "err", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	d := &s.track(j.ID).denials
	for _, e := range list {
		d.add(j.ModelHosts, e)
	}
	return *d
}

// add counts a record. An allowed connection proves that the model can be
// reached. Denied UDP is not counted, because clients then use TCP. Denials by
// a limit are not counted, because they are temporary.
func (d *modelDenials) add(hosts []string, e agentlab.EgressEntry) {
	if e.ID <= d.id {
		return // seen before
	}
	d.id = e.ID
	proto := egress.Proto(e.Proto)
	if proto != egress.TCP && proto != egress.DNS || e.Rule == egress.RuleLimit || e.Rule == egress.RuleRate {
		return
	}
	i := slices.IndexFunc(hosts, func(h string) bool {
		name, port, err := net.SplitHostPort(h)
		same := e.Name == name || e.Name == "" && e.Addr == name
		return err == nil && same && (proto == egress.DNS || strconv.Itoa(e.Port) == port)
	})
	switch {
	case i < 0 || e.Allow && proto == egress.DNS:
	case e.Allow:
		*d = modelDenials{reachable: hosts[i], id: e.ID}
	case d.reachable != "" && d.reachable != hosts[i]: // the agent has a model
	default:
		d.count, d.host, d.rule = d.count+max(e.Count, 1), hosts[i], e.Rule
	}
}

// stopForModel asks the runner of a job to stop its agent and to upload its
// results.
func (s *Service) stopForModel(ctx context.Context, id string, d modelDenials) error {
	_, err := s.cfg.Store.UpdateJob(ctx, id, func(j *agentlab.Job) ([]agentlab.Event, error) {
		if j.Status != agentlab.JobRunning || j.StopRequested != "" {
			return nil, nil
		}
		j.StopRequested, j.Reason = string(agentlab.JobFailed), agentlab.Reason(d.String())
		return []agentlab.Event{jobEvent(agentlab.EventJobStatus, *j, map[string]any{"status": j.Status, "stop": j.StopRequested, "host": d.host, "rule": d.rule},
			"job %s will end: %s", id, j.Reason)}, nil
	})
	return err
}

// NarrowNetwork narrows the network policy of a sandbox by the policy of its
// job's repository. Unless that is strict, what the job itself needs stays
// allowed as far as its profile allows it. Codes: denied, invalid, conflict,
// unsupported, limit, unavailable.
func (s *Service) NarrowNetwork(ctx context.Context, vmid int, n guestapi.NetworkNarrow) error {
	j, err := s.jobOf(ctx, vmid)
	if err != nil {
		return err
	}
	layer := layerFrom(n)
	if _, err := egress.New(layer); err != nil {
		return err
	}
	if !n.Strict {
		layer = allowModelAndForge(layer, j)
	}
	return s.cfg.Sandboxes.NarrowNetwork(ctx, vmid, layer)
}

func layerFrom(n guestapi.NetworkNarrow) agentlab.Network {
	const source = "the repository"
	layer := agentlab.Network{Mode: n.Mode, Ports: n.Ports}
	for _, r := range n.Allow {
		layer.Allow = append(layer.Allow, agentlab.NetworkRule{Rule: r, Source: source})
	}
	for _, r := range n.Deny {
		layer.Deny = append(layer.Deny, agentlab.NetworkRule{Rule: r, Source: source})
	}
	return layer
}

// allowModelAndForge adds rules to a valid layer for what a job needs: its model and
// the host of its repository. No rule of a layer can extend the policy below it. A deny
// rule for one of them stays in force.
func allowModelAndForge(layer agentlab.Network, j agentlab.Job) agentlab.Network {
	var needs []string
	private := map[string]agentlab.PrivateTarget{}
	for _, host := range append(slices.Clone(j.ModelHosts), forgeOf(j.RepoURL)) {
		alone := agentlab.Network{Mode: agentlab.NetworkAllowlist, Allow: []agentlab.NetworkRule{{Rule: host}}}
		if t, ok := privateNeed(host, j.Agent); ok { // the profile may allow it
			needs, private[host] = append(needs, host), t
		} else if _, err := egress.New(alone); err == nil { // otherwise no allow rule can match it
			needs = append(needs, host)
		}
	}
	if layer.Mode == agentlab.NetworkOff && len(needs) > 0 {
		layer.Mode = agentlab.NetworkAllowlist
	}
	for _, need := range needs {
		switch {
		case layer.Mode == agentlab.NetworkAllowlist && private[need].Host != "":
			layer.Private = append(layer.Private, private[need])
		case layer.Mode == agentlab.NetworkAllowlist:
			layer.Allow = append(layer.Allow, agentlab.NetworkRule{Rule: need, Source: "agent " + j.Agent})
		case len(layer.Ports) > 0:
			if port := need[strings.LastIndexByte(need, ':')+1:]; !slices.Contains(layer.Ports, port) {
				layer.Ports = append(slices.Clone(layer.Ports), port)
			}
		}
	}
	return layer
}

// privateNeed returns an address that a job needs as a private destination, if
// an operator can allow it. Names need none: an allow rule covers them.
func privateNeed(host, agent string) (agentlab.PrivateTarget, bool) {
	at, err := netip.ParseAddrPort(host)
	if err != nil || !egress.Openable(at.Addr()) {
		return agentlab.PrivateTarget{}, false
	}
	return agentlab.PrivateTarget{Host: at.Addr().String(), Port: int(at.Port()), Reason: "agent " + agent}, true
}
