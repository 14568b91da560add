// Package session is the service for sessions: a name for a workspace and the sandbox
// that currently uses it.
//
// A session is a record. Its requests are requests to the services of sandboxes and
// workspaces, each of which is written with the session in one transaction; so there is
// nothing to repair after a crash.
package session

import (
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/fleet"
)

// Store is what the service needs of the database. The semantics are those of package
// store.
type Store interface {
	AddSession(ctx context.Context, v agentlab.Session, use agentlab.WorkspaceUse, evs ...agentlab.Event) (agentlab.Session, error)
	UpdateSession(ctx context.Context, id string, fn func(*agentlab.Session) ([]agentlab.Event, error)) (agentlab.Session, error)
	RemoveSession(ctx context.Context, id string, trash func(*agentlab.Workspace) []agentlab.Event, evs ...agentlab.Event) error
	Session(ctx context.Context, id string) (agentlab.Session, error)
	SessionByName(ctx context.Context, name string) (agentlab.Session, error)
	Sessions(ctx context.Context) ([]agentlab.Session, error)
	SessionHistory(ctx context.Context, id string) ([]agentlab.SessionSandbox, error)
	Sandbox(ctx context.Context, vmid int) (agentlab.Sandbox, error)
	WorkspaceLeases(ctx context.Context, workspaceID string) ([]agentlab.WorkspaceLease, error)
	AppendEvents(ctx context.Context, evs ...agentlab.Event) error
}

// Workspaces plans the workspaces of sessions; *workspace.Service implements it.
type Workspaces interface {
	Select(ctx context.Context, sel agentlab.WorkspaceSelection) (agentlab.WorkspaceUse, error)
	PlanFork(ctx context.Context, idOrName, name, snapshot string) (agentlab.WorkspaceUse, error)
	Trash(v *agentlab.Workspace) []agentlab.Event
	Get(ctx context.Context, idOrName string) (agentlab.Workspace, error)
	ReleaseTo(ctx context.Context, idOrName, uid string, force bool) error
}

// Sandboxes are the sandboxes of sessions; *sandbox.Service implements it.
type Sandboxes interface {
	Create(ctx context.Context, r agentlab.SandboxRequest) (agentlab.Sandbox, error)
	Get(ctx context.Context, nameOrVMID string) (agentlab.Sandbox, error)
	Continue(ctx context.Context, vmid int, session agentlab.Session) (agentlab.Sandbox, error)
	Resume(ctx context.Context, vmid int) (agentlab.Sandbox, error)
	Suspend(ctx context.Context, vmid int, toDisk bool) (agentlab.Sandbox, error)
	Destroy(ctx context.Context, vmid int) (agentlab.Sandbox, error)
}

// Profiles returns a profile, or an error with the reason why it cannot be used.
type Profiles interface {
	Use(name string) (agentlab.Profile, error)
}

// builder is implemented by images (fleet.Images) that are built on this machine.
type builder interface {
	// IsPart reports whether the image ref must be built, and extends the image part.
	IsPart(part, ref string) bool
}

// Config is the configuration of a Service. All fields are required.
type Config struct {
	Store          Store
	Workspaces     Workspaces
	Sandboxes      Sandboxes
	Profiles       Profiles
	Fleet          *fleet.Fleet
	DefaultProfile string // of sessions without a profile in the request
	AgentsImage    string // of a quick session
}

// Service manages sessions. Its methods are safe for concurrent use.
type Service struct{ cfg Config }

// New returns a Service.
func New(cfg Config) *Service { return &Service{cfg: cfg} }

// Create stores a session and requests its workspace, unless that exists. Codes:
// invalid, exists, not_found, conflict, limit, unsupported.
func (s *Service) Create(ctx context.Context, r agentlab.SessionRequest) (agentlab.Session, error) {
	made, err := s.create(ctx, r)
	if r.IfMissing && agentlab.CodeOf(err) == agentlab.CodeExists { // perhaps of a request at the same time
		if v, ferr := s.find(ctx, r); ferr == nil {
			return v, nil
		}
	}
	return made, err
}

