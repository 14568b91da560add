//go:build linux

package guestd

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
)

// frozenServer returns a server whose workspace is mounted, and the directory.
func frozenServer(t *testing.T, limit time.Duration) (s *Server, v volume, dir string) {
	t.Helper()
	v = loopVolume(t)
	root := t.TempDir()
	s = New(Config{Root: root})
	dir = filepath.Join(root, guestapi.WorkspaceDir)
	if _, err := v.mount(t.Context(), dir, true, 1000, 1000); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = s.Close()
		unprotect(dir)
	})
	if err := os.WriteFile(filepath.Join(dir, "before"), []byte("written"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := s.lockedFreeze(t.Context(), v, limit); err != nil {
		t.Fatal(err)
	}
	return s, v, dir
}

func (s *Server) lockedFreeze(ctx context.Context, v volume, limit time.Duration) error {
	s.workMu.Lock()
	defer s.workMu.Unlock()
	return s.freeze(ctx, v, limit)
}

func (s *Server) lockedThaw() bool {
	s.workMu.Lock()
	defer s.workMu.Unlock()
	return s.thaw()
}

// writer changes the file system, and sends the result when it could.
func writer(dir string) <-chan error {
	done := make(chan error, 1)
	go func() { done <- os.WriteFile(filepath.Join(dir, "later"), nil, 0o600) }()
	return done
}

// While it is frozen the disk has all that was written, without need of the journal,
// and a process that changes the file system waits.
func TestFrozenWorkspaceIsClean(t *testing.T) {
	s, v, dir := frozenServer(t, time.Hour)
	wrote := writer(dir)
	if out, err := exec.CommandContext(t.Context(), "e2fsck", "-fn", v.dev).CombinedOutput(); err != nil {
		t.Errorf("e2fsck: %v %s", err, out)
	}
	if out, err := exec.CommandContext(t.Context(), "debugfs", "-R", "cat before", v.dev).Output(); string(out) != "written" {
		t.Errorf("the disk has %q, %v", out, err)
	}
	select {
	case err := <-wrote:
		t.Errorf("a process wrote to the frozen workspace: %v", err)
	default:
	}
	if !s.lockedThaw() || s.lockedThaw() {
		t.Error("it was thawed twice, or never")
	}
	if err := <-wrote; err != nil {
		t.Error(err)
	}
}

// Without a controller the workspace thaws by itself; the controller learns it.
func TestFreezeEndsByItself(t *testing.T) {
	s, _, dir := frozenServer(t, time.Millisecond)
	if err := <-writer(dir); err != nil {
		t.Error(err)
	}
	if s.lockedThaw() {
		t.Error("the freeze was held")
	}
}

// A freeze ends with the server, at the start of the next one, and before the workspace
// is unmounted.
func TestFreezeEndsWithItsServer(t *testing.T) {
	s, v, dir := frozenServer(t, time.Hour)
	if err := s.lockedFreeze(t.Context(), v, time.Hour); agentlab.CodeOf(err) != agentlab.CodeConflict {
		t.Errorf("frozen twice: %v", err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-writer(dir); err != nil {
		t.Error(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := s.lockedFreeze(ctx, v, time.Hour); err == nil {
		t.Error("frozen for a client that is gone")
	}
	if err := <-writer(dir); err != nil {
		t.Error(err)
	}
	if err := unmount(dir); err != nil {
		t.Fatal(err)
	}
	if err := s.lockedFreeze(t.Context(), v, time.Hour); agentlab.CodeOf(err) != agentlab.CodeConflict {
		t.Errorf("frozen without being mounted: %v", err)
	}
}
