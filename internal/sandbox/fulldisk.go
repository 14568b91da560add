package sandbox

import "github.com/agentlab-vm/agentlab"

// Notes keeps, outside the database, which sandboxes are to be destroyed
// although their rows do not say so: the database had no room for it.
type Notes interface {
	// Put notes a sandbox. Putting one again succeeds.
	Put(uid string) error
	// List returns what is noted.
	List() (uids []string, err error)
	// Remove removes a note; there need not be one.
	Remove(uid string) error
}

// fullDisk reports whether the database had no room for a change.
func fullDisk(err error) bool { return agentlab.CodeOf(err) == agentlab.CodeNoSpace }

// destroyWithoutRow makes the loop destroy a sandbox whose row cannot say so.
// Elsewhere intent is written first. Here that would be a deadlock: the disk
// that has no room for it may be full of this sandbox. The note takes the
// place of the row. Without it, a crash leaves a sandbox whose VM is gone.
func (s *Service) destroyWithoutRow(sb agentlab.Sandbox) {
	if sb.State == agentlab.SandboxDestroyed {
		return
	}
	s.log.Warn("a sandbox is destroyed before the database can say so: the disk is full", "vmid", sb.VMID)
	if s.cfg.Notes != nil {
		if err := s.cfg.Notes.Put(sb.UID); err != nil {
			s.log.Warn("the request to destroy a sandbox was not noted", "vmid", sb.VMID, "err", err)
		}
	}
	s.markUnwritten(sb)
	s.loop.Interrupt(sb.VMID)
}

func (s *Service) markUnwritten(sb agentlab.Sandbox) {
	s.track(sb)
	s.withState(sb.VMID, func(m *runtimeState) { m.destroyPending = m.uid == sb.UID })
}

// destroyPending reports whether a sandbox is to be destroyed although its row does
// not say so.
func (s *Service) destroyPending(sb agentlab.Sandbox) (yes bool) {
	s.withState(sb.VMID, func(m *runtimeState) { yes = m.destroyPending && m.uid == sb.UID })
	return yes
}

// readNotes takes up what a process before this one has noted. A note about no
// row is removed.
func (s *Service) readNotes(rows []agentlab.Sandbox) {
	if s.cfg.Notes == nil {
		return
	}
	noted, err := s.cfg.Notes.List()
	if err != nil {
		s.log.Error("the noted requests to destroy sandboxes cannot be read", "err", err)
		return
	}
	live := map[string]agentlab.Sandbox{}
	for _, sb := range rows {
		live[sb.UID] = sb
	}
	for _, uid := range noted {
		if sb, ok := live[uid]; ok {
			s.markUnwritten(sb)
			continue
		}
		if err := s.cfg.Notes.Remove(uid); err != nil {
			s.log.Warn("a note about a destroyed sandbox was not removed", "uid", uid, "err", err)
		}
	}
}

func (s *Service) forgetNote(sb agentlab.Sandbox) {
	s.withState(sb.VMID, func(m *runtimeState) { m.destroyPending = false })
	if s.cfg.Notes == nil {
		return
	}
	if err := s.cfg.Notes.Remove(sb.UID); err != nil { // the next process removes it
		s.log.Warn("a note about a destroyed sandbox was not removed", "vmid", sb.VMID, "err", err)
	}
}