func (s *Service) create(ctx context.Context, r agentlab.SessionRequest) (agentlab.Session, error) {
	none := agentlab.Session{}
	name := cmp.Or(r.Name, agentlab.SessionNameOf(r.Branch))
	if err := agentlab.ValidateSessionName(name); err != nil {
		return none, err
	}
	if err := agentlab.ValidateRef(r.Branch); r.Branch != "" && err != nil {
		return none, err
	}
	if r.IfMissing {
		if v, err := s.find(ctx, r); agentlab.CodeOf(err) != agentlab.CodeNotFound {
			return v, err
		}
	}
	// Before the workspace is selected, which has the same name.
	switch _, err := s.cfg.Store.SessionByName(ctx, name); {
	case err == nil:
		return none, agentlab.Errorf(agentlab.CodeExists, "there is a session named %q", name).WithField("name").WithHint("choose another name; see 'agentlab session list'")
	case agentlab.CodeOf(err) != agentlab.CodeNotFound:
		return none, err
	}
	prof, err := s.cfg.Profiles.Use(cmp.Or(r.Profile, s.cfg.DefaultProfile))
	if err != nil {
		return none, err
	}
	sel := r.Workspace
	if sel.Backend = r.Backend; sel.Workspace == "" {
		sel.Workspace, sel.Create, sel.Backend = name, true, cmp.Or(r.Backend, prof.Backend)
	}
	use, err := s.cfg.Workspaces.Select(ctx, sel)
	if err != nil {
		return none, err
	}
	images := s.cfg.Fleet.Of(use.Backend).Images
	if r.Image != "" {
		if err := images.Check(r.Image); err != nil {
			return none, err
		}
	}
	if b, ok := images.(builder); ok && r.Quick && r.Image == "" && b.IsPart(s.cfg.AgentsImage, prof.Image) {
		r.Image = s.cfg.AgentsImage
	}
	return s.add(ctx, agentlab.Session{Name: name, Profile: prof.Name, Image: r.Image, WorkspaceID: use.ID, Branch: r.Branch}, use)
}

func (s *Service) find(ctx context.Context, r agentlab.SessionRequest) (agentlab.Session, error) {
	if r.Name != "" {
		v, err := s.cfg.Store.SessionByName(ctx, r.Name)
		if err == nil && r.Branch != "" && v.Branch != r.Branch {
			return v, agentlab.Errorf(agentlab.CodeConflict, "session %s is not for branch %s", v.Name, r.Branch).WithField("branch").
				WithHint("rename it: agentlab session rename %s NAME", v.Name)
		}
		return v, err
	}
	none := agentlab.Session{}
	all, err := s.cfg.Store.Sessions(ctx)
	if err != nil {
		return none, err
	}
	all = slices.DeleteFunc(all, func(v agentlab.Session) bool { return v.Branch != r.Branch })
	switch len(all) {
	case 0:
		return none, agentlab.Errorf(agentlab.CodeNotFound, "there is no session for branch %s", r.Branch)
	case 1:
		return all[0], nil
	}
	return none, agentlab.Errorf(agentlab.CodeConflict, "%d sessions are for a branch %s, for example %s and %s", len(all), r.Branch, all[0].Name, all[1].Name).
		WithField("branch").WithHint("use the name of one, or the command in its repository; list them: agentlab session list")
}

func (s *Service) add(ctx context.Context, v agentlab.Session, use agentlab.WorkspaceUse) (agentlab.Session, error) {
	v.ID = agentlab.NewSessionID()
	return s.cfg.Store.AddSession(ctx, v, use, event(v, agentlab.SessionCreated))
}

func event(v agentlab.Session, what agentlab.SessionAction) agentlab.Event {
	e := agentlab.NewEvent(agentlab.EventSession, map[string]any{"session": v.ID, "name": v.Name, "action": what, "workspace": v.WorkspaceID}, "session %s was %s", v.Name, what)
	e.SandboxVMID = v.VMID
	return e
}

// Get returns the session with that ID or name. Code: not_found.
func (s *Service) Get(ctx context.Context, idOrName string) (agentlab.Session, error) {
	if agentlab.IsSessionID(idOrName) {
		return s.cfg.Store.Session(ctx, idOrName)
	}
	return s.cfg.Store.SessionByName(ctx, idOrName)
}

// List lists all sessions, in the order of their creation.
func (s *Service) List(ctx context.Context) ([]agentlab.Session, error) {
	return s.cfg.Store.Sessions(ctx)
}

// History lists the sandboxes of a session, the newest first.
func (s *Service) History(ctx context.Context, v agentlab.Session) ([]agentlab.SessionSandbox, error) {
	return s.cfg.Store.SessionHistory(ctx, v.ID)
}

