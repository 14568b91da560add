package lima

import (
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/bounded"
	"github.com/agentlab-vm/agentlab/internal/qemuvm"
	"github.com/agentlab-vm/agentlab/internal/supervisor"
	"github.com/agentlab-vm/agentlab/internal/vmdir"
)

// Bounds of the log of limactl: bytes, and bytes per second.
const limaLogMax, limaLogRate = 256 << 10, 16 << 10

const (
	// handoffPatience is how long limactl may take to start QEMU.
	handoffPatience = 2 * time.Minute
	// qmpPatience is how long QEMU may take to become ready.
	qmpPatience = 20 * time.Second
	// agentPatience is how long the host agent may take to end after its VM.
	agentPatience = 5 * time.Second
)

// startConfig is the content of start.json: what machine needs in addition to the
// handle. All paths are absolute.
type startConfig struct {
	supervisor.Start
	QEMU    string `json:"qemu"`
	Limactl string `json:"limactl"`
	Home    string `json:"home"` // LIMA_HOME
	Bin     string `json:"bin"`  // the PATH of limactl
	Initrd  string `json:"initrd"`
	qemuvm.Machine
}

// machine is the VM of a sandbox. It implements supervisor.VM.
type machine struct {
	*qemuvm.Process // nil before Launch

	dir   string
	cfg   startConfig
	hooks supervisor.Hooks
	done  chan struct{}

	volume qemuvm.Slot

	pressed atomic.Bool // the supervisor has asked for the power-off

	mu     sync.Mutex
	handle vmdir.Handle // only its network changes
}

// openVM implements supervisor.Kind.
func openVM(dir string, h supervisor.Hooks) (supervisor.VM, error) {
	m := &machine{dir: dir, hooks: h, done: make(chan struct{})}
	if err := supervisor.ReadStart(dir, &m.cfg); err != nil {
		return nil, err
	}
	var err error
	if m.handle, err = vmdir.ReadHandle(dir); err != nil {
		return nil, vmdir.AsError(err, "cannot read %s", vmdir.FileConfig)
	}
	return m, nil
}

// instance returns the directory of the VM's instance.
func (m *machine) instance() string {
	return filepath.Join(m.cfg.Home, instanceName(m.handle.Spec.UID))
}

// Launch implements supervisor.VM: limactl starts its host agent, the host agent
// starts the wrapper in the place of QEMU, and then QEMU is started.
func (m *machine) Launch(ctx context.Context) (wires supervisor.Wires, err error) {
	c := qemuvm.Command{
		Files: supervisor.Dir{Path: m.dir, Process: processName}, Program: m.cfg.QEMU,
		Args: vmArgs(m.handle, m.cfg, m.instance()), Log: m.hooks.Log, Event: m.onEvent,
	}
	if c.Lock, err = c.Files.LockProcess(); err != nil {
		return wires, err
	}
	defer func() { _ = c.Lock.Close() }() // as qemuvm.Start does
	if err := qemuvm.MakeNoVolume(m.dir); err != nil {
		return wires, err
	}
	a, err := startAgent(ctx, m.dir, m.instance(), m.cfg)
	if err != nil {
		return wires, err
	}
	if m.Process, wires, err = qemuvm.Start(c); err != nil {
		a.end(0)
		return wires, err
	}
	go func() {
		if a.calls.lost() {
			m.stop("limactl has ended the wrapper")
		}
	}()
	go func() {
		<-m.Process.Done()
		a.end(agentPatience)
		close(m.done)
	}()
	return wires, nil
}

