package supervisor

import (
	"context"
	"encoding/json"
	"net/http"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/egress"
)

// maxNetwork bounds the policy that a supervisor takes, in bytes.
const maxNetwork = 8 << 20

// serveNetwork puts another policy in force.
func (s *supervisor) serveNetwork(w http.ResponseWriter, r *http.Request) {
	var n agentlab.Network
	dec := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxNetwork))
	dec.DisallowUnknownFields() // what is not understood must not be left out
	if err := dec.Decode(&n); err != nil {
		writeFault(w, agentlab.Errorf(agentlab.CodeInvalid, "the network cannot be read: %w", err))
		return
	}
	if err := s.await(r.Context(), func(st runState) bool { return st.Phase != phaseStarting }); err != nil {
		return
	}
	if err := s.setNetwork(r.Context(), n); err != nil {
		s.log.Error("the network's policy was not changed", "err", err)
		writeFault(w, err)
		return
	}
	s.log.Info("the network's policy was changed", "mode", n.Mode)
	writeJSONBody(w, http.StatusOK, s.status())
}

// setNetwork compiles, writes and then enforces a policy. What fails leaves
// the old one. A change whose client has gone is not made: another client may
// have asked for another policy since, and that one counts.
func (s *supervisor) setNetwork(ctx context.Context, n agentlab.Network) error {
	s.netMu.Lock() // one change at a time, so that disk and memory agree
	defer s.netMu.Unlock()
	p, err := egress.New(n)
	if err != nil {
		return err
	}
	if ctx.Err() != nil {
		return agentlab.Errorf(agentlab.CodeUnavailable, "the client that asked for the change has gone")
	}
	if err := s.vm.StoreNetwork(n); err != nil {
		return err
	}
	s.mu.Lock()
	network := s.net
	s.mu.Unlock()
	if network != nil {
		network.SetPolicy(p)
	}
	return nil
}
