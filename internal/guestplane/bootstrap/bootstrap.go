// Package bootstrap is the guest service that exchanges the one-time token for the job
// and the secrets of a sandbox.
package bootstrap

import (
	"context"
	"net/http"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/guestplane"
)

// Exchanger delivers jobs and secrets; *bootstrap.Service implements it.
type Exchanger interface {
	// Exchange exchanges the one-time token, given as its lower-case hex
	// SHA-256, for everything that the runner of the sandbox needs. In one
	// transaction it consumes the token, stores the grants of the tokens in
	// the answer and changes the job to RUNNING. For unknown, used, expired
	// and other sandboxes' tokens it returns CodeDenied with the same message;
	// after every other error the token can still be used, and the runner
	// tries again.
	Exchange(ctx context.Context, vmid int, tokenHash string) (guestapi.BootstrapResponse, error)
}

// Jobs is called after each successful Exchange; *job.Service implements it.
type Jobs interface {
	Started(ctx context.Context, vmid int)
}

// refusal is how long every refusal of a token takes. It is longer than any check, so
// that the time does not reveal which check failed.
const refusal = 50 * time.Millisecond

const maxBody = 64 << 10

// Service returns the guest service.
func Service(x Exchanger, jobs Jobs) guestplane.Service {
	s := service{x, jobs}
	return guestplane.Service{Name: "bootstrap", Routes: []guestplane.Route{{
		Method: "POST", Path: guestapi.PathBootstrap, Token: guestplane.Channel, Body: maxBody,
		Limits: guestplane.Limits{Rate: 1, Burst: 10}, Serve: s.bootstrap,
	}}}
}

type service struct {
	exchanger Exchanger
	jobs      Jobs
}

// bootstrap exchanges the one-time token. The answer is the same for every
// invalid token.
func (s service) bootstrap(c *guestplane.Call) (any, error) {
	var req guestapi.BootstrapRequest
	if err := c.Decode(&req); err != nil {
		return nil, err
	}
	began := time.Now()
	resp, err := s.fetch(c.Context(), c.VMID, req)
	switch agentlab.CodeOf(err) {
	case "":
		c.Log.Info("bootstrap fetched")
		return resp, nil
	case agentlab.CodeDenied, agentlab.CodeNotFound, agentlab.CodeInvalid, agentlab.CodeConflict:
		c.Log.Warn("bootstrap refused", "err", err)
		waitUntil(c.Context(), began.Add(refusal))
		return nil, &guestplane.Refused{Status: http.StatusForbidden, Code: agentlab.CodeDenied, Message: "the bootstrap token is not valid"}
	}
	return nil, err
}

func waitUntil(ctx context.Context, t time.Time) {
	select {
	case <-time.After(time.Until(t)):
	case <-ctx.Done():
	}
}

// fetch always looks up the token, so that a request for another sandbox takes
// the same time.
func (s service) fetch(ctx context.Context, vmid int, req guestapi.BootstrapRequest) (guestapi.BootstrapResponse, error) {
	ours := req.VMID == vmid && guestplane.Plausible(req.Token)
	hash := guestplane.Hash(req.Token)
	if !ours {
		hash = guestplane.Hash("") // of no token
	}
	resp, err := s.exchanger.Exchange(ctx, vmid, hash)
	if !ours {
		return guestapi.BootstrapResponse{}, agentlab.Errorf(agentlab.CodeDenied, "the request is not for this sandbox")
	}
	if err == nil {
		s.jobs.Started(context.WithoutCancel(ctx), vmid)
	}
	return resp, err
}
