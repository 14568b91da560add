package qemu

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend/qemu/migration"
	"github.com/agentlab-vm/agentlab/internal/lazyre"
	"github.com/agentlab-vm/agentlab/internal/vmdir"
)

// Most of the memory of a guest that continues from a saved one is in a file that does
// not change, and QEMU would read and send all of it. So the file is copied while the
// guest runs, and then, while it is stopped, the pages that QEMU's process has of its
// own. On KVM, which tracks what a guest writes, QEMU's live migration stops the guest
// for a shorter time if it has written much.

// restTries is how often the state of the devices is read until it no longer changes.
// They can change the memory of a stopped guest: QEMU stores what a user types as long
// as the guest has buffers for it.
const restTries = 20

// savedFiles are the files from which a guest continues. Their names are removed, or
// given to other files, while QEMU uses them.
type savedFiles struct{ memory, devices *os.File }

func openSaved(dir string) (f savedFiles, err error) {
	if f.devices, err = os.Open(filepath.Join(dir, fileDevices)); err != nil {
		return f, fault(err, "cannot open the saved devices")
	}
	if f.memory, err = os.Open(filepath.Join(dir, fileMemory)); err != nil {
		f.close()
		return f, fault(err, "cannot open the saved memory")
	}
	return f, nil
}

func (f savedFiles) close() {
	_ = f.memory.Close()
	_ = f.devices.Close()
}

// hostAddress matches the answer of QEMU to gpa2hva for the first byte of the RAM.
var hostAddress = lazyre.New(`^Host virtual address for 0x0 \(` + ramBlock + `\) is 0x([0-9a-f]{1,16})\s*$`)

// openRAM finds the guest's memory in the process of QEMU.
func (m *machine) openRAM(ctx context.Context) (*guestRAM, error) {
	text, err := m.monitor(ctx, "gpa2hva 0")
	if err != nil {
		return nil, err
	}
	found := hostAddress.FindStringSubmatch(text)
	if found == nil {
		return nil, fmt.Errorf("QEMU answers %q", agentlab.Cut(text, 100))
	}
	start, err := strconv.ParseUint(found[1], 16, 64)
	if err != nil {
		return nil, err
	}
	return openRAM(m.PID(), start, int64(m.handle.Spec.Resources.MemoryMB)<<20)
}

// copyDirectly copies the memory and the state of the devices, and leaves the guest's
// CPUs stopped.
func (s *saving) copyDirectly(ctx context.Context) error {
	if err := copyData(ctx, s.memory, s.m.saved.memory); err != nil {
		return vmdir.AsError(err, "cannot copy the saved memory")
	}
	s.m.at("save copied")
	if err := s.stop(ctx); err != nil {
		return err
	}
	if s.layer != "" {
		if err := s.switchDisk(ctx, qmpPatience); err != nil {
			return err
		}
	}
	before, err := s.readDevices(ctx, false)
	for range restTries {
		if err == nil {
			err = s.ram.copyWritten(ctx, s.memory)
		}
		var now []byte
		if err == nil {
			now, err = s.readDevices(ctx, false)
		}
		rests := err == nil && bytes.Equal(before, now)
		if rests && !s.to.Continue {
			_, err = s.readDevices(ctx, true)
		}
		switch {
		case err != nil:
			return vmdir.AsError(err, "cannot save the guest's memory")
		case rests:
			return s.keepDevices(now)
		}
		before = now
	}
	return agentlab.Errorf(agentlab.CodeBusy, "cannot save the guest's memory: its devices do not come to rest").
		WithHint("try again when no user types in its console")
}

// keepDevices makes the state of the devices one that QEMU loads.
func (s *saving) keepDevices(tail []byte) error {
	loaded := s.m.saved.devices
	fi, err := loaded.Stat()
	if err != nil {
		return fault(err, "cannot read the saved devices")
	}
	size := int64(s.m.handle.Spec.Resources.MemoryMB) << 20
	if s.devices, err = migration.Replace(io.NewSectionReader(loaded, 0, fi.Size()), ramBlock, size, tail); err != nil {
		return vmdir.AsError(err, "cannot save the guest's devices")
	}
	s.received <- nil
	return nil
}

// readDevices returns the state of the devices of a stopped guest. The command is for
// Xen only in its name; its format is that of a migration without memory. With end set
// it is an error if something cannot be written to the disks, which QEMU no longer uses
// then until the guest continues.
func (s *saving) readDevices(ctx context.Context, end bool) ([]byte, error) {
	d, err := s.m.deviceState(ctx)
	if err != nil {
		return nil, err
	}
	if _, err := d.w.Seek(0, io.SeekStart); err != nil { // also for QEMU, which has a duplicate
		return nil, err
	}
	s.inactive = s.inactive || end
	name := "/dev/fdset/" + strconv.FormatInt(d.id, 10)
	if err := s.m.QMP.Execute(ctx, "xen-save-devices-state", map[string]any{"filename": name, "live": end}, nil); err != nil {
		return nil, err
	}
	b, err := io.ReadAll(io.NewSectionReader(d.f, 0, migration.MaxState+1))
	if err == nil && len(b) > migration.MaxState {
		err = fmt.Errorf("the state of the devices is larger than %d MiB", migration.MaxState>>20)
	}
	return b, err
}

// deviceState is the file to which QEMU writes the state of its devices. It is passed to
// QEMU once, because QEMU does not close it while the guest is stopped.
type deviceState struct {
	f, w *os.File // w for writing only, which is how QEMU opens a file
	id   int64    // of the set of files in QEMU
}

// deviceState returns the file, and passes it to QEMU before the first save.
func (m *machine) deviceState(ctx context.Context) (*deviceState, error) {
	if m.devices != nil {
		return m.devices, nil
	}
	d := &deviceState{}
	var err error
	if d.f, d.w, err = memoryFD(); err != nil {
		return nil, err
	}
	var set struct {
		ID int64 `json:"fdset-id"`
	}
	if err := m.QMP.ExecuteWith(ctx, "add-fd", nil, d.w, &set); err != nil {
		d.close()
		return nil, err
	}
	d.id = set.ID
	m.devices = d
	return d, nil
}

func (d *deviceState) close() {
	if d != nil {
		_ = d.f.Close()
		_ = d.w.Close()
	}
}
