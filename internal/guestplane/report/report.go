// Package report is the guest service to which a runner reports, and from which it gets
// its directives.
package report

import (
	"context"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/guestplane"
)

// Jobs is the part of the job service that the runner calls. vmid is always the
// sandbox of the listener, never a value from the guest.
type Jobs interface {
	// Report checks (guestcheck.Report) and stores the state of the
	// sandbox's job. Its text is already redacted. It is idempotent; a
	// report for a final job is not an error.
	Report(ctx context.Context, vmid int, r guestapi.Report) (guestapi.Directive, error)

	// NarrowNetwork narrows the sandbox's network policy, and never widens
	// it. When it returns nil, the narrower policy is in force. A repeated
	// call with the same policy changes nothing.
	NarrowNetwork(ctx context.Context, vmid int, n guestapi.NetworkNarrow) error

	// Directive returns the directive for the runner. With wait > 0 it
	// returns when Stop changes to a non-empty value or after wait,
	// whichever is first.
	Directive(ctx context.Context, vmid int, wait time.Duration) (guestapi.Directive, error)
}

const (
	maxBody = 64 << 10
	maxWait = 55 // seconds
)

// Service returns the guest service.
func Service(jobs Jobs) guestplane.Service {
	s := service{jobs}
	return guestplane.Service{Name: "report", Routes: []guestplane.Route{
		{Method: "POST", Path: guestapi.PathReport, Token: guestplane.Runner, Body: maxBody, Serve: s.report},
		{Method: "GET", Path: guestapi.PathDirective, Token: guestplane.Runner, Serve: s.directive},
		{Method: "POST", Path: guestapi.PathNetwork, Token: guestplane.RunnerAtWork, Body: maxBody, Serve: s.narrowNetwork},
	}}
}

type service struct{ jobs Jobs }

func (s service) report(c *guestplane.Call) (any, error) {
	var rep guestapi.Report
	if err := c.Decode(&rep); err != nil {
		return nil, err
	}
	redactReport(c, &rep)
	return s.jobs.Report(c.Context(), c.VMID, rep)
}

// redactReport removes the job's secrets from all text of a report. The
// message is shortened to one line only afterwards, because a shortened line
// may end in a part of a secret. Then it is redacted again, because joining
// lines may produce a secret.
func redactReport(c *guestplane.Call, rep *guestapi.Report) {
	if rep.Message == "" && (rep.Result == nil || rep.Result.Branch == "") {
		return
	}
	red, err := c.JobRedactor()
	if err != nil {
		rep.Message = "(the message is withheld: it could not be redacted)"
		if rep.Result != nil {
			rep.Result.Branch = ""
		}
		return
	}
	rep.Message = red.String(agentlab.Reason(red.String(rep.Message)))
	if rep.Result != nil && red.String(rep.Result.Branch) != rep.Result.Branch {
		rep.Result.Branch = "redacted"
	}
}

// narrowNetwork handles the network policy of the repository.
func (s service) narrowNetwork(c *guestplane.Call) (any, error) {
	var n guestapi.NetworkNarrow
	if err := c.Decode(&n); err != nil {
		return nil, err
	}
	return nil, s.jobs.NarrowNetwork(c.Context(), c.VMID, n)
}

func (s service) directive(c *guestplane.Call) (any, error) {
	wait, err := c.QueryInt("wait", maxWait)
	if err != nil {
		return nil, err
	}
	return s.jobs.Directive(c.Context(), c.VMID, time.Duration(wait)*time.Second)
}
