package qemu

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"path/filepath"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/egress"
)

// updatePatience bounds a change of the network.
const updatePatience = 20 * time.Second

// UpdateNetwork implements backend.NetworkUpdater.
func (d *Driver) UpdateNetwork(ctx context.Context, ref backend.Ref, n agentlab.Network) error {
	if err := validNetwork(n); err != nil {
		return err
	}
	unlock, err := d.begin(ctx, ref)
	if err != nil {
		return err
	}
	defer unlock()
	return d.updateNetwork(ctx, ref, n)
}

// updateNetwork is UpdateNetwork with the sandbox's lock held.
func (d *Driver) updateNetwork(ctx context.Context, ref backend.Ref, n agentlab.Network) error {
	return d.change(ctx, ref, "network", func(h handle) error {
		h.Spec.Network = n
		if err := writeJSON(filepath.Join(d.dir(ref), fileConfig), h); err != nil {
			return fault(err, "cannot write %s of sandbox %d", fileConfig, ref.VMID)
		}
		return nil
	}, func(ctx context.Context, c shimClient) error { return c.setNetwork(ctx, n) })
}

// change changes what holds for a sandbox that may run; the caller holds its
// lock. Whoever holds the shim's lock writes the files: the shim while there
// is one, else we. So what is on the disk and what is in force never differ for
// longer than one step of one process, whose death ends the VM.
func (d *Driver) change(ctx context.Context, ref backend.Ref, what string, stopped func(handle) error, running func(context.Context, shimClient) error) error {
	ctx, cancel := context.WithTimeoutCause(ctx, updatePatience, errors.New("the supervisor does not answer in time"))
	defer cancel()
	dir := d.dir(ref)
	for {
		h, err := d.load(ref)
		if err != nil {
			return err
		}
		lock, err := d.takeShimLock(dir)
		if err != nil {
			return err
		}
		if lock != nil {
			defer func() { _ = lock.Close() }()
			return stopped(h)
		}
		err = running(ctx, shimClient(dir))
		if err == nil || agentlab.CodeOf(err) != agentlab.CodeUnavailable {
			return err
		}
		// It may be about to open its socket, or on its way out.
		if perr := pause(ctx, 20*time.Millisecond); perr != nil {
			return agentlab.Errorf(agentlab.CodeUnavailable, "changing the %s of sandbox %d: %w", what, ref.VMID, errors.Join(perr, err))
		}
	}
}

// maxNetwork bounds the policy that a shim takes, in bytes.
const maxNetwork = 8 << 20

// serveNetwork puts another policy in force.
func (s *shim) serveNetwork(w http.ResponseWriter, r *http.Request) {
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
// the old one. A change whose asker is gone is not made: somebody may have
// asked for another meanwhile, and that one counts.
func (s *shim) setNetwork(ctx context.Context, n agentlab.Network) error {
	s.netMu.Lock() // one change at a time, so that disk and memory agree
	defer s.netMu.Unlock()
	p, err := egress.New(n)
	if err != nil {
		return err
	}
	if ctx.Err() != nil {
		return agentlab.Errorf(agentlab.CodeUnavailable, "whoever asked for the change is gone")
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
