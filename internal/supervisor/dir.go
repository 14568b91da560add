package supervisor

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/durable"
	"github.com/agentlab-vm/agentlab/internal/egresslog"
	"github.com/agentlab-vm/agentlab/internal/hostos"
	"github.com/agentlab-vm/agentlab/internal/sockpath"
)

const (
	// stopPatience is how long a supervisor may take after the guest's grace;
	// then it is killed, and the VM with it.
	stopPatience = 6 * time.Second
	// changePatience limits a change of the network or the deadline.
	changePatience = 20 * time.Second
	// processPatience limits the wait for the end of an older VM process.
	processPatience = 20 * time.Second
)

// Dir is the directory of one supervised VM, for its driver. The caller must
// serialise calls that change something.
type Dir struct {
	Path string
	VMID int // the sandbox's number, for messages
	// Process is the base name of the files of the VM's process: with
	// "qemu" the process holds the lock of qemu.lock, and qemu.pid has its
	// ID.
	Process string
	Log     *slog.Logger
	// StartPatience limits Start; 0 is a limit for a VM with an ordinary priority.
	StartPatience time.Duration
	// At is called at each point at which the driver's process may die safely;
	// nil does nothing.
	At func(point string)
}

func (d Dir) at(point string) {
	if d.At != nil {
		d.At(point)
	}
}

func (d Dir) file(name string) string { return filepath.Join(d.Path, name) }

func (d Dir) processLock() string { return d.file(d.Process + ".lock") }

func (d Dir) processID() string { return d.file(d.Process + ".pid") }

// takeLock returns nil if a supervisor holds the lock.
func (d Dir) takeLock() (*os.File, error) {
	f, err := openLock(d.file(fileLock))
	if err != nil {
		return nil, fault(err, "cannot open the supervisor's lock")
	}
	ok, err := takeLock(f)
	if ok {
		return f, nil
	}
	_ = f.Close()
	if err != nil {
		return nil, fault(err, "cannot acquire the supervisor's lock")
	}
	return nil, nil
}

// LockProcess takes the lock that the VM's process inherits and that proves
// that it is alive. It kills a process whose supervisor was killed, and waits
// for its end.
func (d Dir) LockProcess() (*os.File, error) {
	lock, err := openLock(d.processLock())
	if err != nil {
		return nil, fault(err, "cannot open %s", d.processLock())
	}
	ctx, cancel := context.WithTimeout(context.Background(), processPatience)
	defer cancel()
	err = poll(ctx, func() (bool, error) {
		ok, err := takeLock(lock)
		if !ok && err == nil {
			err = killNoted(d.processID())
		}
		return ok, err
	})
	if err != nil {
		_ = lock.Close()
		return nil, fault(err, "the %s process of the last run does not end", d.Process)
	}
	return lock, nil
}

// NoteProcess stores which process is the VM's, so that Halt can kill it. A process that
// has ended needs no note.
func (d Dir) NoteProcess(pid int) error {
	id, err := identify(pid)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ESRCH) {
		return nil // it has ended: nothing has to be killed
	}
	if err == nil {
		err = durable.ReplaceJSON(d.processID(), id, durable.None)
	}
	if err != nil {
		return fault(err, "cannot write %s", d.processID())
	}
	return nil
}

// Halt powers the VM off: its guest may take grace, and with 0 it is not asked.
// Halt returns when neither the supervisor nor the VM's process is alive.
func (d Dir) Halt(ctx context.Context, grace time.Duration) error {
	held, err := lockHeld(d.file(fileLock))
	if err != nil {
		return err
	}
	if held {
		sctx, cancel := context.WithTimeout(ctx, grace+stopPatience)
		err := client(d.Path).stop(sctx, grace)
		if err == nil {
			err = waitFree(sctx, d.file(fileLock))
		}
		cancel()
		if ctx.Err() != nil {
			return agentlab.Errorf(agentlab.CodeUnavailable, "stopping: %w", context.Cause(ctx))
		}
		if err != nil {
			d.Log.Warn("killing a supervisor that does not answer", "dir", d.Path, "err", err)
		}
	}
	// A supervisor that has not yet written its process ID cannot be killed,
	// but is about to write it, or to end.
	kctx, cancel := context.WithTimeout(ctx, stopPatience)
	defer cancel()
	err = poll(kctx, func() (bool, error) {
		supervisor, err1 := lockHeld(d.file(fileLock))
		process, err2 := lockHeld(d.processLock())
		if err := errors.Join(err1, err2); err != nil || (!supervisor && !process) {
			return true, err
		}
		if supervisor {
			err1 = killNoted(d.file(filePID))
		} else {
			err2 = killNoted(d.processID())
		}
		return false, errors.Join(err1, err2)
	})
	if err != nil && kctx.Err() != nil && ctx.Err() == nil {
		return agentlab.Errorf(agentlab.CodeUnknownOutcome, "the sandbox's processes do not end")
	}
	return err
}

// Settle records, after Halt, that the VM was stopped by request, regardless
// of what its supervisor wrote.
func (d Dir) Settle(now time.Time) error {
	st, err := readState(d.Path)
	if err != nil {
		return err
	}
	if st.Phase == "" || st.Phase == phaseStopped && !st.Expired {
		return nil
	}
	st.Phase, st.Reason, st.Expired, st.Changed = phaseStopped, "", false, now.UTC()
	if err := durable.ReplaceJSON(d.file(fileState), st, durable.Content); err != nil {
		return fault(err, "cannot write %s", fileState)
	}
	return nil
}