// Sandbox returns the current sandbox of a session; ok is false if it has none.
func (s *Service) Sandbox(ctx context.Context, v agentlab.Session) (sb agentlab.Sandbox, ok bool, err error) {
	if v.VMID == 0 {
		return sb, false, nil
	}
	sb, err = s.cfg.Store.Sandbox(ctx, v.VMID)
	switch {
	case agentlab.CodeOf(err) == agentlab.CodeNotFound:
		return sb, false, nil
	case err != nil:
		return sb, false, err
	}
	return sb, sb.UID == v.UID && !sb.State.Final(), nil
}

// Resume continues the current sandbox of a session if it is stopped or suspended, or if
// its VM has crashed, and creates one if there is none, or if its disk does not start.
// Codes are those of sandbox.Service.Create, Continue and Resume; busy while it is being
// stopped.
func (s *Service) Resume(ctx context.Context, idOrName string, ttl time.Duration, keepalive *bool) (agentlab.Sandbox, error) {
	v, err := s.Get(ctx, idOrName)
	if err != nil {
		return agentlab.Sandbox{}, err
	}
	sb, ok, err := s.Sandbox(ctx, v)
	resumed := event(v, agentlab.SessionResumed)
	switch {
	case err != nil:
		return sb, err
	case ok && sb.Desired == agentlab.DesiredDestroyed && sb.State != agentlab.SandboxFailed:
		return sb, agentlab.Errorf(agentlab.CodeConflict, "sandbox %s of session %s is being destroyed", sb.Name, v.Name).WithHint("try again when it is DESTROYED")
	case ok && sb.State == agentlab.SandboxSuspended:
		sb, err = s.cfg.Sandboxes.Resume(ctx, sb.VMID)
	case ok && (sb.State == agentlab.SandboxStopped || sb.StartsAgain()):
		sb, err = s.cfg.Sandboxes.Continue(ctx, sb.VMID, v)
	case ok && (sb.State == agentlab.SandboxTimeout || sb.State == agentlab.SandboxFailed && sb.Desired == agentlab.DesiredStopped):
		return sb, agentlab.Errorf(agentlab.CodeBusy, "sandbox %s of session %s is being stopped", sb.Name, v.Name).WithHint("try again when it is STOPPED")
	case ok && sb.State != agentlab.SandboxFailed:
		return sb, nil
	default:
		sb, err = s.createSandbox(ctx, v, ttl, keepalive)
		resumed.Message = "session " + v.Name + " has a new sandbox"
	}
	if err != nil {
		return sb, err
	}
	resumed.SandboxVMID = sb.VMID
	return sb, s.cfg.Store.AppendEvents(ctx, resumed)
}

// createSandbox creates a sandbox with the name of the session, or a similar one if a sandbox
// has that. It waits for the workspace if the failed sandbox of the session still has it.
func (s *Service) createSandbox(ctx context.Context, v agentlab.Session, ttl time.Duration, keepalive *bool) (agentlab.Sandbox, error) {
	r := agentlab.SandboxRequest{
		Name: v.Name, Profile: v.Profile, Image: v.Image, TTL: ttl, Keepalive: keepalive, Session: v.ID,
		Workspace: &agentlab.WorkspaceSelection{Workspace: v.WorkspaceID},
	}
	leases, err := s.cfg.Store.WorkspaceLeases(ctx, v.WorkspaceID)
	if err != nil {
		return agentlab.Sandbox{}, err
	}
	if len(leases) > 0 && leases[0].UID == v.UID {
		r.Workspace.Wait = rebindWait
	}
	sb, err := s.cfg.Sandboxes.Create(ctx, r)
	if agentlab.CodeOf(err) == agentlab.CodeExists {
		r.Name = v.Name[:min(len(v.Name), 56)] + "-" + agentlab.NewUID()[:6]
		sb, err = s.cfg.Sandboxes.Create(ctx, r)
	}
	return sb, err
}

// Stop destroys the current sandbox of a session, or with suspend suspends it to disk,
// so that Resume continues its processes. Codes: not_found; conflict if it has none.
func (s *Service) Stop(ctx context.Context, idOrName string, suspend bool) (agentlab.Sandbox, error) {
	v, err := s.Get(ctx, idOrName)
	if err != nil {
		return agentlab.Sandbox{}, err
	}
	sb, ok, err := s.Sandbox(ctx, v)
	action := agentlab.SessionStopped
	switch {
	case err != nil:
		return sb, err
	case !ok:
		return sb, s.noSandbox(ctx, v)
	case suspend:
		action = agentlab.SessionSuspended
		sb, err = s.cfg.Sandboxes.Suspend(ctx, sb.VMID, true)
	default:
		sb, err = s.cfg.Sandboxes.Destroy(ctx, sb.VMID)
	}
	if err != nil {
		return sb, err
	}
	return sb, s.cfg.Store.AppendEvents(ctx, event(v, action))
}

