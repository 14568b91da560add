package supervisor

import (
	"context"
	"encoding/json"
	"net/http"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/egress"
)

// maxNetwork is the maximum size of a policy that a supervisor accepts, in
// bytes.
const maxNetwork = 8 << 20

// serveNetwork replaces the policy.
func (s *supervisor) serveNetwork(w http.ResponseWriter, r *http.Request) {
	var n agentlab.Network
	dec := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxNetwork))
	dec.DisallowUnknownFields() // an unknown field may be a restriction
	if err := dec.Decode(&n); err != nil {
		writeFault(w, agentlab.Errorf(agentlab.CodeInvalid, "invalid network: %w", err))
		return
	}
	if err := s.await(r.Context(), runState.started); err != nil {
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

// maxRecord is the maximum size of a record that a supervisor accepts, in bytes.
const maxRecord = 16 << 10

// serveEgress appends a decision of the controller to the egress log.
func (s *supervisor) serveEgress(w http.ResponseWriter, r *http.Request) {
	var rec agentlab.EgressRecord
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxRecord)).Decode(&rec); err != nil {
		writeFault(w, agentlab.Errorf(agentlab.CodeInvalid, "invalid record: %w", err))
		return
	}
	s.egressLog.Write(rec)
	writeJSONBody(w, http.StatusOK, s.status())
}

// setNetwork compiles, stores and then enforces a policy. After an error the
// old policy stays. A request whose client has disconnected is dropped, because
// a later request may have set another policy.
func (s *supervisor) setNetwork(ctx context.Context, n agentlab.Network) error {
	s.netMu.Lock() // one change at a time, so that disk and memory agree
	defer s.netMu.Unlock()
	p, err := egress.New(n)
	if err != nil {
		return err
	}
	if ctx.Err() != nil {
		return agentlab.Errorf(agentlab.CodeUnavailable, "the client of the change has disconnected")
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
