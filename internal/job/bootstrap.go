package job

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/egress"
	"github.com/agentlab-vm/agentlab/internal/guestcheck"
	"github.com/agentlab-vm/agentlab/internal/redact"
	"github.com/agentlab-vm/agentlab/internal/secret"
)

// BootstrapFetched trades the one-time token of a sandbox, given as its hash,
// for what its runner needs: the job, while it is not final, and of the
// profile's secrets those that the job has a use for. In the same transaction
// the job becomes RUNNING and gets its deadline. Code denied when the token is
// not good; after any other error it can be used again.
//
// Calls for one sandbox are answered one after the other, so that references
// are resolved for one caller at a time, and for none after the first that
// got its answer.
func (s *Service) BootstrapFetched(ctx context.Context, vmid int, tokenHash string) (guestapi.BootstrapResponse, error) {
	none := guestapi.BootstrapResponse{}
	// First of all: who has no token learns nothing and changes nothing.
	if err := s.cfg.Store.CheckBootstrap(ctx, tokenHash, vmid); err != nil {
		return none, err
	}
	done, err := s.oneAtATime(ctx, vmid)
	if err != nil {
		return none, err
	}
	defer done()
	if err := s.cfg.Store.CheckBootstrap(ctx, tokenHash, vmid); err != nil {
		return none, err
	}
	sb, err := s.cfg.Store.Sandbox(ctx, vmid)
	if err != nil {
		return none, err
	}
	row, err := s.rowOf(ctx, sb)
	if err != nil {
		return none, err
	}
	prof, bundle, err := s.secretsFor(ctx, sb.Profile, row)
	if err != nil {
		return none, s.noSecrets(ctx, sb, row, err)
	}
	j := row
	if row != nil && row.Status.Final() {
		j = nil // its sandbox is kept, or not gone yet: there is no work
	}
	resp, grants := s.bootstrap(sb, j, prof, bundle)
	if len(bundle.Keys()) > 0 { // also of a job that has ended: its sandbox may still write to its console
		if err := s.cfg.Secrets.Keep(ctx, keptAs(sb), known(resp, bundle)); err != nil {
			return none, s.noSecrets(ctx, sb, row, err)
		}
	}
	err = s.cfg.Store.ConsumeBootstrap(ctx, tokenHash, vmid, grants, func(sb *agentlab.Sandbox, row *agentlab.Job) ([]agentlab.Event, error) {
		if j == nil {
			return nil, nil
		}
		row.ModelHosts = jobModelHosts(*row, bundle)
		return s.begin(sb, row, resp.Job)
	})
	if err != nil {
		return none, err
	}
	s.forgetRedactor(keptAs(sb)) // it was made of what was given before
	if j != nil {
		s.mu.Lock()
		l := s.remember(j.ID)
		l.heard, l.used, l.trouble, l.failed = s.clock(), false, "", 0
		if j.Status == agentlab.JobQueued {
			l.down = "" // it begins after its sandbox was started again
		}
		if len(bundle.Keys()) == 0 { // nothing was kept
			s.redactions[j.ID] = &redaction{r: redact.New(known(resp, bundle)...)}
		}
		s.mu.Unlock()
		s.loop.Wake(j.ID)
	}
	s.cfg.Sandboxes.Wake(vmid)
	return resp, nil
}

// asked returns what is remembered of a sandbox whose runner asks; s.mu is
// held.
func (s *Service) asked(vmid int) *asking {
	a := s.asking[vmid]
	if a == nil {
		a = &asking{turn: make(chan struct{}, 1)}
		s.asking[vmid] = a
	}
	return a
}

// oneAtATime waits until no other bootstrap of a sandbox is being answered,
// and returns what lets the next one go on.
func (s *Service) oneAtATime(ctx context.Context, vmid int) (done func(), err error) {
	s.mu.Lock()
	turn := s.asked(vmid).turn
	s.mu.Unlock()
	select {
	case turn <- struct{}{}:
		return func() { <-turn }, nil
	case <-ctx.Done():
		return nil, agentlab.Errorf(agentlab.CodeUnavailable, "the caller left: %w", ctx.Err())
	}
}

