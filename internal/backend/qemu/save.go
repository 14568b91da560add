package qemu

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend/qemu/migration"
	"github.com/agentlab-vm/agentlab/internal/durable"
	"github.com/agentlab-vm/agentlab/internal/qemuvm"
	"github.com/agentlab-vm/agentlab/internal/supervisor"
	"github.com/agentlab-vm/agentlab/internal/vmdir"
)

// ramBlock is the name of the guest's RAM, on the command line and in a
// migration stream.
const ramBlock = "ram"

// Bounds of a save by QEMU's live migration. On KVM the guest runs while its memory is
// copied. When what is left can be copied in saveDowntime, its CPUs stop for that. A
// guest that writes faster than the host copies is stopped after savePatience. QEMU
// before 9.0 loses writes of emulated CPUs that run in the meantime, so an emulated
// guest is stopped before.
const (
	saveDowntime = 20 * time.Millisecond
	savePatience = 20 * time.Second
	saveLimit    = 5 * time.Minute
)

// Save implements supervisor.Saver. It copies the guest's memory from QEMU's process,
// or as QEMU's live migration sends it.
func (m *machine) Save(ctx context.Context, to supervisor.SaveTo) (err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, saveLimit, errors.New("the guest's memory could not be saved in time"))
	defer cancel()
	defer func() {
		if err != nil {
			_ = vmdir.RemoveFiles(to.Dir, durable.None, fileMemoryState, fileMemory, fileDevices)
		}
	}()
	s := &saving{m: m, to: to, status: make(chan string, 16), received: make(chan error, 1)}
	m.setSaving(s)
	defer m.setSaving(nil)
	defer s.close()
	if err = s.begin(ctx); err == nil && s.ram != nil {
		err = s.copyDirectly(ctx)
	} else if err == nil {
		err = s.transfer(ctx)
	}
	if err != nil {
		if cerr := s.cancel(ctx); cerr != nil {
			m.hooks.Log.Error("after a failed save", "err", cerr)
		}
		return err
	}
	return s.finish(ctx)
}

// saving is one save of a running guest.
type saving struct {
	m        *machine
	to       supervisor.SaveTo
	memory   *memoryFile
	ram      *guestRAM // that is copied directly; nil if QEMU sends it
	in       net.Conn  // from which it is received
	devices  []byte    // valid after received
	received chan error
	status   chan string // of QEMU's migration, from its events
	disk     string      // node to which the guest writes before the save
	size     int64       // of the disk, in bytes
	layer    string      // to which QEMU writes until it uses the overlay; "" if the disk stays
	node     string      // of the overlay
	file     string      // node of its file
	switched bool        // QEMU writes to the overlay
	inactive bool        // QEMU may use no disk until the guest continues
	stopped  time.Time   // when the guest's CPUs stopped for the save
}

// begin prepares everything that does not need the guest to be stopped.
func (s *saving) begin(ctx context.Context) error {
	err := s.leaveSaved(ctx)
	if err != nil {
		return err
	}
	if s.disk, s.size, err = s.m.rootDisk(ctx); err != nil {
		return err
	}
	bytes := int64(s.m.handle.Spec.Resources.MemoryMB) << 20
	if err := qemuvm.RoomFor("the guest's memory", s.to.Dir, s.m.cfg.PauseBelow, guestSize(s.m.PID(), s.m.saved.memory, bytes)); err != nil {
		return err
	}
	if err := vmdir.RemoveFiles(s.to.Dir, durable.None, fileMemory); err != nil { // QEMU may have it mapped
		return err
	}
	file, err := os.OpenFile(filepath.Join(s.to.Dir, fileMemory), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return fault(err, "cannot create the file for the memory")
	}
	s.memory = &memoryFile{File: file, least: s.m.cfg.PauseBelow / 2}
	if err := file.Truncate(bytes); err != nil {
		return fault(err, "cannot create the file for the memory")
	}
	s.m.at("save begun")
	if s.to.Continue {
		if err := s.addOverlay(ctx); err != nil {
			return err
		}
	}
	if s.m.cfg.Load && (!s.to.Continue || s.m.cfg.Accel != qemuvm.AccelKVM) {
		if s.ram, err = s.m.openRAM(ctx); err == nil {
			return nil
		}
		s.m.hooks.Log.Info("QEMU sends the guest's memory, because that of its process cannot be read", "err", err)
	}
	return s.beginStream(ctx, bytes)
}

