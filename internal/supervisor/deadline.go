package supervisor

import (
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"net/http"
	"path/filepath"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/durable"
)

const (
	// deadlineGrace is how long a guest may take to power off at its deadline.
	deadlineGrace = 30 * time.Second
	// deadlineEvery is how often the supervisor reads the clock at least: Go's
	// timers stop while the host sleeps.
	deadlineEvery = 10 * time.Second
	// maxDeadline is the maximum size of the request that sets a deadline,
	// in bytes.
	maxDeadline = 4 << 10
)

// deadline is deadline.json.
type deadline struct {
	Lease time.Time     `json:"lease"` // backend.Deadline's
	Boot  string        `json:"boot"`  // boot ID of the host, since whose start At counts
	At    time.Duration `json:"at_ns"` // on the clock of hostos.SinceBoot
}

// set reports whether there is a deadline in this boot of the host.
func (d deadline) set() bool { return !d.Lease.IsZero() && d.Boot == BootID() }

// moved returns the deadline after a call of SetDeadline that asks for end, on
// the clock of uptime, and whether it is another one.
func (d deadline) moved(lease time.Time, end time.Duration) (deadline, bool) {
	if d.set() && d.Lease.Equal(lease) {
		return d, false
	}
	return deadline{Lease: lease, Boot: BootID(), At: end}, true
}

// readDeadline reads the deadline of the sandbox in dir. A file that a crash
// of the host left unreadable counts as none: a deadline ends with the host's
// boot.
func readDeadline(dir string) (deadline, error) {
	var d deadline
	err := durable.ReadJSON(filepath.Join(dir, fileDeadline), &d)
	switch _, broken := errors.AsType[*fs.PathError](err); {
	case err == nil:
		return d, nil
	case errors.Is(err, fs.ErrNotExist), !broken:
		return deadline{}, nil
	}
	return d, fault(err, "cannot read %s", fileDeadline)
}

func noteDeadline(dir string, d deadline) error {
	if err := durable.ReplaceJSON(filepath.Join(dir, fileDeadline), d, durable.None); err != nil {
		return fault(err, "cannot write %s", filepath.Join(dir, fileDeadline))
	}
	return nil
}

func (c client) setDeadline(ctx context.Context, to backend.Deadline) error {
	_, err := c.call(ctx, http.MethodPut, pathDeadline, to)
	return err
}

// serveDeadline sets the deadline.
func (s *supervisor) serveDeadline(w http.ResponseWriter, r *http.Request) {
	var to backend.Deadline
	err := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxDeadline)).Decode(&to)
	if err == nil && to.Lease.IsZero() {
		err = errors.New("it has no lease")
	}
	if err != nil {
		writeFault(w, agentlab.Errorf(agentlab.CodeInvalid, "invalid deadline: %w", err))
		return
	}
	if err := s.setDeadline(to); err != nil {
		s.log.Error("the deadline was not stored", "err", err)
		writeFault(w, err)
		return
	}
	writeJSONBody(w, http.StatusOK, s.status())
}

// setDeadline enforces a deadline, also if it cannot be stored.
func (s *supervisor) setDeadline(to backend.Deadline) error {
	s.deadlineMu.Lock()
	defer s.deadlineMu.Unlock()
	s.mu.Lock()
	now, changed := s.deadline.moved(to.Lease, s.uptime()+to.Left)
	if changed {
		s.deadline = now
		close(s.deadlineMoved)
		s.deadlineMoved = make(chan struct{})
	}
	s.mu.Unlock()
	if changed {
		s.log.Info("the deadline was set", "lease", to.Lease, "left", to.Left.String())
	}
	return noteDeadline(s.dir, now) // also if it is the same: an earlier attempt may have failed here
}

// watchDeadline powers the VM off when its deadline passes.
func (s *supervisor) watchDeadline() {
	for {
		s.mu.Lock()
		d, moved := s.deadline, s.deadlineMoved
		s.mu.Unlock()
		wait := deadlineEvery
		if d.set() {
			wait = min(wait, d.At-s.uptime())
		}
		if wait <= 0 {
			s.expire()
			return
		}
		select {
		case <-s.vm.Done():
			return
		case <-moved:
		case <-time.After(wait):
		}
	}
}

// expire stops the VM because its deadline has passed, unless it is being
// stopped already.
func (s *supervisor) expire() {
	s.mu.Lock()
	s.expired = s.cutAt.IsZero()
	grace := deadlineGrace
	if !s.answered { // the guest cannot be asked
		grace = 0
	}
	s.mu.Unlock()
	s.log.Warn("the deadline has passed and the sandbox was not stopped")
	s.stop(grace, reasonExpired)
}

// reasonExpired is the reason of a VM that was stopped because its deadline
// has passed.
const reasonExpired = "its deadline passed"