// Power sets Power, Reason, Expired, HostRestarted and GuestRebooted of in.
func (d Dir) Power(in *backend.Instance) error {
	// A supervisor writes how it ended before it releases the lock, so a free
	// lock makes the state final, unless a start came between the two reads.
	var st runState
	for range 2 {
		held, err := lockHeld(d.file(fileLock))
		if err != nil {
			return fault(err, "cannot check the supervisor's lock")
		}
		if st, err = readState(d.Path); err != nil && !held {
			return err
		}
		if held {
			in.Power, in.Reason = backend.PowerRunning, st.Paused
			if st.Suspended {
				in.Power = backend.PowerSuspended
			}
			return nil
		}
	}
	in.Power, in.Reason = endOf(st)
	in.HostRestarted = in.Power == backend.PowerCrashed && in.Reason == hostRestarted
	in.GuestRebooted = in.Power == backend.PowerCrashed && st.Phase == phaseRebooted
	in.Expired = st.Expired
	return nil
}

// AwaitIdentity returns when a guest that continues from a saved memory has the
// identity of its sandbox, and at once for any other. It sends nothing to the guest.
func (d Dir) AwaitIdentity(ctx context.Context) error {
	st, err := client(d.Path).status(ctx, waitIdentity)
	if err == nil && st.State.Phase != phaseRunning {
		err = agentlab.Errorf(agentlab.CodeUnavailable, "sandbox %d is %s", d.VMID, st.State.Phase)
	}
	return err
}

// DialControl opens a stream to the guest over the control link. It waits a moment
// for a guest that does not answer yet.
func (d Dir) DialControl(ctx context.Context) (net.Conn, error) { return d.dial(ctx, pathControl) }

// DialGuest opens a TCP stream to a port in the guest.
func (d Dir) DialGuest(ctx context.Context, port uint16) (net.Conn, error) {
	return d.dial(ctx, dialPath(port))
}

func (d Dir) dial(ctx context.Context, path string) (net.Conn, error) {
	c, err := client(d.Path).stream(ctx, path)
	if agentlab.CodeOf(err) == agentlab.CodeTimeout { // a late answer is the same as none
		return nil, agentlab.Errorf(agentlab.CodeUnavailable, "%w", err)
	}
	return c, err
}

// Listen implements backend.Driver.ListenGuest.
func (d Dir) Listen() (net.Listener, error) { return sockpath.Takeover(d.file(fileGuestSock), 0o600) }

// Console implements backend.Console.ConsoleLog. It reads the files, so
// it also works if the VM does not run.
func (d Dir) Console(ctx context.Context, follow bool) io.ReadCloser {
	ctx, cancel := context.WithCancel(ctx)
	return &logReader{ctx: ctx, cancel: cancel, path: d.file(FileConsole), follow: follow}
}

// Egress implements backend.Net.EgressLog.
func (d Dir) Egress(ctx context.Context, after int64, limit int) ([]agentlab.EgressRecord, error) {
	return egresslog.Read(ctx, d.file(fileEgress), after, limit)
}

// RecordEgress implements backend.Net.RecordEgress.
func (d Dir) RecordEgress(ctx context.Context, r agentlab.EgressRecord) error {
	return client(d.Path).recordEgress(ctx, r)
}

// SetNetwork changes the network policy of a VM in any power state. If there
// is no supervisor to store it, stopped stores it.
func (d Dir) SetNetwork(ctx context.Context, n agentlab.Network, stopped func() error) error {
	return d.change(ctx, "network", stopped, func(ctx context.Context, c client) error { return c.setNetwork(ctx, n) })
}

// SetDeadline implements backend.Power.SetDeadline.
func (d Dir) SetDeadline(ctx context.Context, to backend.Deadline) error {
	if to.Lease.IsZero() || to.Left <= 0 {
		return agentlab.Errorf(agentlab.CodeInvalid, "a deadline needs a lease and time that is left, not %s", to.Left).WithField("left")
	}
	end := hostos.SinceBoot() + to.Left
	return d.change(ctx, "deadline", func() error {
		now, err := readDeadline(d.Path)
		if err != nil {
			return err
		}
		next, changed := now.moved(to.Lease, end)
		if !changed {
			return nil
		}
		return noteDeadline(d.Path, next)
	}, func(ctx context.Context, c client) error {
		to.Left = end - hostos.SinceBoot()
		return c.setDeadline(ctx, to)
	})
}

// change changes a setting of a VM that may run. The process that holds the
// supervisor's lock writes the files: the supervisor while it is alive,
// otherwise this one. So the stored state and the enforced state differ only
// during one step of one process, whose death ends the VM.
func (d Dir) change(ctx context.Context, what string, stopped func() error, running func(context.Context, client) error) error {
	ctx, cancel := context.WithTimeoutCause(ctx, changePatience, errors.New("the supervisor does not answer in time"))
	defer cancel()
	for {
		lock, err := d.takeLock()
		if err != nil {
			return err
		}
		if lock != nil {
			defer func() { _ = lock.Close() }()
			return stopped()
		}
		err = running(ctx, client(d.Path))
		if err == nil || agentlab.CodeOf(err) != agentlab.CodeUnavailable {
			return err
		}
		// It may be about to open its socket, or about to end.
		if perr := pause(ctx, 20*time.Millisecond); perr != nil {
			return agentlab.Errorf(agentlab.CodeUnavailable, "changing the %s of sandbox %d: %w", what, d.VMID, errors.Join(perr, err))
		}
	}
}
