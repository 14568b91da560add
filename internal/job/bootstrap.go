package job

import (
	"context"
	"errors"
	"io"
	"maps"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/guestcheck"
	"github.com/agentlab-vm/agentlab/internal/redact"
	"github.com/agentlab-vm/agentlab/internal/secret"
)

// BootstrapFetched trades the one-time token of a sandbox, given as its hash,
// for what its runner needs: the job, while it is not final, and of the
// profile's secrets those that the job has a use for. In the same transaction
// the job becomes RUNNING and gets its deadline. Code denied when the token is
// not good; after any other error it can be used again.
func (s *Service) BootstrapFetched(ctx context.Context, vmid int, tokenHash string) (guestapi.BootstrapResponse, error) {
	none := guestapi.BootstrapResponse{}
	// First of all: who has no token learns nothing and changes nothing.
	if err := s.cfg.Store.CheckBootstrap(ctx, tokenHash, vmid); err != nil {
		return none, err
	}
	sb, err := s.cfg.Store.Sandbox(ctx, vmid)
	if err != nil {
		return none, err
	}
	var j *agentlab.Job
	if sb.JobID != "" {
		row, err := s.cfg.Store.Job(ctx, sb.JobID)
		if agentlab.CodeOf(err) == agentlab.CodeNotFound { // its row is written after the sandbox's
			return none, agentlab.Errorf(agentlab.CodeUnavailable, "the job is not there yet")
		}
		if err != nil {
			return none, err
		}
		if !row.Status.Final() {
			j = &row
		}
	}
	prof, bundle, err := s.secretsOf(sb.Profile)
	if err != nil {
		return none, s.noSecrets(ctx, j, err)
	}
	resp, grants := s.bootstrap(sb, j, prof, bundle)
	err = s.cfg.Store.ConsumeBootstrap(ctx, tokenHash, vmid, grants, func(sb *agentlab.Sandbox, row *agentlab.Job) ([]agentlab.Event, error) {
		if j == nil {
			return nil, nil
		}
		return s.begin(sb, row, resp.Job)
	})
	if err != nil {
		return none, err
	}
	if j != nil {
		s.mu.Lock()
		l := s.remember(j.ID)
		l.heard, l.used, l.redactor = s.clock(), false, redactorOf(bundle)
		s.mu.Unlock()
		s.loop.Wake(j.ID)
	}
	s.cfg.Sandboxes.Wake(vmid)
	return resp, nil
}

// begin makes a job RUNNING, and its sandbox when that is READY; one that is
// still BOOTING, because the runner was quicker than we, becomes it later.
func (s *Service) begin(sb *agentlab.Sandbox, j *agentlab.Job, told *guestapi.Job) (evs []agentlab.Event, err error) {
	now := s.clock().UTC()
	switch j.Status {
	case agentlab.JobQueued:
		j.Status, j.Phase, j.StartedAt, j.DeadlineAt = agentlab.JobRunning, guestcheck.Phases[0], now, now.Add(j.TTL)
		j.SandboxVMID = sb.VMID
		evs = append(evs, statusEvent(*j))
	case agentlab.JobRunning: // the answer was lost and another token was minted
		told.Seconds = max(int64(j.DeadlineAt.Sub(now).Seconds()), 1)
	default:
		return nil, agentlab.Errorf(agentlab.CodeUnavailable, "%s has ended meanwhile", j.ID)
	}
	if end := j.DeadlineAt.Add(s.lim.UploadWindow + leaseSlack); end.After(sb.LeaseExpiresAt) {
		sb.LeaseExpiresAt = end
	}
	if sb.State == agentlab.SandboxReady {
		sb.State = agentlab.SandboxRunning
		evs = append(evs, agentlab.Event{
			Kind: agentlab.EventSandboxState, SandboxVMID: sb.VMID, JobID: j.ID,
			Message: "sandbox " + sb.Name + " is RUNNING", Data: `{"from":"READY","to":"RUNNING"}`,
		})
	}
	return evs, nil
}