// vmArgs returns the command line of QEMU, without the program. QEMU runs in the
// sandbox's directory.
func vmArgs(h vmdir.Handle, c startConfig, instance string) []string {
	size := strconv.Itoa(h.Spec.Resources.MemoryMB) + "M"
	file := func(name string) string { return comma(filepath.Join(instance, name)) }
	a := append([]string{"-name", "lima-" + filepath.Base(instance) + ",debug-threads=on"}, qemuvm.Confined...)
	a = append(a, c.Args()...)
	a = append(a,
		"-kernel", h.Image.Kernel, "-initrd", c.Initrd, "-append", c.KernelCommandLine(),
		"-smp", strconv.Itoa(h.Spec.Resources.Cores), "-m", size, "-rtc", "base=utc",
	)
	a = append(a, qemuvm.Devices(qemuvm.FDNetwork, qemuvm.FDControl, qemuvm.FDConsole, qemuvm.FDMonitor)...)
	a = append(a,
		// The disks, with their formats: a guest must not choose the format of its disk
		// by its content.
		"-blockdev", "driver=file,node-name=base-file,read-only=on,filename="+comma(h.Image.RootDisk),
		"-blockdev", "driver=raw,node-name=base,read-only=on,file=base-file",
		"-blockdev", "driver=file,node-name=root-file,discard=unmap,filename="+file(limaDiffDisk),
		"-blockdev", "driver=qcow2,node-name=root,file=root-file,backing=base,discard=unmap,detect-zeroes=unmap",
		"-device", "virtio-blk-device,id=root-disk,drive=root,serial="+qemuvm.RootSerial+",werror=enospc,rerror=report",
	)
	a = append(a, qemuvm.SlotArgs...)
	a = append(a, qemuvm.Helpers...)
	return append(a,
		// For Lima's host agent.
		"-chardev", "socket,id=lima,server=on,wait=off,path="+file(limaMonitor), "-mon", "chardev=lima,mode=control",
		"-pidfile", filepath.Join(instance, limaPID),
	)
}

// comma escapes the commas in the value of an option of QEMU.
func comma(s string) string { return strings.ReplaceAll(s, ",", ",,") }

// agent is the host agent of an instance.
type agent struct {
	cmd   *exec.Cmd // limactl, which becomes the host agent
	ended <-chan struct{}
	log   *bounded.Log
	calls *handoff
}

// startAgent starts the instance with limactl, and returns when its host agent has
// started the wrapper.
func startAgent(ctx context.Context, dir, instance string, cfg startConfig) (*agent, error) {
	files := agentFiles(dir)
	lock, err := files.LockProcess() // kills a host agent whose supervisor was killed
	if err != nil {
		return nil, err
	}
	defer func() { _ = lock.Close() }() // the host agent still holds it
	// Nothing of the instance runs: these files are the rest of a run that was killed.
	for _, name := range []string{limaAgentPID, limaAgent, limaPID, limaMonitor} {
		if err := os.RemoveAll(filepath.Join(instance, name)); err != nil {
			return nil, vmdir.Fault(err, "cannot remove %s of the instance", name)
		}
	}
	calls, err := listenHandoff(filepath.Join(dir, fileWrapper))
	if err != nil {
		return nil, err
	}
	a := &agent{calls: calls}
	if a.log, err = bounded.OpenLog(filepath.Join(dir, fileLimaLog), limaLogMax, limaLogRate, time.Now); err != nil {
		calls.close()
		return nil, vmdir.Fault(err, "cannot open %s", fileLimaLog)
	}
	last := bounded.Tail{Max: 4 << 10}
	a.cmd = exec.Command(cfg.Limactl, "start", "--tty=false", "--foreground", filepath.Base(instance)) //nolint:noctx // it lives as long as the VM
	a.cmd.Dir, a.cmd.Env = dir, append(limaEnv(cfg.Home, cfg.Bin), envQEMU+"="+cfg.QEMU, envSocket+"="+filepath.Join(dir, fileWrapper))
	a.cmd.Stdout, a.cmd.Stderr, a.cmd.WaitDelay = a.log, io.MultiWriter(a.log, &last), 2*time.Second
	a.cmd.ExtraFiles = []*os.File{lock}
	if a.ended, err = qemuvm.StartUnprivileged(a.cmd, nil, false); err != nil {
		calls.close()
		_ = a.log.Close()
		return nil, vmdir.Fault(err, "cannot start limactl (%s)", cfg.Limactl)
	}
	ctx, cancel := context.WithTimeoutCause(ctx, handoffPatience, errors.New("limactl has not started QEMU in time"))
	defer cancel()
	if err = files.NoteProcess(a.cmd.Process.Pid); err == nil {
		err = calls.await(ctx, a.ended, filepath.Base(instance))
	}
	if err == nil {
		return a, nil
	}
	a.end(0)
	words := lastWords(last.String())
	if agent, rerr := os.ReadFile(filepath.Join(instance, limaAgentLog)); rerr == nil && len(agent) > 0 {
		words = lastWords(string(agent))
	}
	if words != "" {
		err = agentlab.Errorf(agentlab.CodeUnavailable, "%w (%s)", err, words).WithHint("see %s and %s", filepath.Join(dir, fileLimaLog), filepath.Join(instance, limaAgentLog))
	}
	return nil, err
}

