package sandbox

import (
	"context"
	"fmt"
	"slices"
	"strconv"

	"github.com/agentlab-vm/agentlab"
)

// Get finds a sandbox by its number, the current sandbox of a session by the name or ID
// of the session, or else a sandbox that is not DESTROYED by its name. Codes: not_found;
// conflict if a session has no sandbox, and if another sandbox, which never was one of
// the session, has its name.
func (s *Core) Get(ctx context.Context, arg string) (agentlab.Sandbox, error) {
	sb, _, err := s.find(ctx, arg)
	return sb, err
}

// GetUnique is Get for a request that changes the sandbox. Code: conflict also if a former
// sandbox of the session has its name.
func (s *Service) GetUnique(ctx context.Context, arg string) (agentlab.Sandbox, error) {
	sb, other, err := s.find(ctx, arg)
	if err == nil && other.VMID != 0 {
		return agentlab.Sandbox{}, ambiguous(arg, sb, other)
	}
	return sb, err
}

func ambiguous(arg string, current, other agentlab.Sandbox) error {
	session := "a session without a sandbox"
	if current.VMID != 0 {
		session = fmt.Sprintf("a session whose sandbox is %d", current.VMID)
	}
	return agentlab.Errorf(agentlab.CodeConflict, "%s is the name of sandbox %d, and of %s", arg, other.VMID, session).
		WithHint("use the number of the one you mean")
}

// find is Get. other is the former sandbox of the session that has its name, if there is
// one.
func (s *Core) find(ctx context.Context, arg string) (sb, other agentlab.Sandbox, err error) {
	none := agentlab.Sandbox{}
	if vmid, err := strconv.Atoi(arg); err == nil {
		sb, err = s.cfg.Store.Sandbox(ctx, vmid)
		return sb, none, err
	}
	v, current, err := s.sessionSandbox(ctx, arg)
	if err != nil {
		return none, none, err
	}
	named, err := s.cfg.Store.SandboxByName(ctx, arg)
	missing := agentlab.CodeOf(err) == agentlab.CodeNotFound
	if err != nil && !missing {
		return none, none, err
	}
	live := !missing && !named.State.Final()
	switch {
	case v.ID == "" && live:
		return named, none, nil
	case v.ID == "" && missing:
		return none, none, err
	case v.ID == "":
		return none, none, destroyedBefore(arg, named)
	case current.VMID == 0 && !live:
		return none, none, agentlab.Errorf(agentlab.CodeConflict, "session %s has no sandbox", v.Name).
			WithHint("%s", startSession(v))
	case !live || named.UID == current.UID:
		return current, none, nil
	}
	history, err := s.cfg.Sessions.SessionHistory(ctx, v.ID)
	if err != nil {
		return none, none, err
	}
	switch former := slices.ContainsFunc(history, func(h agentlab.SessionSandbox) bool { return h.UID == named.UID }); {
	case !former:
		return none, none, ambiguous(arg, current, named)
	case current.VMID == 0:
		return named, none, nil
	}
	return current, named, nil
}

// destroyedBefore is the error for the name of a sandbox that is DESTROYED.
func destroyedBefore(arg string, sb agentlab.Sandbox) error {
	why := ""
	if sb.Reason != "" {
		why = " (" + sb.Reason + ")"
	}
	return agentlab.Errorf(agentlab.CodeNotFound, "there is no sandbox %s", arg).
		WithHint("the last one of that name, %d, is destroyed; see 'agentlab sandbox show %[1]d'%s", sb.VMID, why)
}

// sessionSandbox returns the session with a name or ID, without an ID if there is none, and
// its current sandbox, without a number if it has none.
func (s *Core) sessionSandbox(ctx context.Context, arg string) (v agentlab.Session, sb agentlab.Sandbox, err error) {
	get := s.cfg.Sessions.SessionByName
	if agentlab.IsSessionID(arg) {
		get = s.cfg.Sessions.Session
	}
	v, err = get(ctx, arg)
	switch {
	case agentlab.CodeOf(err) == agentlab.CodeNotFound:
		return agentlab.Session{}, sb, nil
	case err != nil || v.VMID == 0:
		return v, sb, err
	}
	sb, err = s.cfg.Store.Sandbox(ctx, v.VMID)
	switch {
	case agentlab.CodeOf(err) == agentlab.CodeNotFound || err == nil && (sb.UID != v.UID || sb.State.Final()):
		return v, agentlab.Sandbox{}, nil
	default:
		return v, sb, err
	}
}
