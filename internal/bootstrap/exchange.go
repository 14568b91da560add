package bootstrap

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/egress"
	"github.com/agentlab-vm/agentlab/internal/guestcheck"
	"github.com/agentlab-vm/agentlab/internal/job"
	"github.com/agentlab-vm/agentlab/internal/redact"
	"github.com/agentlab-vm/agentlab/internal/secret"
)

// Exchange exchanges the one-time token of a sandbox, given as its hash, for
// what its runner needs: the job, if it is not final, and those secrets of the
// profile that the job needs. In the same transaction the job becomes RUNNING
// and gets its deadline. Code denied if the token is not valid or no longer
// wanted; after any other error it can be used again.
//
// Calls for one sandbox are answered one after the other, so that references
// are resolved for one caller at a time, and no longer after the first answer.
func (s *Service) Exchange(ctx context.Context, vmid int, tokenHash string) (guestapi.BootstrapResponse, error) {
	none := guestapi.BootstrapResponse{}
	// This check is first: a caller without a token learns nothing and changes
	// nothing.
	if err := s.cfg.Store.CheckBootstrap(ctx, tokenHash, vmid); err != nil {
		return none, err
	}
	sb, err := s.cfg.Store.Sandbox(ctx, vmid)
	if err != nil {
		return none, err
	}
	done, err := s.lock(ctx, sb.UID)
	if err != nil {
		return none, err
	}
	defer done()
	sb, row, err := s.recipient(ctx, vmid, tokenHash) // the wait may have taken some time
	if err != nil {
		return none, err
	}
	prof, bundle, err := s.secretsFor(ctx, sb.Profile, row)
	if err != nil {
		return none, s.secretsUnavailable(ctx, sb, row, err)
	}
	j := row
	if row != nil && row.Status.Final() {
		j = nil // its sandbox is kept, or not destroyed yet: there is no work
	}
	hosts, prepared, err := s.forAttempts(ctx, sb, row, &bundle)
	if err != nil {
		return none, err
	}
	resp, grants := s.answer(sb, j, prof, bundle)
	if resp.Job != nil {
		resp.Job.Prepared = prepared
		if err := s.describePreparation(ctx, sb, *row, resp.Job); err != nil {
			return none, err
		}
	}
	_, stored, err := s.cfg.Secrets.Delivered(secretsKey(sb))
	if err != nil {
		return none, s.secretsUnavailable(ctx, sb, row, err)
	}
	stored = stored || len(bundle.Keys()) > 0
	if stored { // also for a job that has ended: its sandbox may still write to its console
		if err := s.cfg.Secrets.SaveDelivered(ctx, secretsKey(sb), secretValues(resp, bundle)); err != nil {
			return none, s.secretsUnavailable(ctx, sb, row, err)
		}
	}
	err = s.cfg.Store.ConsumeBootstrap(ctx, tokenHash, vmid, grants, func(sb *agentlab.Sandbox, row *agentlab.Job) ([]agentlab.Event, error) {
		if err := checkDeliverable(*sb, row); err != nil || j == nil || row == nil { // the rows may have changed in the meantime
			return nil, err
		}
		return s.begin(sb, row, hosts, resp.Job)
	})
	if err != nil {
		return none, err
	}
	var r *redact.Redactor
	if j != nil && !stored {
		r = redact.New(secretValues(resp, bundle)...)
	}
	s.delivered(sb, r)
	return resp, nil
}

// recipient returns the sandbox of a token and its job, nil if it has none. Code denied
// if the guest must not get an answer.
func (s *Service) recipient(ctx context.Context, vmid int, tokenHash string) (sb agentlab.Sandbox, row *agentlab.Job, err error) {
	if err = s.cfg.Store.CheckBootstrap(ctx, tokenHash, vmid); err != nil {
		return sb, nil, err
	}
	if sb, err = s.cfg.Store.Sandbox(ctx, vmid); err != nil {
		return sb, nil, err
	}
	if row, err = s.jobOf(ctx, sb); err != nil {
		return sb, nil, err
	}
	return sb, row, checkDeliverable(sb, row)
}

// checkDeliverable returns an error with code denied if the guest of a sandbox
// must no longer get an answer: the sandbox ends, or its job has ended and it is
// not kept. j is nil if the sandbox has no job or its row was deleted.
func checkDeliverable(sb agentlab.Sandbox, j *agentlab.Job) error {
	switch {
	case sb.Desired == agentlab.DesiredDestroyed || sb.Desired == agentlab.DesiredStopped:
		return agentlab.Errorf(agentlab.CodeDenied, "sandbox %d is about to be %s", sb.VMID, sb.Desired)
	case sb.JobID != "" && (j == nil || j.Status.Final()) && !sb.Keepalive:
		return agentlab.Errorf(agentlab.CodeDenied, "%s has ended", sb.JobID)
	}
	return nil
}