// agentFiles returns the files of the process of the host agent: it keeps its parent's
// death signal in half of its starts only.
func agentFiles(dir string) supervisor.Dir { return supervisor.Dir{Path: dir, Process: "limactl"} }

// endAgent ends the host agent of a VM whose supervisor and QEMU have ended.
func endAgent(dir string) error {
	lock, err := agentFiles(dir).LockProcess()
	if err == nil {
		err = lock.Close()
	}
	return err
}

// end ends the wrapper, and the host agent, which may take some time.
func (a *agent) end(patience time.Duration) {
	a.calls.close()
	select {
	case <-a.ended:
	case <-time.After(patience):
		_ = a.cmd.Process.Kill()
		<-a.ended
	}
	_ = a.log.Close()
}

// stop powers the VM off because a user has stopped the instance.
func (m *machine) stop(why string) {
	m.hooks.Log.Info("the instance is stopped by a user of Lima", "why", why)
	m.hooks.PowerOff()
}

// PowerButton implements supervisor.VM.
func (m *machine) PowerButton(ctx context.Context) error {
	m.pressed.Store(true)
	return m.Process.PowerButton(ctx)
}

// Ready implements supervisor.VM.
func (m *machine) Ready(ctx context.Context) error {
	ctx, cancel := context.WithTimeoutCause(ctx, qmpPatience, errors.New("QEMU did not become ready"))
	defer cancel()
	err := m.QMP.Negotiate(ctx)
	if err == nil {
		err = vmdir.PlugAttached(ctx, m.dir, m.SetVolume)
	}
	if err == nil {
		err = m.QMP.Running(ctx)
	}
	if err == nil {
		return nil
	}
	return m.NotReady(err)
}

// Done implements supervisor.VM.
func (m *machine) Done() <-chan struct{} { return m.done }

// Disks implements supervisor.VM.
func (m *machine) Disks() []string {
	disks := []string{filepath.Join(m.instance(), limaDiffDisk)}
	if dir, _ := m.volume.Volume(); dir != "" {
		disks = append(disks, filepath.Join(dir, limaDataDisk))
	}
	return disks
}

// VMID implements supervisor.VM.
func (m *machine) VMID() int { return m.handle.Spec.VMID }

// Network implements supervisor.VM.
func (m *machine) Network() agentlab.Network {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.handle.Spec.Network
}

// StoreNetwork implements supervisor.VM.
func (m *machine) StoreNetwork(n agentlab.Network) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.handle.StoreNetwork(m.dir, n)
}

func (m *machine) onEvent(e qemuvm.QMPEvent) {
	switch e.Event {
	case "BLOCK_IO_ERROR":
		e.DiskError(m.hooks)
	case "RESUME":
		m.hooks.Paused("")
	case "POWERDOWN":
		if !m.pressed.Load() {
			go m.stop("limactl stop")
		}
	}
}
