package server

import (
	"context"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
)

// Sessions is the session service. Every session is named by its ID or name.
// *session.Service implements it.
type Sessions interface {
	Create(ctx context.Context, r agentlab.SessionRequest) (agentlab.Session, error)
	Get(ctx context.Context, idOrName string) (agentlab.Session, error)
	List(ctx context.Context) ([]agentlab.Session, error)
	History(ctx context.Context, v agentlab.Session) ([]agentlab.SessionSandbox, error)
	Sandbox(ctx context.Context, v agentlab.Session) (sb agentlab.Sandbox, ok bool, err error)
	Resume(ctx context.Context, idOrName string, ttl time.Duration, keepalive *bool) (agentlab.Sandbox, error)
	Stop(ctx context.Context, idOrName string, suspend bool) (agentlab.Sandbox, error)
	Fork(ctx context.Context, idOrName, name, snapshot string) (agentlab.Session, error)
	Rename(ctx context.Context, idOrName, name string) (agentlab.Session, error)
	Delete(ctx context.Context, idOrName string, keep bool) error
	Rebind(ctx context.Context, workspace string, r agentlab.SandboxRequest, force bool) (agentlab.Sandbox, error)
	ForJob(ctx context.Context, idOrName string, r agentlab.JobRequest) (agentlab.JobRequest, error)
}

// sessionRoutes returns the routes for sessions.
func (s *Server) sessionRoutes() []route {
	const all, one = "/v1/sessions", "/v1/sessions/{session}"
	const read, write, remove = "session.read", "session.write", "session.delete"
	return []route{
		{post, all, AccessWrite, write, noTarget, anyOrigin, 201, "create-session", "Create a session, and its workspace unless that exists", call(s.createSession)},
		{get, all, AccessRead, read, noTarget, anyOrigin, 200, "sessions", "List sessions", paged("sessions", s.listSessions, sessionKey)},
		{get, one, AccessRead, read, noTarget, anyOrigin, 200, "session", "Show a session with its history", call(s.getSession)},
		{post, one + "/resume", AccessWrite, write, noTarget, anyOrigin, 202, "resume-session", "Continue the sandbox of a session, or create one", call(s.resumeSession)},
		{post, one + "/stop", AccessWrite, write, noTarget, anyOrigin, 202, "stop-session", "Destroy the sandbox of a session, or suspend it to disk", call(s.stopSession)},
		{post, one + "/fork", AccessWrite, write, noTarget, anyOrigin, 201, "fork-session", "Create a session with a copy of the workspace of another one", call(s.forkSession)},
		{post, one + "/rename", AccessWrite, write, noTarget, anyOrigin, 200, "rename-session", "Change the name of a session", call(s.renameSession)},
		{del, one, AccessWrite, remove, noTarget, anyOrigin, 204, "delete-session", "Delete a session, and move its workspace to the trash", call(s.deleteSession)},
	}
}

// SessionInput is the path parameter of calls about one session.
type SessionInput struct {
	Session string `path:"session" doc:"ID or name of a session"`
}

func (s *Server) toSession(ctx context.Context, v agentlab.Session, err error) (api.Session, error) {
	if err != nil {
		return api.Session{}, err
	}
	out := api.Session{
		ID: v.ID, Name: v.Name, Profile: v.Profile, Image: v.Image, WorkspaceID: v.WorkspaceID, Branch: v.Branch,
		CreatedAt: v.CreatedAt.UTC(), UpdatedAt: v.UpdatedAt.UTC(),
	}
	sb, ok, err := s.cfg.Services.Sessions.Sandbox(ctx, v)
	if ok {
		out.SandboxVMID, out.Sandbox, out.State = sb.VMID, sb.Name, string(sb.State)
	}
	return out, err
}

type createSessionInput struct{ Body api.SessionCreate }

