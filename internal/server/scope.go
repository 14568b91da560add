package server

import (
	"context"
	"net/http"
	"slices"
	"strconv"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/adapters/humago"

	"github.com/agentlab-vm/agentlab"
)

// errScope is the error for a token that is restricted to sandboxes. It is the
// same for another sandbox, for one that does not exist, and for none.
var errScope = agentlab.Errorf(agentlab.CodeDenied, "the token is restricted to certain sandboxes, and this call is not for one of them").
	WithHint("use a sandbox or job that the token is valid for, or use another token")

// inScope rejects a call that is not about a sandbox that the token covers.
//
// The VMID replaces the name in the request: a handler that looked the name up
// again might find another sandbox, created with the same name in the
// meantime.
func (s *Server) inScope(hc huma.Context, t target, token *agentlab.APIToken) error {
	req, _ := humago.Unwrap(hc)
	ctx := hc.Context()
	switch t {
	case onSandbox:
		vmid, err := s.checkScope(ctx, token, hc.Param("sandbox"))
		if err != nil {
			return err
		}
		req.SetPathValue("sandbox", vmid)
		return nil
	case onJob:
		id, err := s.checkJobScope(ctx, token, hc.Param("job"))
		if err != nil {
			return err
		}
		req.SetPathValue("job", id)
		return nil
	case byQuery:
		return s.checkQueryScope(req, token)
	case byScope:
		return s.checkMessageScope(req, token)
	}
	return errScope
}

// checkQueryScope requires that the query names a sandbox or a job, or both, and
// that the token covers them.
func (s *Server) checkQueryScope(req *http.Request, token *agentlab.APIToken) error {
	q := req.URL.Query()
	named := false
	if v, ok := q["sandbox"]; ok {
		if len(v) != 1 {
			return errScope
		}
		vmid, err := s.checkScope(req.Context(), token, v[0])
		if err != nil {
			return err
		}
		q.Set("sandbox", vmid)
		named = true
	}
	if v, ok := q["job"]; ok {
		if len(v) != 1 {
			return errScope
		}
		id, err := s.checkJobScope(req.Context(), token, v[0])
		if err != nil {
			return err
		}
		q.Set("job", id)
		named = true
	}
	if !named {
		return errScope
	}
	req.URL.RawQuery = q.Encode()
	return nil
}

// checkMessageScope requires that the query names one job, workspace or session, and
// that the token covers its sandbox: for a workspace, and the session that has it, the
// one that holds it now.
func (s *Server) checkMessageScope(req *http.Request, token *agentlab.APIToken) error {
	q := req.URL.Query()
	jobs, workspaces, sessions := q["job"], q["workspace"], q["session"]
	if len(jobs)+len(workspaces)+len(sessions) != 1 {
		return errScope
	}
	key, id, workspace := "", "", ""
	var err error
	switch {
	case len(jobs) == 1:
		key = "job"
		id, err = s.checkJobScope(req.Context(), token, jobs[0])
	case len(sessions) == 1:
		var v agentlab.Session
		v, err = s.cfg.Services.Sessions.Get(req.Context(), sessions[0])
		key, id, workspace = "session", v.ID, v.WorkspaceID
	default:
		var v agentlab.Workspace
		v, err = s.cfg.Services.Workspaces.Get(req.Context(), workspaces[0])
		key, id, workspace = "workspace", v.ID, v.ID
	}
	switch code := agentlab.CodeOf(err); {
	case code == agentlab.CodeNotFound || code == agentlab.CodeInvalid:
		return errScope
	case err != nil:
		return err
	}
	q.Set(key, id) // a name may become that of another one
	req.URL.RawQuery = q.Encode()
	if workspace == "" {
		return nil
	}
	leases, err := s.cfg.Services.Workspaces.Leases(req.Context(), workspace)
	if err != nil {
		return err
	}
	if !slices.ContainsFunc(leases, func(l agentlab.WorkspaceLease) bool { return l.Acquired() && token.Covers(l.UID) }) {
		return errScope
	}
	return nil
}

// checkScope returns the VMID of the sandbox of that name or VMID, if the token
// covers it.
func (s *Server) checkScope(ctx context.Context, token *agentlab.APIToken, nameOrVMID string) (string, error) {
	sb, err := s.cfg.Services.Sandboxes.Get(ctx, nameOrVMID)
	switch code := agentlab.CodeOf(err); {
	case code == agentlab.CodeNotFound || code == agentlab.CodeInvalid || code == agentlab.CodeConflict: // a session's name is no secret of the token
		return "", errScope
	case err != nil:
		return "", err
	case !token.Covers(sb.UID):
		return "", errScope
	}
	return strconv.Itoa(sb.VMID), nil
}

// expandJobID replaces a prefix of a job's ID in the request by the ID.
func (s *Server) expandJobID(hc huma.Context, r route) error {
	id := hc.Param("job")
	if r.target != onJob || agentlab.ValidateJobID(id) == nil {
		return nil
	}
	j, err := s.cfg.Services.Jobs.Get(hc.Context(), id)
	if err == nil {
		req, _ := humago.Unwrap(hc)
		req.SetPathValue("job", j.ID)
	}
	return err
}

// checkJobScope returns the ID of a job, and an error unless the job belongs to a
// sandbox that the token covers. The row of the sandbox must name the job too:
// another sandbox may have had its number when the job ran.
func (s *Server) checkJobScope(ctx context.Context, token *agentlab.APIToken, id string) (string, error) {
	j, err := s.cfg.Services.Jobs.Get(ctx, id)
	switch code := agentlab.CodeOf(err); {
	case code == agentlab.CodeNotFound || code == agentlab.CodeInvalid:
		return "", errScope
	case err != nil:
		return "", err
	case j.SandboxVMID == 0:
		return "", errScope
	}
	sb, err := s.cfg.Services.Sandboxes.Get(ctx, strconv.Itoa(j.SandboxVMID))
	switch {
	case agentlab.CodeOf(err) == agentlab.CodeNotFound:
		return "", errScope
	case err != nil:
		return "", err
	case !token.Covers(sb.UID) || sb.JobID != j.ID:
		return "", errScope
	}
	return j.ID, nil
}