// forAttempts returns the model endpoints of a job, and the commit that its
// sandbox was prepared with, "" if it was not. It removes from the bundle what
// these do not need: a job that prepares the sandbox of attempts gets only the
// Git credential, and an attempt that continues one gets none. The model
// endpoints of the former are those of all its attempts, because its narrowed
// network policy holds for them too.
func (s *Service) forAttempts(ctx context.Context, sb agentlab.Sandbox, row *agentlab.Job, b *secret.Bundle) (hosts []string, prepared string, err error) {
	if row == nil || row.ParentID == "" || !row.Prepares() && sb.From.Snapshot == "" {
		if row != nil {
			hosts = job.ModelHosts(*row, *b)
		}
		return hosts, "", nil
	}
	family, err := s.cfg.Store.Jobs(ctx, agentlab.JobFilter{ParentID: row.ParentID})
	if err != nil {
		return nil, "", err
	}
	for _, j := range family {
		switch {
		case row.Prepares():
			hosts = append(hosts, job.ModelHosts(j, *b)...)
		case j.Prepares():
			prepared = j.Result.BaseCommit
		}
	}
	if !row.Prepares() {
		hosts, b.Git = job.ModelHosts(*row, *b), secret.Git{}
		return hosts, prepared, nil
	}
	git := b.Git
	if *b = (secret.Bundle{}); row.RepoURL != "" {
		b.Git = git
	}
	slices.Sort(hosts)
	return slices.Compact(hosts), "", nil
}

// describePreparation completes the job for a runner that prepares a sandbox, or works in
// one that was prepared for its job.
func (s *Service) describePreparation(ctx context.Context, sb agentlab.Sandbox, row agentlab.Job, j *guestapi.Job) (err error) {
	if row.Prepares() { // it has the image of the attempts, which may be the default
		p, err := s.cfg.Store.Job(ctx, row.ParentID)
		j.ImageChosen = p.Image != ""
		return err
	}
	if row.Setup.Entry.Key != "" && sb.From.Snapshot != "" {
		j.Prepared, err = s.preparedFor(ctx, row)
		j.Reuse = row.Setup.Reused
	}
	return err
}

// preparedFor returns the commit with which the sandbox of a job was prepared for itself,
// "" if it is a copy of that of an earlier job.
func (s *Service) preparedFor(ctx context.Context, row agentlab.Job) (string, error) {
	if row.Setup.Reused {
		return "", nil
	}
	family, err := s.cfg.Store.Jobs(ctx, agentlab.JobFilter{ParentID: row.ID})
	for _, j := range family {
		if j.Prepares() {
			return j.Result.BaseCommit, err
		}
	}
	return "", err
}

// begin changes a job to RUNNING and sets resp.Seconds to its remaining time,
// which is less than its TTL if the first answer was lost.
func (s *Service) begin(sb *agentlab.Sandbox, j *agentlab.Job, hosts []string, resp *guestapi.Job) ([]agentlab.Event, error) {
	now := s.clock().UTC()
	if j.Status == agentlab.JobQueued {
		j.Phase = guestcheck.Phases[0]
	}
	j.ModelHosts = hosts
	evs, err := j.Begin(sb, now, s.cfg.UploadWindow+job.LeaseSlack)
	resp.Seconds = max(int64(j.DeadlineAt.Sub(now).Seconds()), 1)
	return evs, err
}

// delivered records a successful exchange. It shows that the token arrived,
// even if the guest has not confirmed it. r is the redactor of secrets that are
// not stored, nil if there are none.
func (s *Service) delivered(sb agentlab.Sandbox, r *redact.Redactor) {
	now := s.clock()
	s.with(sb.UID, func(d *delivery) {
		d.token, d.tradedAt, d.trouble, d.failures = "", now, "", 0
		delete(s.redactors, secretsKey(sb)) // it was built from an earlier answer
		if r != nil {
			s.redactors[secretsKey(sb)] = &redaction{r: r}
		}
	})
}

// lock waits until there is no other exchange for a sandbox.
func (s *Service) lock(ctx context.Context, uid string) (unlock func(), err error) {
	end, err := s.turns.Lock(ctx, uid)
	if err != nil {
		return nil, agentlab.Errorf(agentlab.CodeUnavailable, "the request was cancelled: %w", err)
	}
	s.with(uid, func(d *delivery) { d.exchanging = true })
	return func() {
		s.mu.Lock()
		if d := s.deliveries[uid]; d != nil { // the sandbox may have been forgotten
			d.exchanging = false
		}
		s.mu.Unlock()
		end()
	}, nil
}