func (s *Server) createSession(ctx context.Context, in *createSessionInput) (api.Session, error) {
	r := agentlab.SessionRequest{Name: in.Body.Name, Profile: in.Body.Profile, Backend: in.Body.Backend, Image: in.Body.Image, Branch: in.Body.Branch, IfMissing: in.Body.IfMissing, Quick: in.Body.Quick}
	if w := in.Body.WorkspaceCreate; w != nil && in.Body.Workspace == "" && w.Name == "" {
		r.Workspace.SizeGB, r.Workspace.Storage = w.SizeGB, w.Storage // of the one with the name of the session
	} else {
		sel, err := selection(in.Body.WorkspaceSelection)
		if err != nil {
			return api.Session{}, err
		}
		if sel != nil {
			r.Workspace = *sel
		}
	}
	if r.Workspace.Workspace != "" {
		if err := requireVerb(ctx, verbUseWorkspace, AccessWrite); err != nil {
			return api.Session{}, err
		}
	}
	if err := s.mayUseProfile(ctx, r.Profile); err != nil {
		return api.Session{}, err
	}
	v, err := s.cfg.Services.Sessions.Create(ctx, r)
	return s.toSession(ctx, v, err)
}

type listSessionsInput struct{ PageInput }

func sessionKey(v api.Session) []string { return []string{timeKey(v.CreatedAt), v.ID} }

func (s *Server) listSessions(ctx context.Context, _ *listSessionsInput) ([]api.Session, error) {
	list, err := s.cfg.Services.Sessions.List(ctx)
	out := make([]api.Session, 0, len(list))
	for _, v := range list {
		one, serr := s.toSession(ctx, v, err)
		if serr != nil {
			return nil, serr
		}
		out = append(out, one)
	}
	return out, err
}

func (s *Server) getSession(ctx context.Context, in *SessionInput) (api.Session, error) {
	v, err := s.cfg.Services.Sessions.Get(ctx, in.Session)
	out, err := s.toSession(ctx, v, err)
	if err != nil {
		return out, err
	}
	history, err := s.cfg.Services.Sessions.History(ctx, v)
	out.History = mapSlice(history, func(h agentlab.SessionSandbox) api.SessionSandbox {
		return api.SessionSandbox{SandboxVMID: h.VMID, SandboxUID: h.UID, Sandbox: h.Name, JobID: h.JobID, CreatedAt: h.CreatedAt.UTC()}
	})
	return out, err
}

type resumeSessionInput struct {
	SessionInput
	Body *api.SessionResume
}

func (s *Server) resumeSession(ctx context.Context, in *resumeSessionInput) (api.Sandbox, error) {
	var r api.SessionResume
	if in.Body != nil {
		r = *in.Body
	}
	id, err := s.mayUseSession(ctx, in.Session)
	if err != nil {
		return api.Sandbox{}, err
	}
	sb, err := s.cfg.Services.Sessions.Resume(ctx, id, minutes(r.TTLMinutes), r.Keepalive)
	return toSandbox(sb), err
}

type stopSessionInput struct {
	SessionInput
	Body *api.SessionStop
}

func (s *Server) stopSession(ctx context.Context, in *stopSessionInput) (api.Sandbox, error) {
	sb, err := s.cfg.Services.Sessions.Stop(ctx, in.Session, in.Body != nil && in.Body.Suspend)
	return toSandbox(sb), err
}

type forkSessionInput struct {
	SessionInput
	Body api.SessionFork
}

func (s *Server) forkSession(ctx context.Context, in *forkSessionInput) (api.Session, error) {
	id, err := s.mayUseSession(ctx, in.Session)
	if err != nil {
		return api.Session{}, err
	}
	v, err := s.cfg.Services.Sessions.Fork(ctx, id, in.Body.Name, in.Body.FromSnapshot)
	return s.toSession(ctx, v, err)
}

type renameSessionInput struct {
	SessionInput
	Body api.SessionRename
}

func (s *Server) renameSession(ctx context.Context, in *renameSessionInput) (api.Session, error) {
	v, err := s.cfg.Services.Sessions.Rename(ctx, in.Session, in.Body.Name)
	return s.toSession(ctx, v, err)
}

type deleteSessionInput struct {
	SessionInput
	KeepWorkspace bool `query:"keep_workspace" doc:"Do not move its workspace to the trash"`
}

func (s *Server) deleteSession(ctx context.Context, in *deleteSessionInput) (none, error) {
	return none{}, s.cfg.Services.Sessions.Delete(ctx, in.Session, in.KeepWorkspace)
}
