package server

import (
	"context"
	"slices"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/internal/verify"
)

// Verifier tests the network of a sandbox.
type Verifier interface {
	Run(ctx context.Context, sandbox, site string) (agentlab.Sandbox, verify.Report, error)
}

type verifyInput struct {
	Sandbox string `path:"sandbox" doc:"VMID or name of a sandbox, or name or ID of a session, for its current sandbox"`
	Body    *api.VerifyRequest
}

func (s *Server) verify(ctx context.Context, in *verifyInput) (api.VerifyReport, error) {
	site := ""
	if in.Body != nil {
		site = in.Body.Site
	}
	sb, rep, err := s.cfg.Services.Verify.Run(ctx, in.Sandbox, site)
	if err != nil {
		return api.VerifyReport{}, err
	}
	out := api.VerifyReport{
		VMID: sb.VMID, Name: sb.Name, Profile: sb.Profile, Mode: rep.Mode, OK: rep.OK(),
		Passed: rep.Passed, Failed: rep.Failed, Skipped: rep.Skipped, Records: slices.Contains(rep.Seen, "records"),
	}
	out.Complete = rep.Skipped == 0
	for _, s := range rep.SkipReasons() {
		out.SkipReasons = append(out.SkipReasons, api.VerifySkip{Reason: s.Reason, Count: s.Count})
	}
	for _, o := range rep.Outcomes {
		out.Checks = append(out.Checks, api.Verify{
			ID: o.Check.ID, Shows: o.Check.Shows, Want: string(o.Check.Want), Rule: o.Check.Rule, Status: string(o.Status), Detail: o.Detail,
		})
	}
	return out, nil
}