// rowOf returns the job of a sandbox, nil when it has none.
func (s *Service) rowOf(ctx context.Context, sb agentlab.Sandbox) (*agentlab.Job, error) {
	if sb.JobID == "" {
		return nil, nil //nolint:nilnil // no job is no error
	}
	row, err := s.cfg.Store.Job(ctx, sb.JobID)
	if agentlab.CodeOf(err) == agentlab.CodeNotFound { // its row is written after the sandbox's
		return nil, agentlab.Errorf(agentlab.CodeUnavailable, "the job is not there yet")
	}
	if err != nil {
		return nil, err
	}
	return &row, nil
}

// begin makes a job RUNNING, and its sandbox when that is READY; one that is
// still BOOTING, because the runner was quicker than we, becomes it later.
func (s *Service) begin(sb *agentlab.Sandbox, j *agentlab.Job, told *guestapi.Job) (evs []agentlab.Event, err error) {
	now := s.clock().UTC()
	switch j.Status {
	case agentlab.JobQueued:
		j.Status, j.Phase, j.StartedAt, j.DeadlineAt = agentlab.JobRunning, guestcheck.Phases[0], now, now.Add(j.TTL)
		j.SandboxVMID, j.Waiting = sb.VMID, ""
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
		evs = append(evs, jobEvent(agentlab.EventSandboxState, *j,
			map[string]any{"from": agentlab.SandboxReady, "to": sb.State}, "sandbox %s is %s", sb.Name, sb.State))
	}
	return evs, nil
}

// bootstrap puts the answer together, and the grants for the tokens in it.
func (s *Service) bootstrap(sb agentlab.Sandbox, j *agentlab.Job, prof agentlab.Profile, b secret.Bundle) (guestapi.BootstrapResponse, []agentlab.Grant) {
	resp := guestapi.BootstrapResponse{
		Env:    maps.Clone(b.Env),
		Policy: guestapi.Policy{AllowedDomains: []string{}, Mode: prof.Mode},

		CACertificates: prof.CACertificates,
	}
	if p, err := egress.New(sb.Network); err == nil { // the enforcer compiled the same
		resp.Policy.AllowedDomains = p.AllowedDomains()
	}
	if b.Git != (secret.Git{}) {
		g := guestapi.Git(b.Git)
		resp.Git = &g
	}
	if b.Artifact != (secret.Artifact{}) {
		resp.ArtifactStore = &guestapi.ArtifactTarget{Endpoint: b.Artifact.Endpoint, Token: b.Artifact.Token}
	}
	resp.SSHKeys, resp.ClaudeSettingsJSON = maps.Clone(b.SSHKeys), b.ClaudeSettingsJSON
	if j == nil {
		return resp, nil
	}
	resp.Policy.Mode = j.Mode
	resp.Job = &guestapi.Job{
		ID: j.ID, RepoURL: j.RepoURL, Bundled: j.Bundled, Ref: j.Ref, Depth: j.Depth, Task: j.Task, Agent: j.Agent, Mode: j.Mode,
		ClonePath: prof.ClonePath, Seconds: int64(j.TTL.Seconds()), Upload: prof.UploadArtifacts, Keepalive: j.Keepalive,
	}
	if prof.InnerSandbox != "" {
		resp.Job.Inner = &guestapi.InnerSandbox{Kind: prof.InnerSandbox, Args: prof.InnerArgs}
	}
	ends := s.clock().UTC().Add(j.TTL + s.lim.UploadWindow)
	var grants []agentlab.Grant
	grant := func(kind string) string {
		token, hash := secret.MintToken()
		grants = append(grants, agentlab.Grant{Hash: hash, Kind: kind, VMID: sb.VMID, JobID: j.ID, ExpiresAt: ends})
		return token
	}
	resp.Runner.Token = grant(agentlab.GrantRunner)
	if prof.UploadArtifacts {
		resp.Artifact = &guestapi.ArtifactTarget{Endpoint: s.cfg.Backend.UploadURL, Token: grant(agentlab.GrantUpload), MaxBytes: s.lim.ArtifactBytes}
	}
	return resp, grants
}

