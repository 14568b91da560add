package sandbox

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/durable"
	"github.com/agentlab-vm/agentlab/internal/fsfault"
)

// destroyIntents is the directory that stores, as names of empty files, the UIDs
// of sandboxes that must be destroyed although their rows do not say so, because
// the database had no disk space for the change. An empty file needs no block on
// a full disk.
// Without a directory nothing is stored.
type destroyIntents struct{ dir string }

// put stores a sandbox. Storing one again succeeds.
func (n destroyIntents) put(uid string) error {
	if n.dir == "" {
		return nil
	}
	path := filepath.Join(n.dir, uid)
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE, 0o600)
	if err == nil {
		err = errors.Join(f.Close(), durable.SyncPath(n.dir))
	}
	if err != nil {
		return fsfault.At(path, err)
	}
	return nil
}

// uidOf returns the UID in the name of a file. A file that is already on disk may
// have the name VMID-UID.
func uidOf(name string) string { return name[strings.LastIndexByte(name, '-')+1:] }

// list returns the stored UIDs.
func (n destroyIntents) list() ([]string, error) {
	if n.dir == "" {
		return nil, nil
	}
	entries, err := os.ReadDir(n.dir)
	if err != nil {
		return nil, fsfault.At(n.dir, err)
	}
	var uids []string
	for _, e := range entries {
		uids = append(uids, uidOf(e.Name()))
	}
	return uids, nil
}

// remove removes a sandbox; it need not be stored.
func (n destroyIntents) remove(uid string) error {
	if n.dir == "" {
		return nil
	}
	entries, err := os.ReadDir(n.dir)
	if err != nil {
		return fsfault.At(n.dir, err)
	}
	for _, e := range entries {
		path := filepath.Join(n.dir, e.Name())
		if uidOf(e.Name()) != uid {
			continue
		}
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fsfault.At(path, err)
		}
	}
	return nil
}

// fullDisk reports whether the database had no disk space for a change.
func fullDisk(err error) bool { return agentlab.CodeOf(err) == agentlab.CodeNoSpace }

// destroyWithoutRow makes the loop destroy a sandbox whose row cannot be
// updated. Usually the desired state is stored first. Here that would be a
// deadlock: this sandbox may be what fills the disk. The file of the intent
// replaces the row. Without it, a crash leaves a sandbox whose VM is gone.
func (s *Service) destroyWithoutRow(sb agentlab.Sandbox) {
	if sb.State == agentlab.SandboxDestroyed {
		return
	}
	s.log.Warn("a sandbox is destroyed before this can be recorded in the database: the disk is full", "vmid", sb.VMID)
	if err := s.intents.put(sb.UID); err != nil {
		s.log.Warn("the request to destroy a sandbox was not stored", "vmid", sb.VMID, "err", err)
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

// readIntents reads the intents of an earlier process. An intent without a row
// is removed.
func (s *Service) readIntents(rows []agentlab.Sandbox) {
	stored, err := s.intents.list()
	if err != nil {
		s.log.Error("the stored requests to destroy sandboxes cannot be read", "err", err)
		return
	}
	live := map[string]agentlab.Sandbox{}
	for _, sb := range rows {
		live[sb.UID] = sb
	}
	for _, uid := range stored {
		if sb, ok := live[uid]; ok {
			s.markUnwritten(sb)
			continue
		}
		if err := s.intents.remove(uid); err != nil {
			s.log.Warn("the stored request of a destroyed sandbox was not removed", "uid", uid, "err", err)
		}
	}
}

func (s *Service) dropIntent(sb agentlab.Sandbox) {
	s.withState(sb.VMID, func(m *runtimeState) { m.destroyPending = false })
	if err := s.intents.remove(sb.UID); err != nil { // the next process removes it
		s.log.Warn("the stored request of a destroyed sandbox was not removed", "vmid", sb.VMID, "err", err)
	}
}
