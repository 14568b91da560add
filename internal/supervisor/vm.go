package supervisor

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"path/filepath"
	"sync"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/egress"
	"github.com/agentlab-vm/agentlab/internal/egress/vnet"
	"github.com/agentlab-vm/agentlab/internal/link"
	"github.com/agentlab-vm/agentlab/internal/sockpath"
	"github.com/agentlab-vm/agentlab/internal/stream"
)

// VM is one virtual machine, which its driver runs in the supervisor's
// process. The supervisor calls Launch and Ready once each, in this order.
type VM interface {
	// Launch starts the VM's process. After an error it has removed everything
	// that it started.
	Launch(ctx context.Context) (Wires, error)
	// Ready returns when the VM's CPUs run.
	Ready(ctx context.Context) error
	// Done returns a channel that is closed when the process of a launched
	// VM has ended and End can be called.
	Done() <-chan struct{}
	// End returns, after Done, how a VM ended that was not asked to.
	End(s Seen) End
	// PowerButton asks the guest's init to power off.
	PowerButton(ctx context.Context) error
	// Quit ends the VM without its guest, and flushes its disk.
	Quit(ctx context.Context) error
	// Kill ends the VM at once.
	Kill()
	// Pause stops the VM's CPUs.
	Pause(ctx context.Context) error
	// Continue resumes the VM's CPUs after Pause, or after the VM has paused
	// itself. When they run, the VM calls Hooks.Paused with "".
	Continue(ctx context.Context) error
	// Disks returns the paths of the files that grow on the host's disk while the
	// guest writes. If there are none, the guest is paused as if it had written.
	Disks() []string
	// VMID returns the number of the sandbox.
	VMID() int
	// Network returns the policy at the start.
	Network() agentlab.Network
	// StoreNetwork stores a policy for the next start. The supervisor calls it
	// before it enforces the policy, one call at a time.
	StoreNetwork(n agentlab.Network) error
}

// End is how a VM ended that was not asked to.
type End struct {
	Reason     string // one printable line
	PoweredOff bool   // its guest powered it off
	Rebooted   bool   // its guest rebooted: it can be started again
}

// Wires are the supervisor's ends of a VM's devices. The supervisor closes
// them. Each may be nil: the VM has no such device.
type Wires struct {
	Network io.ReadWriteCloser // Ethernet frames (vnet.Config.Link)
	Control io.ReadWriteCloser // the serial port of the control link (package link)
	Console io.ReadCloser      // what the guest writes to its console
}

// Hooks are what a VM gets from its supervisor.
type Hooks struct {
	Log *slog.Logger
	// GuestUp waits until the guest answers on Wires.Control, and fails when
	// ctx or the control link ends. It may be called after Launch.
	GuestUp func(context.Context) error
	// Paused records that the VM's CPUs are stopped and why; "" means that
	// they run.
	Paused func(why string)
	// PowerOff powers the VM off as a request does: its guest is asked first.
	PowerOff func()
}

// Seen is the supervisor's data about a run that has ended.
type Seen struct {
	Console  string // the last output on the console
	Answered bool   // the guest answered
}

// Kind opens the VM in a directory.
type Kind func(dir string, h Hooks) (VM, error)

// startVM starts the VM and everything that is connected to it, and returns when
// the guest's CPUs run.
func (s *supervisor) startVM(ctx context.Context) error {
	s.mark = s.undo.depth()
	w, err := s.vm.Launch(ctx)
	if err != nil {
		return err
	}
	s.undo.add(func() error { // the VM ends with its supervisor
		s.vm.Kill()
		<-s.vm.Done()
		return nil
	})
	if w.Console != nil {
		s.pumpConsole(w.Console)
	}
	if w.Control != nil {
		s.link = link.Host(context.WithoutCancel(ctx), w.Control)
		s.undo.add(s.link.Close)
		go s.watchLink(context.WithoutCancel(ctx))
	}
	if s.cfg.Identity != "" {
		s.identity = newIdentity()
		ictx, cancel := context.WithCancel(context.WithoutCancel(ctx))
		s.undo.add(func() error { cancel(); return nil })
		go s.watchIdentity(ictx)
	}
	if w.Network != nil {
		s.undo.add(w.Network.Close)
		if err := s.startNet(w.Network); err != nil {
			return err
		}
	}
	if err := s.vm.Ready(ctx); err != nil {
		return err
	}
	return s.setPhase(phaseRunning, "")
}

// guestUp implements Hooks.GuestUp.
func (s *supervisor) guestUp(ctx context.Context) error {
	if s.link == nil {
		<-ctx.Done()
		return context.Cause(ctx)
	}
	return s.link.WaitUp(ctx)
}

// pumpConsole copies the guest's console to the log until the VM ends.
func (s *supervisor) pumpConsole(conn io.ReadCloser) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		buf := make([]byte, 4096)
		for {
			n, err := conn.Read(buf)
			_, _ = s.consoleLog.Write(buf[:n])
			_, _ = s.consoleTail.Write(buf[:n])
			if err != nil {
				return
			}
		}
	}()
	s.undo.add(func() error { return waitDone(done, conn) })
}

// waitDone waits until the reader of a socket whose peer has ended has read the
// rest, and closes the socket.
func waitDone(done <-chan struct{}, c io.Closer) error {
	select {
	case <-done:
	case <-time.After(2 * time.Second):
	}
	err := c.Close()
	<-done
	return err
}

func (s *supervisor) watchLink(ctx context.Context) {
	if s.link.WaitUp(ctx) == nil {
		s.log.Info("the guest answers")
		s.mu.Lock()
		s.answered = true
		s.mu.Unlock()
	}
}

// startNet runs the guest's private network.
func (s *supervisor) startNet(conn io.ReadWriteCloser) error {
	policy, err := egress.New(s.vm.Network())
	if err != nil {
		return err
	}
	cfg := vnet.Config{
		Link: conn, MTU: vnet.DefaultMTU, Policy: policy, Logger: s.log.With("part", "net"),
		Services: map[uint16]func(net.Conn){backend.ControllerPort: s.toController, backend.UploadPort: s.toController},
		Audit:    s.egressLog.Write, Reserved: s.cfg.Reserved,
	}
	if s.options.Dialer != nil {
		cfg.Dialer = s.options.Dialer
	} else if err := s.cfg.route(&cfg); err != nil {
		return err
	}
	if s.identity != nil {
		cfg.Hold = s.identity.confirmed()
	}
	network, err := vnet.New(cfg)
	if err != nil {
		return err
	}
	s.mu.Lock()
	s.net = network
	s.mu.Unlock()
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := s.net.Run(context.Background()); err != nil && !errors.Is(err, io.EOF) {
			s.log.Error("the network ended", "err", err)
		}
	})
	s.undo.add(func() error { s.net.Close(); wg.Wait(); return nil })
	return nil
}

// toController connects a connection of the guest to the controller's listener.
// If there is none the guest gets a reset, and retries.
func (s *supervisor) toController(guest net.Conn) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	host, err := sockpath.Dial(ctx, filepath.Join(s.dir, fileGuestSock))
	if err != nil {
		s.log.Debug("no controller", "err", err)
		return
	}
	stream.Splice(guest, host)
}