// secretsFor opens the secrets bundle of a profile, empty when it has none:
// of its values those that a job has a use for, or all for a sandbox without
// one.
func (s *Service) secretsFor(ctx context.Context, profile string, j *agentlab.Job) (agentlab.Profile, secret.Bundle, error) {
	prof, err := s.cfg.Profiles.Use(profile)
	if err != nil || prof.SecretsBundle == "" {
		return prof, secret.Bundle{}, err
	}
	b, err := s.cfg.Secrets.Deliver(ctx, prof.SecretsBundle, func(key string) bool { return uses(j, prof, key) })
	return prof, b, err
}

// uses tells whether a job has a use for the secret under a key. What it has
// none for is neither given to it nor resolved.
func uses(j *agentlab.Job, prof agentlab.Profile, key string) bool {
	part, _, _ := strings.Cut(key, ".")
	switch {
	case part == "artifact": // copies of artifacts are made of jobs only
		return j != nil && !j.Status.Final() && prof.UploadArtifacts
	case j == nil || j.Agent == agentlab.AgentNone: // somebody works in the sandbox by hand
		return true
	case part == "git":
		return j.RepoURL != ""
	case part == "claude_settings_json":
		return j.Agent == "claude"
	}
	return true
}

// known lists every secret of an answer.
func known(resp guestapi.BootstrapResponse, b secret.Bundle) []string {
	out := append(b.Values(), redact.SettingsSecrets(b.ClaudeSettingsJSON)...)
	out = append(out, resp.Runner.Token)
	if resp.Artifact != nil {
		out = append(out, resp.Artifact.Token)
	}
	return out
}

// maxFailed is how often in a row the secrets of a job may not be had before
// it ends.
const maxFailed = 5

// noSecrets ends a QUEUED job whose profile or secrets cannot be had any more,
// or could not be had again and again; a job that runs has had them. Of a
// sandbox without a job it tells an event. The runner is told nothing of the
// reason.
func (s *Service) noSecrets(ctx context.Context, sb agentlab.Sandbox, j *agentlab.Job, cause error) error {
	s.log.Error("a sandbox cannot have its profile's secrets", "vmid", sb.VMID, "err", cause)
	refused := agentlab.Errorf(agentlab.CodeUnavailable, "the secrets cannot be had now")
	switch {
	case ctx.Err() != nil: // in the end, the runner did not wait
		return refused
	case j == nil:
		return errors.Join(refused, s.tellTrouble(ctx, sb, cause))
	case j.Status != agentlab.JobQueued:
		return refused
	}
	lasting := false
	switch agentlab.CodeOf(cause) {
	case agentlab.CodeInvalid, agentlab.CodeNotFound, agentlab.CodeDenied, agentlab.CodeUnsupported, agentlab.CodeConflict:
		lasting = true
	default:
	}
	s.mu.Lock()
	l := s.remember(j.ID)
	l.failed++
	l.trouble = "its profile's secrets cannot be had: " + cause.Error()
	why, failed := l.trouble, l.failed
	s.mu.Unlock()
	if failed >= maxFailed && !lasting {
		why += fmt.Sprintf(" (tried %d times)", failed)
		lasting = true
	}
	if lasting {
		if err := s.finishFrom(ctx, j.ID, agentlab.JobFailed, why, agentlab.JobQueued); err != nil {
			return errors.Join(err, cause)
		}
	}
	return refused
}

// tellTrouble tells once that a sandbox without a job has no secrets, and why.
func (s *Service) tellTrouble(ctx context.Context, sb agentlab.Sandbox, cause error) error {
	text := agentlab.Reason("its profile's secrets cannot be had: " + cause.Error())
	s.mu.Lock()
	a := s.asked(sb.VMID)
	known := a.trouble == text
	a.trouble = text
	s.mu.Unlock()
	if known {
		return nil
	}
	data := map[string]any{"state": sb.State, "code": agentlab.CodeOf(cause)}
	return s.cfg.Store.AppendEvents(ctx, agentlab.NewEvent(agentlab.EventSandboxState, data, "sandbox %s: %s", sb.Name, text).About(sb.VMID, ""))
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
