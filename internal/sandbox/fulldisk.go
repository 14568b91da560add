package sandbox

import "github.com/agentlab-vm/agentlab"

// Notes lists, outside the database, sandboxes that must be destroyed although
// their rows do not say so, because the database had no disk space for the
// change.
type Notes interface {
	// Put adds a sandbox. Adding it again succeeds.
	Put(uid string) error
	// List returns the sandboxes that were added.
	List() (uids []string, err error)
	// Remove removes a sandbox, if it is in the list.
	Remove(uid string) error
}

// fullDisk reports whether the database had no disk space for a change.
func fullDisk(err error) bool { return agentlab.CodeOf(err) == agentlab.CodeNoSpace }

// destroyWithoutRow makes the loop destroy a sandbox whose row cannot be
// updated. Usually the desired state is stored first. Here that would be a
// deadlock: this sandbox may be what fills the disk. The note replaces the
// row. Without it, a crash leaves a sandbox whose VM is gone.
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

// destroyPending reports whether a sandbox must be destroyed although its row does
// not say so.
func (s *Service) destroyPending(sb agentlab.Sandbox) (yes bool) {
	s.withState(sb.VMID, func(m *runtimeState) { yes = m.destroyPending && m.uid == sb.UID })
	return yes
}

// readNotes reads the notes of an earlier process. A note without a row is
// removed.
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