// beginStream prepares QEMU to send the memory.
func (s *saving) beginStream(ctx context.Context, bytes int64) error {
	conn, theirs, err := qemuvm.SocketPair()
	if err != nil {
		return fault(err, "cannot make a socket for QEMU")
	}
	defer func() { _ = theirs.Close() }()
	s.in = conn
	go func() {
		var err error
		s.devices, err = migration.Receive(conn, ramBlock, s.memory, bytes)
		_ = conn.Close() // QEMU then ends the migration too
		s.received <- err
	}()
	if !s.to.Continue || s.m.cfg.Accel != qemuvm.AccelKVM {
		if err := s.stop(ctx); err != nil {
			return err
		}
	}
	for _, c := range []struct {
		name string
		args any
	}{
		{"migrate-set-capabilities", capabilities(true, "events", "pause-before-switchover")},
		{"migrate-set-parameters", map[string]any{"max-bandwidth": 0, "downtime-limit": saveDowntime.Milliseconds()}},
	} {
		if err := s.m.QMP.Execute(ctx, c.name, c.args, nil); err != nil {
			return fault(err, "cannot prepare QEMU")
		}
	}
	if err := s.m.QMP.ExecuteWith(ctx, "getfd", map[string]any{"fdname": "memory"}, theirs, nil); err != nil {
		return fault(err, "cannot pass a socket to QEMU")
	}
	return nil
}

// stop stops the guest's CPUs.
func (s *saving) stop(ctx context.Context) error {
	s.stopped = time.Now()
	if err := s.m.Pause(ctx); err != nil {
		return fault(err, "cannot stop the guest")
	}
	return nil
}

func (s *saving) close() {
	if s.ram != nil {
		_ = s.ram.Close()
	}
}

// notSaved is the error of a save that is given up because ctx has ended.
func notSaved(ctx context.Context) error {
	return agentlab.Errorf(agentlab.CodeUnavailable, "saving the guest's memory: %w", context.Cause(ctx))
}

// leaveSaved makes QEMU accept another save of a guest that has not run since the
// last one, which may have failed. QEMU 7.2 saves no guest in this state, and
// leaves the state only when the guest's CPUs start. QEMU gets the command that stops
// them again in the same message, so they run for about a millisecond.
func (s *saving) leaveSaved(ctx context.Context) error {
	for {
		var st struct {
			Status string `json:"status"`
		}
		if err := s.m.QMP.Execute(ctx, "query-status", nil, &st); err != nil {
			return fault(err, "cannot check the state of QEMU")
		}
		switch st.Status {
		case "postmigrate":
			if err := s.m.QMP.ExecuteAll(ctx, "cont", "stop"); err != nil {
				return fault(err, "cannot prepare QEMU for another save")
			}
			return nil
		case "finish-migrate": // the last save is about to end
		default:
			return nil
		}
		select {
		case <-time.After(time.Millisecond):
		case <-ctx.Done():
			return notSaved(ctx)
		}
	}
}

func capabilities(on bool, names ...string) any {
	var list []map[string]any
	for _, n := range names {
		list = append(list, map[string]any{"capability": n, "state": on})
	}
	return map[string]any{"capabilities": list}
}