// noSandbox returns the error for a session without a current sandbox. It names the
// sandbox that has the workspace, which is that of a job.
func (s *Service) noSandbox(ctx context.Context, v agentlab.Session) error {
	leases, err := s.cfg.Store.WorkspaceLeases(ctx, v.WorkspaceID)
	if err != nil {
		return err
	}
	if len(leases) > 0 {
		sb, err := s.cfg.Store.Sandbox(ctx, leases[0].VMID)
		if err == nil && sb.UID == leases[0].UID {
			return agentlab.Errorf(agentlab.CodeConflict, "session %s has no sandbox of its own; sandbox %s has its workspace", v.Name, sb.Name).
				WithHint("free the workspace: agentlab sandbox destroy %s", sb.Name)
		}
	}
	return agentlab.Errorf(agentlab.CodeConflict, "session %s has no sandbox", v.Name).WithHint("create one: agentlab start in its repository, or agentlab session resume %s", v.Name)
}

// Fork creates a session whose workspace is a copy of that of another one, or of one of
// its snapshots. Codes: not_found, exists, conflict, limit, invalid, unsupported.
func (s *Service) Fork(ctx context.Context, idOrName, name, snapshot string) (agentlab.Session, error) {
	src, err := s.Get(ctx, idOrName)
	if err == nil {
		err = agentlab.ValidateSessionName(name)
	}
	if err != nil {
		return agentlab.Session{}, err
	}
	use, err := s.cfg.Workspaces.PlanFork(ctx, src.WorkspaceID, name, snapshot)
	if err != nil {
		return agentlab.Session{}, err
	}
	return s.add(ctx, agentlab.Session{Name: name, Profile: src.Profile, Image: src.Image, WorkspaceID: use.ID}, use)
}

// Rename changes the name of a session. Codes: not_found, exists, invalid.
func (s *Service) Rename(ctx context.Context, idOrName, name string) (agentlab.Session, error) {
	v, err := s.Get(ctx, idOrName)
	if err == nil {
		err = agentlab.ValidateSessionName(name)
	}
	if err != nil {
		return agentlab.Session{}, err
	}
	return s.cfg.Store.UpdateSession(ctx, v.ID, func(v *agentlab.Session) ([]agentlab.Event, error) {
		v.Name = name
		return []agentlab.Event{event(*v, agentlab.SessionRenamed)}, nil
	})
}

// Delete deletes a session without a sandbox, and moves its workspace to the trash
// unless keep is set. Codes: not_found, conflict.
func (s *Service) Delete(ctx context.Context, idOrName string, keep bool) error {
	v, err := s.Get(ctx, idOrName)
	if err != nil {
		return err
	}
	trash := s.cfg.Workspaces.Trash
	if keep {
		trash = nil
	}
	return s.cfg.Store.RemoveSession(ctx, v.ID, trash, event(v, agentlab.SessionDeleted))
}

// jobWait is how long a job waits for the workspace of its session by default.
const jobWait = time.Hour

// ForJob completes the request for a job in a session: with its workspace, its profile,
// its image and its branch. The profile's default for keepalive does not apply. Codes: not_found, invalid.
func (s *Service) ForJob(ctx context.Context, idOrName string, r agentlab.JobRequest) (agentlab.JobRequest, error) {
	v, err := s.Get(ctx, idOrName)
	if err != nil {
		return r, err
	}
	if r.Workspace != nil && r.Workspace.Workspace != v.WorkspaceID && r.Workspace.Workspace != "" {
		return r, agentlab.Errorf(agentlab.CodeInvalid, "session %s has its own workspace", v.Name).WithField("workspace").WithHint("remove --workspace or --session")
	}
	sel := agentlab.WorkspaceSelection{Workspace: v.WorkspaceID, Wait: jobWait}
	if r.Workspace != nil && r.Workspace.Wait > 0 {
		sel.Wait = r.Workspace.Wait
	}
	r.Workspace, r.Session = &sel, v.ID
	if r.Keepalive == nil { // a kept sandbox would have the workspace long after the job
		r.Keepalive = new(bool)
	}
	r.Profile, r.Image, r.Branch = cmp.Or(r.Profile, v.Profile), cmp.Or(r.Image, v.Image), cmp.Or(r.Branch, v.Branch)
	return r, nil
}
