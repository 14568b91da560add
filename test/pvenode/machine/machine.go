package machine

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"runtime"
	"sync"
	"syscall"
	"time"

	"github.com/agentlab-vm/agentlab/internal/hostos"
	"github.com/agentlab-vm/agentlab/test/guard"
)

// startLimit is how long QEMU has to begin; its bridge scripts run in it.
const startLimit = guard.Patience

// StartError is a QEMU that ended before it ran.
type StartError struct {
	Code int    // of its exit
	Log  string // what it said
}

// Error implements error with the text that ends a Proxmox VE task.
func (e *StartError) Error() string {
	return fmt.Sprintf("start failed: QEMU exited with code %d", e.Code)
}

// Machine is a running QEMU.
type Machine struct {
	spec Spec
	pid  int
	log  lockedBuffer

	mon   *monitor
	agent sync.Mutex // held for one conversation: the port takes no two
	done  chan struct{}
	code  int // of QEMU's exit, once done
}

// lockedBuffer takes QEMU's words.
type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// Start starts it and returns when QEMU answers; a guest may take minutes from
// there. The error of a QEMU that ended is *StartError.
func Start(ctx context.Context, s Spec) (*Machine, error) {
	if err := s.check(); err != nil {
		return nil, err
	}
	if len(s.file("serial0")) > 100 {
		return nil, fmt.Errorf("%s is too long a path for sockets", s.Dir)
	}
	if err := os.MkdirAll(s.Dir, 0o700); err != nil {
		return nil, err
	}
	if err := s.plugs(); err != nil {
		return nil, err
	}
	m := &Machine{spec: s, done: make(chan struct{})}
	if err := m.launch(s.command()); err != nil {
		return nil, err
	}
	if err := m.greet(ctx); err != nil {
		m.Kill()
		<-m.done
		if errors.Is(err, errEnded) {
			return nil, &StartError{Code: m.code, Log: m.log.String()}
		}
		return nil, err
	}
	return m, nil
}

// launch starts the process from a thread that lives as long as it does: when
// this program ends, however it ends, so does QEMU.
func (m *Machine) launch(args []string) error {
	_ = os.Remove(m.spec.file("qmp"))
	cmd := exec.CommandContext(context.Background(), args[0], args[1:]...)
	cmd.Stdout, cmd.Stderr = &m.log, &m.log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := hostos.EndWithParent(cmd.SysProcAttr); err != nil {
		return err
	}
	started := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with this function
		err := cmd.Start()
		if err == nil {
			m.pid = cmd.Process.Pid
		}
		started <- err
		if err != nil {
			return
		}
		_ = cmd.Wait()
		m.code = cmd.ProcessState.ExitCode()
		m.unplug()
		close(m.done)
	}()
	return <-started
}

// unplug removes what outlives QEMU's interfaces.
func (m *Machine) unplug() {
	for _, n := range m.spec.Conf.netNumbers() {
		if props(m.spec.Conf["net"+n])["firewall"] == "1" {
			for _, link := range []string{fmt.Sprintf("fwpr%dp%s", m.spec.VMID, n), m.spec.firewallBridge(n)} {
				_ = exec.CommandContext(context.Background(), "ip", "link", "del", link).Run()
			}
		}
	}
	for _, suffix := range []string{"qmp", "qga", "serial0", "pid"} {
		_ = os.Remove(m.spec.file(suffix))
	}
}

var errEnded = errors.New("QEMU ended")

// greet opens the monitor as soon as QEMU listens.
func (m *Machine) greet(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	for {
		conn, err := new(net.Dialer).DialContext(ctx, "unix", m.spec.file("qmp"))
		if err == nil {
			m.mon, err = newMonitor(ctx, conn, m.event)
			if err == nil {
				return nil
			}
		}
		select {
		case <-m.done:
			return errEnded
		case <-ctx.Done():
			return fmt.Errorf("QEMU does not answer: %w: %s", ctx.Err(), m.log.String())
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// event ends QEMU when its guest has powered itself off, as qmeventd does.
func (m *Machine) event(name string) {
	if name == "SHUTDOWN" {
		go m.Quit()
	}
}

// PID is QEMU's process.
func (m *Machine) PID() int { return m.pid }

// Log is what QEMU said.
func (m *Machine) Log() string { return m.log.String() }

// Done is closed when QEMU has ended.
func (m *Machine) Done() <-chan struct{} { return m.done }

// Status is QEMU's own word: running, paused, prelaunch, shutdown; stopped
// when it has ended.
func (m *Machine) Status(ctx context.Context) (string, error) {
	out, err := m.monitor(ctx, "query-status")
	select {
	case <-m.done:
		return "stopped", nil
	default:
	}
	if err != nil {
		return "", err
	}
	var st struct {
		Status string `json:"status"`
	}
	err = json.Unmarshal(out, &st)
	return st.Status, err
}

// Pause stops its CPUs.
func (m *Machine) Pause(ctx context.Context) error { return m.tell(ctx, "stop") }

// Resume lets them go on.
func (m *Machine) Resume(ctx context.Context) error { return m.tell(ctx, "cont") }

// Reset pushes the reset button.
func (m *Machine) Reset(ctx context.Context) error { return m.tell(ctx, "system_reset") }

// Powerdown pushes the power button, which a guest may ignore.
func (m *Machine) Powerdown(ctx context.Context) error { return m.tell(ctx, "system_powerdown") }

// Quit asks QEMU to end at once.
func (m *Machine) Quit() {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	if m.tell(ctx, "quit") != nil {
		m.Kill()
	}
}

// Kill cuts the power.
func (m *Machine) Kill() {
	select {
	case <-m.done:
	default:
		_ = syscall.Kill(m.pid, syscall.SIGKILL)
	}
}

func (m *Machine) tell(ctx context.Context, command string) error {
	_, err := m.monitor(ctx, command)
	return err
}

func (m *Machine) monitor(ctx context.Context, command string) (json.RawMessage, error) {
	return m.mon.do(ctx, command, nil)
}

// AgentOpen reports whether a process in the guest has the agent's port open.
func (m *Machine) AgentOpen(ctx context.Context) bool {
	out, err := m.monitor(ctx, "query-chardev")
	if err != nil {
		return false
	}
	var list []struct {
		Label string `json:"label"`
		Open  bool   `json:"frontend-open"`
	}
	if json.Unmarshal(out, &list) != nil {
		return false
	}
	for _, c := range list {
		if c.Label == "qga0" {
			return c.Open
		}
	}
	return false
}

// Agent has the guest's agent execute a command; args may be nil. An agent
// that does not answer until ctx ends is ErrAgent; what it refuses is its own
// text. A guest-shutdown that was taken has no answer and returns nil.
func (m *Machine) Agent(ctx context.Context, command string, args any) (json.RawMessage, error) {
	if !m.spec.Conf.AgentEnabled() {
		return nil, errors.New("No QEMU guest agent configured")
	}
	m.agent.Lock()
	defer m.agent.Unlock()
	return askAgent(ctx, m.spec.file("qga"), command, args)
}