// addOverlay opens the overlay to which the guest writes after the save.
func (s *saving) addOverlay(ctx context.Context) error {
	var err error
	if s.layer, err = freezeDisk(ctx, s.m.cfg.QEMUImg, s.m.dir, s.size); err != nil {
		return err
	}
	id := strings.TrimSuffix(strings.TrimPrefix(s.layer, layerPrefix), layerSuffix)
	s.node, s.file = "root-"+id, "file-"+id
	// The file has a node of its own: QEMU would otherwise open it again by its name,
	// which the next save gives to another file, when the disk becomes read-only.
	for _, node := range []map[string]any{
		{"driver": "file", "node-name": s.file, "filename": fileRoot, "discard": "unmap"},
		{"driver": "qcow2", "node-name": s.node, "file": s.file, "backing": nil, "discard": "unmap", "detect-zeroes": "unmap"},
	} {
		if err := s.m.QMP.Execute(ctx, "blockdev-add", node, nil); err != nil {
			return fault(err, "cannot open the new disk")
		}
	}
	return nil
}

// transfer copies the memory until the guest's CPUs are stopped and everything
// was sent.
func (s *saving) transfer(ctx context.Context) error {
	if err := s.m.QMP.Execute(ctx, "migrate", map[string]any{"uri": "fd:memory"}, nil); err != nil {
		return fault(err, "cannot save the guest's memory")
	}
	if err := s.awaitStopped(ctx); err != nil {
		return err
	}
	if s.stopped.IsZero() {
		s.stopped = time.Now()
	}
	if s.layer != "" {
		if err := s.switchDisk(ctx, qmpPatience); err != nil {
			return err
		}
	}
	if err := s.m.QMP.Execute(ctx, "migrate-continue", map[string]any{"state": "pre-switchover"}, nil); err != nil {
		return fault(err, "cannot save the guest's memory")
	}
	return s.await(ctx, "completed")
}

// switchDisk makes the guest write to the overlay. QEMU does this even if the
// caller gives up, so the end of ctx does not end the wait for its answer.
func (s *saving) switchDisk(ctx context.Context, limit time.Duration) error {
	ctx, cancel := context.WithTimeoutCause(context.WithoutCancel(ctx), limit, errors.New("QEMU did not answer"))
	defer cancel()
	if err := s.m.QMP.Execute(ctx, "blockdev-snapshot", map[string]any{"node": s.disk, "overlay": s.node}, nil); err != nil {
		return fault(err, "cannot switch to the new disk")
	}
	s.switched = true
	return nil
}

// dropOverlay undoes addOverlay, if the guest does not write to the overlay. QEMU
// executes commands in order: its answer is valid for all commands before it,
// whose own answers may be lost. Without an answer the overlay stays, which is
// harmless: if it is empty, the disk is the same.
func (s *saving) dropOverlay(ctx context.Context) error {
	node, _, err := s.m.rootDisk(ctx)
	if err != nil || node == s.node {
		return err
	}
	if err := s.m.QMP.Execute(ctx, "blockdev-del", map[string]any{"node-name": s.node}, nil); err != nil {
		return fault(err, "cannot close the new disk")
	}
	_ = s.m.QMP.Execute(ctx, "blockdev-del", map[string]any{"node-name": s.file}, nil)
	return unfreezeDisk(s.m.dir, s.layer)
}

// awaitStopped waits until the guest's CPUs are stopped because almost all of
// the memory was copied.
func (s *saving) awaitStopped(ctx context.Context) error {
	pctx, cancel := context.WithTimeout(ctx, savePatience)
	defer cancel()
	err := s.await(pctx, "pre-switchover")
	if err == nil || ctx.Err() != nil || pctx.Err() == nil {
		return err
	}
	s.m.hooks.Log.Info("the guest writes faster than its memory can be copied: it is stopped")
	if err := s.m.QMP.Execute(ctx, "migrate-set-parameters", map[string]any{"downtime-limit": saveLimit.Milliseconds()}, nil); err != nil {
		return fault(err, "cannot save the guest's memory")
	}
	return s.await(ctx, "pre-switchover")
}

// await waits for a status of QEMU's migration.
func (s *saving) await(ctx context.Context, want string) error {
	for {
		select {
		case got := <-s.status:
			switch got {
			case want:
				return nil
			case "failed", "cancelled":
				if err := s.awaitReceived(time.Second); err != nil { // the reason, if the receiver has one
					return vmdir.AsError(err, "cannot store the guest's memory")
				}
				return agentlab.Errorf(agentlab.CodeInternal, "QEMU did not save the guest's memory: %s", got)
			}
		case <-s.m.Done():
			return agentlab.Errorf(agentlab.CodeUnavailable, "the VM has ended")
		case <-ctx.Done():
			return notSaved(ctx)
		}
	}
}

