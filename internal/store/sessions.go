package store

import (
	"context"
	"slices"

	"github.com/agentlab-vm/agentlab"
)

var sessions = newTable("sessions", []string{"id"}, func(s *agentlab.Session) []field {
	return []field{
		{"id", &s.ID},
		{"name", &s.Name},
		{"profile", &s.Profile},
		{"image", &s.Image},
		{"workspace_id", &s.WorkspaceID},
		{"branch", &s.Branch},
		{"sandbox_vmid", &s.VMID},
		{"sandbox_uid", &s.UID},
		{"created_at", timeCol{&s.CreatedAt}},
		{"updated_at", timeCol{&s.UpdatedAt}},
	}
}, func(s *agentlab.Session) error {
	if !agentlab.IsSessionID(s.ID) || s.Profile == "" || s.WorkspaceID == "" || s.CreatedAt.IsZero() {
		return invalid("id", "session is incomplete")
	}
	return agentlab.ValidateSessionName(s.Name)
})

var sessionSandboxes = newTable("session_sandboxes", []string{"number"}, func(h *agentlab.SessionSandbox) []field {
	return []field{
		{"number", &h.Number},
		{"session_id", &h.SessionID},
		{"sandbox_vmid", &h.VMID},
		{"sandbox_uid", &h.UID},
		{"sandbox_name", &h.Name},
		{"job_id", &h.JobID},
		{"created_at", timeCol{&h.CreatedAt}},
	}
}, func(h *agentlab.SessionSandbox) error {
	if h.SessionID == "" || h.VMID < 1 || h.UID == "" {
		return invalid("session", "an entry of the history of a session is incomplete")
	}
	return nil
})

// AddSession inserts a session and, with use.New, its workspace. CreatedAt and
// UpdatedAt are set. Codes: exists (name); conflict if another session has
// the workspace, or if that is not live; for a new workspace those of AddWorkspace.
func (s *Store) AddSession(ctx context.Context, v agentlab.Session, use agentlab.WorkspaceUse, evs ...agentlab.Event) (agentlab.Session, error) {
	err := s.write(ctx, func(w *tx) error {
		all := slices.Clip(evs) // this function may run again
		v.CreatedAt, v.UpdatedAt = w.now, w.now
		if use.New != nil {
			if use.New.From.UID != "" {
				if err := checkCopySource(w, use.New); err != nil {
					return err
				}
			}
			if err := addWorkspace(w, use.New, use.Quota); err != nil {
				return err
			}
			all = append(all, use.Created)
		}
		ws, err := workspaceByID(w.ctx, w, v.WorkspaceID)
		switch {
		case err != nil:
			return err
		case !ws.State.Live():
			return agentlab.Errorf(agentlab.CodeConflict, "workspace %s is %s", ws.Name, ws.State).WithField("workspace")
		}
		if err := checkSession(w, v); err != nil {
			return err
		}
		if err := sessions.insert(w, &v); err != nil {
			return err
		}
		return w.emit(all)
	})
	return v, err
}

// checkSession returns an error if the name or the workspace of a session is that of
// another one.
func checkSession(w *tx, v agentlab.Session) error {
	other, taken, err := sessions.one(w.ctx, w, "WHERE id <> ? AND (name = ? OR workspace_id = ?)", v.ID, v.Name, v.WorkspaceID)
	switch {
	case err != nil || !taken:
		return err
	case other.Name == v.Name:
		return agentlab.Errorf(agentlab.CodeExists, "there is a session named %q", v.Name).WithField("name").WithHint("choose another name; see 'agentlab session list'")
	}
	return agentlab.Errorf(agentlab.CodeConflict, "session %s has that workspace", other.Name).WithField("workspace").
		WithHint("use a copy of it: agentlab session fork %s --name NAME", other.Name)
}

// UpdateSession reads a session, lets fn change its name or profile, and writes it with
// the events that fn returns. Codes: not_found, exists (name).
func (s *Store) UpdateSession(ctx context.Context, id string, fn func(*agentlab.Session) ([]agentlab.Event, error)) (agentlab.Session, error) {
	var out agentlab.Session
	err := s.write(ctx, func(w *tx) error {
		v, err := sessionByID(w.ctx, w, id)
		if err != nil {
			return err
		}
		old := v
		evs, err := fn(&v)
		if err != nil {
			return err
		}
		if v != old {
			v.UpdatedAt = w.now
			if err := checkSession(w, v); err != nil {
				return err
			}
			if err := sessions.update(w, &v); err != nil {
				return err
			}
		}
		out = v
		return w.emit(evs)
	})
	return out, err
}