// creationTime is longer than the creation of a job takes.
const creationTime = time.Hour

// jobOf returns the job of a sandbox. It is nil if the sandbox has none, or if
// its row was deleted: earlier versions did so by retention. Such a sandbox gets
// what one without a job gets.
func (s *Service) jobOf(ctx context.Context, sb agentlab.Sandbox) (*agentlab.Job, error) {
	if sb.JobID == "" {
		return nil, nil
	}
	row, err := s.cfg.Store.Job(ctx, sb.JobID)
	if agentlab.CodeOf(err) == agentlab.CodeNotFound { // its row is written after the sandbox's
		if s.clock().Sub(sb.CreatedAt) >= creationTime {
			return nil, nil
		}
		return nil, agentlab.Errorf(agentlab.CodeUnavailable, "the job is not stored yet")
	}
	if err != nil {
		return nil, err
	}
	return &row, nil
}

// messagesTTL is longer than any sandbox exists.
const messagesTTL = 10 * 365 * 24 * time.Hour

// answer returns the answer for a runner, and the grants for the tokens in it.
func (s *Service) answer(sb agentlab.Sandbox, j *agentlab.Job, prof agentlab.Profile, b secret.Bundle) (guestapi.BootstrapResponse, []agentlab.Grant) {
	resp := guestapi.BootstrapResponse{
		Env:    maps.Clone(b.Env),
		Policy: guestapi.Policy{AllowedDomains: []string{}, Mode: prof.Mode},

		CACertificates: prof.CACertificates, Workspace: sb.Workspace != "",
	}
	if p, err := egress.New(sb.Network); err == nil { // the enforcer compiled the same policy
		resp.Policy.AllowedDomains = p.AllowedDomains()
	}
	if s.cfg.Cache != nil {
		resp.Cache = s.cfg.Cache.Settings(sb, prof)
	}
	if b.Git != (secret.Git{}) {
		g := guestapi.Git(b.Git)
		resp.Git = &g
	}
	if b.Artifact != (secret.Artifact{}) {
		resp.ArtifactStore = &guestapi.ArtifactTarget{Endpoint: b.Artifact.Endpoint, Token: b.Artifact.Token}
	}
	resp.SSHKeys, resp.ClaudeSettingsJSON = maps.Clone(b.SSHKeys), b.ClaudeSettingsJSON
	var grants []agentlab.Grant
	grant := func(kind string, ends time.Time) string {
		token, hash := secret.MintToken()
		grants = append(grants, agentlab.Grant{Hash: hash, Kind: kind, VMID: sb.VMID, JobID: sb.JobID, ExpiresAt: ends})
		return token
	}
	now := s.clock().UTC()
	resp.Messages.Token = grant(agentlab.GrantMessages, now.Add(messagesTTL)) // it is deleted with the sandbox
	if j == nil {
		return resp, grants
	}
	resp.Policy.Mode = j.Mode
	clonePath := prof.ClonePath
	if resp.Workspace && !strings.HasPrefix(clonePath, guestapi.WorkspaceDir+"/") {
		clonePath = "" // the checkout is on the workspace
	}
	resp.Job = &guestapi.Job{
		ID: j.ID, RepoURL: j.RepoURL, Bundled: j.Bundled, Ref: j.Ref, Depth: j.Depth, Task: j.Task, Agent: j.Agent, Mode: j.Mode,
		ClonePath: clonePath, Seconds: int64(j.TTL.Seconds()), Upload: prof.UploadArtifacts, Keepalive: j.Keepalive,
		NoSetup: j.NoSetup, Branch: j.Branch, ImageChosen: j.Image != "", Devcontainer: cmp.Or(j.Devcontainer, prof.Devcontainer),
	}
	resp.Job.Image, _, _ = strings.Cut(sb.Image, "@")
	if j.ParentID != "" {
		resp.Job.Branch, resp.Job.Judge, resp.Job.NoPush, resp.Job.Prepare = agentlab.WorkBranch("", j.ParentID), j.Pick, true, j.Prepares()
	}
	if j.Salvages != "" {
		resp.Job.Salvage, resp.Job.NoPush = true, true
	}
	if prof.InnerSandbox != "" {
		resp.Job.Inner = &guestapi.InnerSandbox{Kind: prof.InnerSandbox, Args: prof.InnerArgs}
	}
	ends := now.Add(j.TTL + s.cfg.UploadWindow)
	resp.Runner.Token = grant(agentlab.GrantRunner, ends)
	if prof.UploadArtifacts {
		resp.Artifact = &guestapi.ArtifactTarget{Endpoint: s.cfg.Backends.Info(sb.Backend).UploadURL, Token: grant(agentlab.GrantUpload, ends), MaxBytes: s.cfg.ArtifactBytes}
	}
	return resp, grants
}

