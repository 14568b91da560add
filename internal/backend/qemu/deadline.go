package qemu

import (
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"net/http"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

const (
	// deadlineGrace is how long a guest may take to power off at its deadline.
	deadlineGrace = 30 * time.Second
	// deadlineEvery is how often the shim looks at the clock at least: Go's
	// timers stand still while the host sleeps.
	deadlineEvery = 10 * time.Second
	// maxDeadline bounds the request that sets a deadline, in bytes.
	maxDeadline = 4 << 10
)

// deadline is deadline.json.
type deadline struct {
	Lease time.Time     `json:"lease"` // backend.Deadline's
	Boot  string        `json:"boot"`  // boot id of the host: what At counts from
	At    time.Duration `json:"at_ns"` // on the clock of uptime
}

// uptime is the time since the host was started, its sleep included. Nobody
// can set this clock.
func uptime() time.Duration {
	var t unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_BOOTTIME, &t) // it cannot fail: Linux has it since 2.6.39
	return time.Duration(t.Nano())
}

// set tells whether there is a deadline in this boot of the host.
func (d deadline) set() bool { return !d.Lease.IsZero() && d.Boot == bootID() }

func (d deadline) left() time.Duration { return d.At - uptime() }

// moved returns the deadline after a call of SetDeadline, and whether it is
// another one.
func (d deadline) moved(by backend.Deadline) (deadline, bool) {
	if d.set() && d.Lease.Equal(by.Lease) {
		return d, false
	}
	return deadline{Lease: by.Lease, Boot: bootID(), At: uptime() + by.Left}, true
}

// readDeadline reads the deadline of the sandbox in dir. A file that a crash
// of the host left unreadable is none: it does not outlive the host's boot.
func readDeadline(dir string) (deadline, error) {
	var d deadline
	err := readJSON(filepath.Join(dir, fileDeadline), &d)
	switch _, broken := errors.AsType[*fs.PathError](err); {
	case err == nil:
		return d, nil
	case errors.Is(err, fs.ErrNotExist), !broken:
		return deadline{}, nil
	}
	return d, fault(err, "cannot read %s", fileDeadline)
}

// SetDeadline implements backend.DeadlineSetter.
func (d *Driver) SetDeadline(ctx context.Context, ref backend.Ref, to backend.Deadline) error {
	if to.Lease.IsZero() || to.Left <= 0 {
		return agentlab.Errorf(agentlab.CodeInvalid, "a deadline needs a lease and time that is left, not %s", to.Left).WithField("left")
	}
	unlock, err := d.begin(ctx, ref)
	if err != nil {
		return err
	}
	defer unlock()
	end := uptime() + to.Left
	return d.change(ctx, ref, "deadline", func(handle) error {
		now, err := readDeadline(d.dir(ref))
		if err != nil {
			return err
		}
		to.Left = end - uptime()
		next, changed := now.moved(to)
		if !changed {
			return nil
		}
		return noteDeadline(d.dir(ref), next)
	}, func(ctx context.Context, c shimClient) error {
		to.Left = end - uptime()
		return c.setDeadline(ctx, to)
	})
}

func noteDeadline(dir string, d deadline) error {
	if err := noteJSON(filepath.Join(dir, fileDeadline), d); err != nil {
		return fault(err, "cannot write %s", filepath.Join(dir, fileDeadline))
	}
	return nil
}

func (c shimClient) setDeadline(ctx context.Context, to backend.Deadline) error {
	body, err := json.Marshal(to)
	if err != nil {
		return agentlab.Errorf(agentlab.CodeInternal, "encode the deadline: %w", err)
	}
	_, err = c.call(ctx, http.MethodPut, pathDeadline, body)
	return err
}

// serveDeadline sets the deadline.
func (s *shim) serveDeadline(w http.ResponseWriter, r *http.Request) {
	var to backend.Deadline
	err := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxDeadline)).Decode(&to)
	if err == nil && to.Lease.IsZero() {
		err = errors.New("it has no lease")
	}
	if err != nil {
		writeFault(w, agentlab.Errorf(agentlab.CodeInvalid, "the deadline cannot be read: %w", err))
		return
	}
	if err := s.setDeadline(to); err != nil {
		s.log.Error("the deadline is not on the disk", "err", err)
		writeFault(w, err)
		return
	}
	writeJSONBody(w, http.StatusOK, s.status())
}

// setDeadline puts a deadline in force, also where it cannot be written.
func (s *shim) setDeadline(to backend.Deadline) error {
	s.deadlineMu.Lock()
	defer s.deadlineMu.Unlock()
	s.mu.Lock()
	now, changed := s.deadline.moved(to)
	if changed {
		s.deadline = now
		close(s.deadlineMoved)
		s.deadlineMoved = make(chan struct{})
	}
	s.mu.Unlock()
	if changed {
		s.log.Info("the deadline was set", "lease", to.Lease, "left", to.Left.String())
	}
	return noteDeadline(s.dir, now) // also when it is the same: the attempt before this one may have failed here
}

// watchDeadline powers the VM off when its deadline passes.
func (s *shim) watchDeadline() {
	for {
		s.mu.Lock()
		d, moved := s.deadline, s.deadlineMoved
		s.mu.Unlock()
		wait := deadlineEvery
		if d.set() {
			wait = min(wait, d.left())
		}
		if wait <= 0 {
			s.expire()
			return
		}
		t := time.NewTimer(wait)
		select {
		case <-s.vm.Done():
			t.Stop()
			return
		case <-moved:
		case <-t.C:
		}
		t.Stop()
	}
}

// expire stops the VM because its deadline has passed, unless it is being
// stopped already.
func (s *shim) expire() {
	s.mu.Lock()
	s.expired = s.cutAt.IsZero()
	grace := deadlineGrace
	if !s.answered { // there is nobody to ask
		grace = 0
	}
	s.mu.Unlock()
	s.log.Warn("the deadline has passed and nobody has stopped the sandbox")
	s.stop(grace, reasonExpired)
}

// reasonExpired is why a VM was stopped whose deadline has passed.
const reasonExpired = "its deadline passed"