// bootstrap puts the answer together, and the grants for the tokens in it.
func (s *Service) bootstrap(sb agentlab.Sandbox, j *agentlab.Job, prof agentlab.Profile, b secret.Bundle) (guestapi.BootstrapResponse, []Grant) {
	resp := guestapi.BootstrapResponse{
		Env:    maps.Clone(b.Env),
		Policy: guestapi.Policy{AllowedDomains: []string{}, Mode: prof.Mode},
	}
	if sb.Network.Mode == agentlab.NetworkNAT {
		resp.Policy.AllowedDomains = []string{"*"}
	}
	if b.Git != (secret.Git{}) && (j == nil || j.RepoURL != "") {
		g := guestapi.Git(b.Git)
		resp.Git = &g
	}
	if j == nil || j.Agent == "claude" {
		resp.ClaudeSettingsJSON = b.ClaudeSettingsJSON
	}
	if j == nil {
		return resp, nil
	}
	resp.Policy.Mode = j.Mode
	resp.Job = &guestapi.Job{
		ID: j.ID, RepoURL: j.RepoURL, Bundled: j.Bundled, Ref: j.Ref, Depth: j.Depth, Task: j.Task, Agent: j.Agent, Mode: j.Mode,
		ClonePath: prof.ClonePath, Seconds: int64(j.TTL.Seconds()), Upload: prof.UploadArtifacts, Keepalive: j.Keepalive,
	}
	ends := s.clock().UTC().Add(j.TTL + s.lim.UploadWindow)
	var grants []Grant
	grant := func(kind string) string {
		token, hash := secret.MintToken()
		grants = append(grants, Grant{Hash: hash, Kind: kind, VMID: sb.VMID, JobID: j.ID, ExpiresAt: ends})
		return token
	}
	resp.Runner.Token = grant(GrantRunner)
	if prof.UploadArtifacts {
		resp.Artifact = &guestapi.ArtifactTarget{Endpoint: s.cfg.Backend.UploadURL, Token: grant(GrantUpload), MaxBytes: s.lim.ArtifactBytes}
	}
	return resp, grants
}

// secretsOf opens the secrets bundle of a profile, empty when it has none.
func (s *Service) secretsOf(profile string) (agentlab.Profile, secret.Bundle, error) {
	prof, err := s.cfg.Profiles.Use(profile)
	if err != nil || prof.SecretsBundle == "" {
		return prof, secret.Bundle{}, err
	}
	b, err := s.cfg.Secrets.Load(prof.SecretsBundle)
	return prof, b, err
}

// redactorOf knows the secrets of b as the runner does.
func redactorOf(b secret.Bundle) *redact.Redactor {
	return redact.New(append(b.Values(), redact.SettingsSecrets(b.ClaudeSettingsJSON)...)...)
}

// noSecrets ends a QUEUED job whose profile or secrets cannot be had any more;
// trouble that may pass ends nothing, and a job that runs has had them. The
// runner is told nothing of the reason.
func (s *Service) noSecrets(ctx context.Context, j *agentlab.Job, cause error) error {
	s.log.Error("a sandbox cannot have its profile's secrets", "err", cause)
	lasting := false
	switch agentlab.CodeOf(cause) {
	case agentlab.CodeInvalid, agentlab.CodeNotFound, agentlab.CodeDenied, agentlab.CodeUnsupported:
		lasting = true
	default:
	}
	if j != nil && lasting {
		why := "its profile's secrets cannot be had: " + cause.Error()
		if err := s.finishFrom(ctx, j.ID, agentlab.JobFailed, why, agentlab.JobQueued); err != nil {
			return errors.Join(err, cause)
		}
	}
	return agentlab.Errorf(agentlab.CodeUnavailable, "the secrets cannot be had now")
}

// ConsoleArtifact is the path of the artifact that SaveConsole makes.
const ConsoleArtifact = "console.log"

// SaveConsole keeps the console log of a sandbox that failed as an artifact of
// its job. It is made for sandbox.Config.SaveConsole.
func (s *Service) SaveConsole(ctx context.Context, sb agentlab.Sandbox, console io.Reader) error {
	if sb.JobID == "" || s.cfg.Artifacts == nil {
		return nil
	}
	r, err := s.Redactor(ctx, sb.JobID)
	if err != nil {
		return err
	}
	_, err = s.cfg.Artifacts.Put(ctx, sb.JobID, ConsoleArtifact, r.Reader(console))
	return err
}

// Redactor returns the redactor that knows the secrets that a job was given.
// An error means that nothing may be kept of what its guest says.
func (s *Service) Redactor(ctx context.Context, jobID string) (*redact.Redactor, error) {
	s.mu.Lock()
	if l := s.live[jobID]; l != nil && l.redactor != nil {
		defer s.mu.Unlock()
		return l.redactor, nil
	}
	s.mu.Unlock()
	j, err := s.cfg.Store.Job(ctx, jobID)
	if err != nil {
		return nil, err
	}
	_, b, err := s.secretsOf(j.Profile)
	if err != nil {
		return nil, err
	}
	r := redactorOf(b)
	if !j.Status.Final() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.remember(jobID).redactor = r
	}
	return r, nil
}