// secretsFor opens the secrets bundle of a profile. It returns the values that
// a job needs, or all values for a sandbox without a job. The bundle is empty
// if the profile has none.
func (s *Service) secretsFor(ctx context.Context, profile string, j *agentlab.Job) (agentlab.Profile, secret.Bundle, error) {
	prof, err := s.cfg.Profiles.Use(profile)
	if err != nil || prof.SecretsBundle == "" {
		return prof, secret.Bundle{}, err
	}
	b, err := s.cfg.Secrets.Deliver(ctx, prof.SecretsBundle, func(key string) bool { return needsSecret(j, prof, key) })
	return prof, b, err
}

// needsSecret reports whether a job needs the secret under a key. The others
// are neither delivered nor resolved. For a job that prepares the sandbox of
// attempts, forAttempts needs the keys that select their models.
func needsSecret(j *agentlab.Job, prof agentlab.Profile, key string) bool {
	part, _, _ := strings.Cut(key, ".")
	switch {
	case j != nil && j.Salvages != "":
		return false
	case j != nil && j.Prepares():
		return part == "env" || part == "claude_settings_json" || part == "git" && j.RepoURL != ""
	case part == "artifact": // only jobs have artifacts to copy
		return j != nil && !j.Status.Final() && prof.UploadArtifacts
	case j == nil || j.Agent == agentlab.AgentNone: // a user works in the sandbox
		return true
	case part == "git":
		return j.RepoURL != ""
	case part == "claude_settings_json":
		return j.Agent == "claude"
	}
	return true
}

// secretValues returns every secret in an answer.
func secretValues(resp guestapi.BootstrapResponse, b secret.Bundle) []string {
	out := append(b.Values(), redact.SettingsSecrets(b.ClaudeSettingsJSON)...)
	out = append(out, resp.Runner.Token, resp.Messages.Token)
	if resp.Artifact != nil {
		out = append(out, resp.Artifact.Token)
	}
	return out
}

// maxFailures is how many times in a row the secrets of a job may be
// unavailable before the job ends.
const maxFailures = 5

// secretsUnavailable ends a QUEUED job if its profile or secrets no longer
// exist, or if they were unavailable maxFailures times; a RUNNING job has its
// secrets. For a sandbox without a job it writes an event. The runner does not
// learn the reason.
func (s *Service) secretsUnavailable(ctx context.Context, sb agentlab.Sandbox, j *agentlab.Job, cause error) error {
	s.log.Error("the secrets of a sandbox cannot be delivered", "vmid", sb.VMID, "err", cause)
	refused := agentlab.Errorf(agentlab.CodeUnavailable, "the secrets are not available now")
	if ctx.Err() != nil || j != nil && j.Status != agentlab.JobQueued { // the runner did not wait, or the job has its secrets
		return refused
	}
	why := agentlab.Reason("its profile's secrets are not available: " + cause.Error())
	reported, failures := false, 0
	s.with(sb.UID, func(d *delivery) {
		d.failures++
		reported, failures = d.trouble == why, d.failures
		d.trouble = why
	})
	if j == nil {
		if reported {
			return refused
		}
		data := map[string]any{"state": sb.State, "code": agentlab.CodeOf(cause)}
		e := agentlab.NewEvent(agentlab.EventSandboxState, data, "sandbox %s: %s", sb.Name, why).About(sb.VMID, "")
		return errors.Join(refused, s.cfg.Store.AppendEvents(ctx, e))
	}
	switch agentlab.CodeOf(cause) {
	case agentlab.CodeInvalid, agentlab.CodeNotFound, agentlab.CodeDenied, agentlab.CodeUnsupported, agentlab.CodeConflict:
	default:
		if failures < maxFailures {
			return refused
		}
		why += fmt.Sprintf(" (tried %d times)", failures)
	}
	_, err := s.cfg.Store.UpdateJob(ctx, j.ID, func(j *agentlab.Job) ([]agentlab.Event, error) {
		if j.Status != agentlab.JobQueued {
			return nil, nil
		}
		return []agentlab.Event{j.End(agentlab.JobFailed, why, s.clock())}, nil
	})
	if err != nil {
		return errors.Join(err, cause)
	}
	return refused
}