// awaitReceived waits until everything that QEMU sent is stored. A QEMU that does
// not end its stream in time is cut off.
func (s *saving) awaitReceived(limit time.Duration) error {
	cut := time.AfterFunc(limit, func() { _ = s.in.Close() })
	defer cut.Stop()
	err := <-s.received
	s.received <- err // for the next call
	return err
}

// cancel lets the guest continue after an error. It also has to when ctx has
// ended.
func (s *saving) cancel(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), qmpPatience)
	defer cancel()
	_ = s.m.QMP.Execute(ctx, "migrate_cancel", nil, nil)
	if s.in != nil {
		_ = s.awaitReceived(0)
	}
	if s.memory != nil {
		_ = s.memory.Close()
	}
	err := s.resume(ctx)
	if s.layer != "" && !s.switched {
		err = errors.Join(err, s.dropOverlay(ctx))
	}
	return errors.Join(err, s.reset(ctx))
}

// resume continues the guest's CPUs, if they ran before.
func (s *saving) resume(ctx context.Context) error {
	if !s.to.Running {
		if s.inactive {
			return s.m.QMP.ExecuteAll(ctx, "cont", "stop")
		}
		return nil
	}
	for {
		err := s.m.QMP.Execute(ctx, "cont", nil, nil)
		// QEMU reports that a migration has completed before it accepts this.
		if err == nil || !strings.Contains(err.Error(), "not finalized") {
			return err
		}
		select {
		case <-time.After(time.Millisecond):
		case <-ctx.Done():
			return fmt.Errorf("%w: %w", err, context.Cause(ctx))
		}
	}
}

// reset prepares QEMU for the next save.
func (s *saving) reset(ctx context.Context) error {
	return s.m.QMP.Execute(ctx, "migrate-set-capabilities", capabilities(false, "pause-before-switchover"), nil)
}

// finish continues the guest, and then completes the files.
func (s *saving) finish(ctx context.Context) error {
	var err error
	if s.to.Continue {
		err = s.resume(ctx)
		s.m.hooks.Log.Info("the guest's CPUs stopped for a save", "ms", time.Since(s.stopped).Milliseconds())
		err = errors.Join(err, s.reset(ctx))
	}
	err = errors.Join(err, s.awaitReceived(qmpPatience))
	how := durable.None
	if s.to.Durable {
		how = durable.Content
		err = errors.Join(err, s.memory.Sync())
	}
	err = errors.Join(err, s.memory.Close())
	if err == nil {
		err = durable.Replace(filepath.Join(s.to.Dir, fileDevices), s.devices, how)
	}
	if err == nil && s.layer != "" && s.to.Dir != s.m.dir {
		err = linkDisk(context.WithoutCancel(ctx), s.m.cfg.QEMUImg, s.m.dir, s.to.Dir, s.layer, s.size, how)
	}
	if err == nil {
		state := savedMemory{Version: memoryVersion, Machine: s.m.cfg.Key, DiskSize: s.size, Saved: time.Now().UTC(), Reused: s.m.reused()}
		err = durable.ReplaceJSON(filepath.Join(s.to.Dir, fileMemoryState), state, how)
	}
	if err == nil {
		return nil
	}
	if !s.to.Continue {
		err = errors.Join(err, s.resume(ctx), s.reset(ctx))
	}
	return vmdir.AsError(err, "cannot save the guest")
}

// rootDisk returns the node in QEMU to which the guest writes, and the size of
// its disk in bytes. A save that was given up may have replaced the node.
func (m *machine) rootDisk(ctx context.Context) (node string, size int64, err error) {
	return m.QMP.Drive(ctx, deviceRoot)
}

func (m *machine) setSaving(s *saving) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.saving = s
}
