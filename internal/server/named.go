package server

import (
	"cmp"
	"context"
	"slices"
	"strings"

	"github.com/agentlab-vm/agentlab"
)

// The verbs for what the body of a request names: a token needs them in addition to
// the verb of the route. Without them, a token for one kind of call could use any
// secret or workspace, because it may name any profile or workspace there.
const (
	verbUseSecrets    = "secret.read"      // a profile with a secrets bundle
	verbUseWorkspace  = "workspace.write"  // a workspace
	verbCreateSandbox = "sandbox.create"   // a sandbox, by a call with another verb
	verbUseSession    = "session.write"    // a session
	verbCopySandboxes = "sandbox.snapshot" // a snapshot of a sandbox, or the disk of one
)

// requireVerb rejects a caller with a token that lacks a verb.
func requireVerb(ctx context.Context, verb string, role Access) error {
	if t := callerOf(ctx).token; t != nil && !t.May(verb) {
		return needsVerb(verb, role)
	}
	return nil
}

// mayUseProfile rejects a token that may not use the secrets of a profile; "" is the
// default profile.
func (s *Server) mayUseProfile(ctx context.Context, name string) error {
	denied := requireVerb(ctx, verbUseSecrets, AccessWrite)
	if denied == nil {
		return nil
	}
	e, err := s.cfg.Services.Profiles.Find(cmp.Or(name, s.cfg.DefaultProfile))
	if err != nil {
		return err
	}
	if e.Profile.SecretsBundle != "" {
		return denied
	}
	return nil
}

// mayRunJob rejects a token without the verbs of what a request for a job names. The
// session of the job, and the workspace of that, are not a part of it.
func (s *Server) mayRunJob(ctx context.Context, r agentlab.JobRequest) error {
	if r.Workspace != nil && r.Workspace.Workspace != "" && r.Session == "" {
		if err := requireVerb(ctx, verbUseWorkspace, AccessWrite); err != nil {
			return err
		}
	}
	return s.mayUseProfile(ctx, r.Profile)
}

// mayCreateSandbox rejects a token without the verbs of what a request for a sandbox
// names. A maintenance sandbox gets no secrets.
func (s *Server) mayCreateSandbox(ctx context.Context, r agentlab.SandboxRequest) error {
	var verbs []string
	if r.Job != nil {
		verbs = append(verbs, verbRunJobs)
	}
	if r.Workspace != nil {
		verbs = append(verbs, verbUseWorkspace)
	}
	if r.From != "" {
		verbs = append(verbs, verbCopySandboxes)
	}
	for _, verb := range verbs {
		if err := requireVerb(ctx, verb, AccessWrite); err != nil {
			return err
		}
	}
	switch {
	case r.Maintenance != "":
		return nil
	case r.Job != nil:
		job := *r.Job
		job.Profile = cmp.Or(job.Profile, r.Profile)
		return s.mayRunJob(ctx, job)
	case r.From != "":
		if err := s.mayUseSnapshot(ctx, r.From); err != nil || r.Profile == "" {
			return err
		}
	}
	return s.mayUseProfile(ctx, r.Profile)
}

// mayUseSnapshot rejects a token that may not use the secrets of the profile of the
// snapshot SANDBOX/NAME. The name may be that of several, of sandboxes with one name.
func (s *Server) mayUseSnapshot(ctx context.Context, from string) error {
	if requireVerb(ctx, verbUseSecrets, AccessWrite) == nil {
		return nil
	}
	sandbox, name, _ := strings.Cut(from, "/")
	list, err := s.cfg.Services.Snapshots.Snapshots(ctx, sandbox)
	if err != nil {
		return err
	}
	list = slices.DeleteFunc(list, func(n agentlab.Snapshot) bool { return n.Name != name })
	if len(list) == 0 {
		return agentlab.Errorf(agentlab.CodeNotFound, "there is no snapshot %s", from).WithField("from_snapshot").WithHint("see 'agentlab sandbox snapshot list'")
	}
	for _, n := range list {
		if err := s.mayUseProfile(ctx, n.Profile); err != nil {
			return err
		}
	}
	return nil
}

// mayUseSession rejects a token that may not use the secrets of the profile of a session,
// and returns the ID of the session, whose name may become that of another one.
func (s *Server) mayUseSession(ctx context.Context, idOrName string) (string, error) {
	if requireVerb(ctx, verbUseSecrets, AccessWrite) == nil {
		return idOrName, nil
	}
	v, err := s.cfg.Services.Sessions.Get(ctx, idOrName)
	if err != nil {
		return "", err
	}
	return v.ID, s.mayUseProfile(ctx, v.Profile)
}