// RemoveSession deletes a session with its history. trash, unless it is nil, changes
// its workspace in the same transaction. Codes: not_found; conflict while a sandbox has
// the workspace or waits for it.
func (s *Store) RemoveSession(ctx context.Context, id string, trash func(*agentlab.Workspace) []agentlab.Event, evs ...agentlab.Event) error {
	return s.write(ctx, func(w *tx) error {
		all := slices.Clip(evs) // this function may run again
		v, err := sessionByID(w.ctx, w, id)
		if err != nil {
			return err
		}
		ws, err := workspaceByID(w.ctx, w, v.WorkspaceID)
		if err != nil {
			return err
		}
		if l, used, err := workspaceLeases.one(w.ctx, w, leaseQueue, ws.ID); err != nil || used {
			if err == nil {
				used := agentlab.Errorf(agentlab.CodeConflict, "session %s is used by sandbox %s", v.Name, leaseHolder(w, l))
				if err = used.WithHint("destroy it first: agentlab sandbox destroy %s", leaseHolder(w, l)); l.UID == v.UID {
					err = used.WithHint("stop it first: agentlab session stop %s", v.Name)
				}
			}
			return err
		}
		if trash != nil && (ws.State == agentlab.WorkspaceGrowing || ws.State == agentlab.WorkspaceRestoring) {
			return agentlab.Errorf(agentlab.CodeConflict, "workspace %s is %s and cannot be deleted now", ws.Name, ws.State).WithHint("try again later")
		}
		if _, err := w.execN("DELETE FROM sessions WHERE id = ?", id); err != nil {
			return err
		}
		if trash != nil {
			old := ws
			all = append(all, trash(&ws)...)
			ws.UpdatedAt = w.now
			if err := saveWorkspace(w, old, &ws, agentlab.WorkspaceQuota{}); err != nil {
				return err
			}
		}
		return w.emit(all)
	})
}

// useSession adds a new sandbox to the history of a session. One without a job becomes
// its current sandbox, unless the session has one that exists.
func useSession(w *tx, id string, sb agentlab.Sandbox) error {
	v, err := sessionByID(w.ctx, w, id)
	if err != nil {
		return err
	}
	if v.WorkspaceID != sb.Workspace {
		return agentlab.Errorf(agentlab.CodeInternal, "the sandbox of session %s has another workspace", v.Name)
	}
	if sb.JobID == "" {
		current, err := sandboxByVMID(w.ctx, w, v.VMID)
		switch {
		case agentlab.CodeOf(err) == agentlab.CodeNotFound:
		case err != nil:
			return err
		case current.UID == v.UID && !current.State.Final() && current.State != agentlab.SandboxFailed:
			return agentlab.Errorf(agentlab.CodeConflict, "session %s has sandbox %s", v.Name, current.Name)
		}
		v.VMID, v.UID, v.UpdatedAt = sb.VMID, sb.UID, w.now
		if err := sessions.update(w, &v); err != nil {
			return err
		}
	}
	h := agentlab.SessionSandbox{SessionID: id, VMID: sb.VMID, UID: sb.UID, Name: sb.Name, JobID: sb.JobID, CreatedAt: w.now}
	if err := w.QueryRowContext(w.ctx, "SELECT coalesce(max(number), 0) + 1 FROM session_sandboxes").Scan(&h.Number); err != nil {
		return fault(err)
	}
	if err := sessionSandboxes.insert(w, &h); err != nil {
		return err
	}
	_, err = w.execN("DELETE FROM session_sandboxes WHERE session_id = ? AND number NOT IN (SELECT number FROM session_sandboxes WHERE session_id = ? ORDER BY number DESC LIMIT ?)",
		id, id, agentlab.MaxSessionHistory)
	return err
}

// notInSession returns an error with code conflict if a workspace belongs to a session.
func notInSession(w *tx, v agentlab.Workspace) error {
	in, ok, err := sessions.one(w.ctx, w, "WHERE workspace_id = ?", v.ID)
	if err == nil && ok {
		err = agentlab.Errorf(agentlab.CodeConflict, "workspace %s belongs to session %s", v.Name, in.Name).WithHint("delete the session: agentlab session delete %s", in.Name)
	}
	return err
}

// Session returns the session with that ID, or not_found.
func (s *Store) Session(ctx context.Context, id string) (agentlab.Session, error) {
	return sessionByID(ctx, s.r, id)
}

func sessionByID(ctx context.Context, q querier, id string) (agentlab.Session, error) {
	v, ok, err := sessions.one(ctx, q, "WHERE id = ?", id)
	if err == nil && !ok {
		err = noSession(id)
	}
	return v, err
}

func noSession(name string) error {
	return agentlab.Errorf(agentlab.CodeNotFound, "there is no session %q", name).WithHint("see 'agentlab session list'")
}

// SessionByName returns the session with that name, or not_found.
func (s *Store) SessionByName(ctx context.Context, name string) (agentlab.Session, error) {
	v, ok, err := sessions.one(ctx, s.r, "WHERE name = ?", name)
	if err == nil && !ok {
		err = noSession(name)
	}
	return v, err
}

// Sessions lists all sessions, in the order of their creation.
func (s *Store) Sessions(ctx context.Context) ([]agentlab.Session, error) {
	return sessions.query(ctx, s.r, "ORDER BY created_at, id")
}

// SessionHistory lists the sandboxes of a session, the newest first.
func (s *Store) SessionHistory(ctx context.Context, id string) ([]agentlab.SessionSandbox, error) {
	return sessionSandboxes.query(ctx, s.r, "WHERE session_id = ? ORDER BY number DESC", id)
}

// SessionOfWorkspace returns the session that has a workspace; ok is false if none has.
func (s *Store) SessionOfWorkspace(ctx context.Context, workspaceID string) (v agentlab.Session, ok bool, err error) {
	return sessions.one(ctx, s.r, "WHERE workspace_id = ?", workspaceID)
}
