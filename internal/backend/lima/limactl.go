package lima

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/bounded"
	"github.com/agentlab-vm/agentlab/internal/durable"
	"github.com/agentlab-vm/agentlab/internal/lazyre"
	"github.com/agentlab-vm/agentlab/internal/qemuvm"
	"github.com/agentlab-vm/agentlab/internal/vmdir"
)

// How limactl is found and installed.
const (
	defaultLimactl = "limactl"
	installLimactl = "install Lima: https://lima-vm.io/docs/installation"
)

// maxSocket bounds the path of a socket, in bytes (sun_path of unix(7)).
const maxSocket = 107

// minLima is the oldest version of limactl whose behaviour is known.
var minLima = qemuvm.Release{Major: 1, Minor: 2}

// createPatience limits 'limactl create', which copies the placeholder and makes a disk.
const createPatience = 10 * time.Minute

// Names in the directory of an instance, which Lima gives them
// (https://lima-vm.io/docs/dev/internals).
const (
	limaBaseDisk = "basedisk" // a link to the disk of the image, raw
	limaDiffDisk = "diffdisk" // qcow2, an overlay on it
	limaMonitor  = "qmp.sock"
	limaPID      = "qemu.pid"
	limaAgentPID = "ha.pid"
	limaAgent    = "ha.sock"
	limaAgentLog = "ha.stderr.log"
	limaConfig   = "lima.yaml"
	limaSocket   = "ssh.sock.1234567890123456" // the longest name of a socket
)

// path returns the path of a file of the driver.
func (d *Driver) path(name string) string { return filepath.Join(d.cfg.StateDir, "lima", name) }

// home is the LIMA_HOME of the instances of AgentLab.
func (d *Driver) home() string { return d.path("home") }

// instanceName returns the name of a sandbox's instance. A socket in its directory
// may have a path of 107 bytes, so it is short.
func instanceName(uid string) string { return uid[max(0, len(uid)-16):] }

func (d *Driver) instance(uid string) string { return filepath.Join(d.home(), instanceName(uid)) }

// limactl returns the absolute path of limactl.
func (d *Driver) limactl() (string, error) {
	name := d.cfg.Limactl
	if name == "" {
		name = defaultLimactl
	}
	path, err := exec.LookPath(name)
	if err == nil {
		path, err = filepath.Abs(path)
	}
	switch {
	case err == nil:
		return path, nil
	case d.cfg.Limactl != "":
		return "", agentlab.Errorf(agentlab.CodeUnavailable, "%s, which lima.limactl in config.yaml names, is not an executable program", name).
			WithHint("correct lima.limactl, or remove it to use limactl from the PATH, and restart the daemon")
	}
	return "", agentlab.Errorf(agentlab.CodeUnavailable, "limactl is not installed").WithHint(installLimactl)
}

var versionRE = lazyre.New(`^limactl version v?([0-9]+)\.([0-9]+)[^\n]*`)

// version returns the version of limactl. It runs each binary once.
func (d *Driver) version(ctx context.Context) (qemuvm.Version, error) {
	var v qemuvm.Version
	path, err := d.limactl()
	if err != nil {
		return v, err
	}
	stamp, err := qemuvm.StampOf(path)
	if err != nil {
		return v, vmdir.Fault(err, "cannot check %s", path)
	}
	d.versions.Lock()
	defer d.versions.Unlock()
	if d.known.stamp == stamp {
		return d.known.version, nil
	}
	ctx, cancel := context.WithTimeout(ctx, 15*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, path, "--version")
	out := bounded.Head{Max: 4 << 10}
	cmd.Env, cmd.WaitDelay, cmd.Stdout = d.env(), time.Second, &out
	err = cmd.Run()
	m := versionRE.FindStringSubmatch(out.String())
	if err != nil || m == nil {
		return v, agentlab.Errorf(agentlab.CodeUnavailable, "cannot read the version of %s: %w", path, errors.Join(err, ctx.Err())).WithHint(installLimactl)
	}
	v.Text = strings.TrimPrefix(m[0], "limactl version ")
	if _, err := fmt.Sscanf(m[1]+" "+m[2], "%d %d", &v.Major, &v.Minor); err != nil {
		return v, err
	}
	d.known.stamp, d.known.version = stamp, v
	return v, nil
}

// ready fails with a hint if this host cannot run a sandbox.
func (d *Driver) ready(ctx context.Context) error {
	if err := d.host.Ready(ctx); err != nil {
		return err
	}
	if os.Geteuid() == 0 {
		return agentlab.Errorf(agentlab.CodeUnsupported, "limactl does not run as root").WithHint("run the daemon as an ordinary user, or use another backend")
	}
	if socket := filepath.Join(d.instance(strings.Repeat("x", 16)), limaSocket); len(socket) > maxSocket || strings.Contains(socket, ":") {
		return agentlab.Errorf(agentlab.CodeUnsupported, "limactl cannot use the directory %s: sockets in it have paths of %d bytes, more than %d, or it has a colon", d.home(), len(socket), maxSocket).
			WithHint("move AgentLab's state to a directory with a shorter path: set AGENTLAB_HOME")
	}
	v, err := d.version(ctx)
	if err == nil && v.Less(minLima) {
		err = agentlab.Errorf(agentlab.CodeUnavailable, "limactl %s is too old, %s is needed", v.Release, minLima).WithHint(installLimactl)
	}
	return err
}

// bin is the only directory in the PATH of limactl.
func (d *Driver) bin() string { return d.path("bin") }

// wrapperQEMU is the wrapper's name, which is the name of QEMU.
const wrapperQEMU = qemuvm.DefaultQEMU

// makeBin makes placeholder and fills bin: the wrapper in the place of QEMU, an SSH client
// that connects to nothing, and the programs that limactl needs.
func (d *Driver) makeBin() error {
	d.bins.Lock()
	defer d.bins.Unlock()
	if err := os.MkdirAll(d.bin(), 0o700); err != nil {
		return vmdir.Fault(err, "cannot create %s", d.bin())
	}
	ssh, err := exec.LookPath("ssh")
	if err != nil {
		return agentlab.Errorf(agentlab.CodeUnavailable, "ssh is not installed, and limactl needs its version").WithHint("sudo apt install openssh-client")
	}
	keygen, err := exec.LookPath("ssh-keygen")
	if err != nil {
		return agentlab.Errorf(agentlab.CodeUnavailable, "ssh-keygen is not installed, and limactl needs it").WithHint("sudo apt install openssh-client")
	}
	if err := d.makeKey(keygen); err != nil {
		return err
	}
	var words []string
	for _, w := range d.cfg.Wrapper {
		words = append(words, quote(w))
	}
	if _, err := os.Stat(d.placeholder()); err != nil {
		if err := durable.Replace(d.placeholder(), make([]byte, placeholderSize), durable.None); err != nil {
			return vmdir.Fault(err, "cannot write %s", d.placeholder())
		}
	}
	for name, text := range map[string]string{
		wrapperQEMU:  "exec " + strings.Join(words, " ") + ` "$@"`,
		"ssh":        `for a; do [ "$a" = -V ] && exec ` + quote(ssh) + " -V; done\nexit 255",
		"ssh-keygen": "exec " + quote(keygen) + ` "$@"`,
		"qemu-img":   "exec " + quote(d.host.QEMUImg()) + ` "$@"`,
	} {
		text = "#!/bin/sh\n" + text + "\n"
		path := filepath.Join(d.bin(), name)
		if old, err := os.ReadFile(path); err == nil && string(old) == text {
			continue
		}
		tmp, err := durable.Temp(d.bin(), name, []byte(text))
		if err == nil {
			err = errors.Join(os.Chmod(tmp, 0o700), os.Rename(tmp, path)) //nolint:gosec // a program
		}
		if err != nil {
			return vmdir.Fault(err, "cannot write %s", path)
		}
	}
	return nil
}

// makeKey makes the SSH key that limactl gives to all instances, and that nothing uses.
// limactl would make it itself, but two of them at the same time fail, and one that is
// killed leaves a half that all later ones refuse.
func (d *Driver) makeKey(keygen string) error {
	config := filepath.Join(d.home(), "_config")
	key := filepath.Join(config, "user")
	if _, err := os.Stat(key); err == nil {
		return nil
	}
	if err := os.MkdirAll(config, 0o700); err != nil {
		return vmdir.Fault(err, "cannot create %s", config)
	}
	tmp, err := os.MkdirTemp(config, durable.TempPrefix)
	if err != nil {
		return vmdir.Fault(err, "cannot create the SSH key of Lima")
	}
	defer func() { _ = os.RemoveAll(tmp) }()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	made := filepath.Join(tmp, "user")
	cmd := exec.CommandContext(ctx, keygen, "-t", "ed25519", "-q", "-N", "", "-C", "lima", "-f", made)
	cmd.Env = d.env()
	out, err := cmd.CombinedOutput()
	if err == nil {
		err = errors.Join(os.Rename(made+".pub", key+".pub"), os.Rename(made, key)) // limactl looks for the last one
	}
	if err != nil {
		return vmdir.Fault(err, "cannot create the SSH key of Lima (%s)", agentlab.OneLine(string(out), qemuvm.MaxReason))
	}
	return nil
}

// quote returns s as one word of a shell.
func quote(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }

// env is the environment of limactl: nothing of the daemon's own, which may be secret.
func (d *Driver) env() []string { return limaEnv(d.home(), d.bin()) }

func limaEnv(home, bin string) []string {
	env := []string{"PATH=" + bin, "HOME=" + home, "LIMA_HOME=" + home, "LC_ALL=C", "TZ=UTC"}
	for _, k := range []string{"USER", "LOGNAME", "TMPDIR"} {
		if v, ok := os.LookupEnv(k); ok {
			env = append(env, k+"="+v)
		}
	}
	return env
}

// template is lima.yaml. JSON is YAML. Field names: https://lima-vm.io/docs/config.
type template struct {
	CPUType    map[string]string `json:"cpuType"`
	VMType     string            `json:"vmType"`
	Arch       string            `json:"arch"`
	Images     []templateImage   `json:"images"`
	CPUs       int               `json:"cpus"`
	Memory     string            `json:"memory"`
	Disk       string            `json:"disk"`
	Mounts     []string          `json:"mounts"`
	Plain      bool              `json:"plain"` // no guest agent, no port forwards
	SSH        templateSSH       `json:"ssh"`
	Containerd map[string]bool   `json:"containerd"`
	Firmware   map[string]bool   `json:"firmware"`
	Video      map[string]string `json:"video"`
	Resolver   map[string]bool   `json:"hostResolver"`
	ProxyEnv   bool              `json:"propagateProxyEnv"`
}

type templateImage struct {
	Location string `json:"location"`
	Arch     string `json:"arch"`
}

type templateSSH struct {
	LocalPort         int  `json:"localPort"` // 0: a free one, to which nothing listens
	ForwardAgent      bool `json:"forwardAgent"`
	LoadDotSSHPubKeys bool `json:"loadDotSSHPubKeys"`
}

// placeholder is the image of all instances until they have their own: limactl copies
// an image whole, and writes its holes, too.
func (d *Driver) placeholder() string { return d.path("placeholder.img") }

// placeholderSize is the size of the placeholder, in bytes: limactl accepts it as a raw disk.
const placeholderSize = 1 << 20

// limaYAML returns the template of a sandbox's instance with an image.
func limaYAML(h vmdir.Handle, image string) ([]byte, error) {
	size, err := h.DiskSize()
	if err != nil {
		return nil, err
	}
	return json.MarshalIndent(template{
		// No QEMU has this CPU: one that limactl starts without the wrapper, in the environment
		// of a user, ends at once, and so no guest gets Lima's network.
		CPUType: map[string]string{"x86_64": "qemu64,agentlab=on"},
		VMType:  "qemu", Arch: "x86_64", CPUs: h.Spec.Resources.Cores, Memory: fmt.Sprintf("%dMiB", h.Spec.Resources.MemoryMB),
		Disk:   fmt.Sprintf("%dB", size),
		Images: []templateImage{{Location: image, Arch: "x86_64"}},
		Mounts: []string{}, Plain: true, Video: map[string]string{"display": "none"},
		Containerd: map[string]bool{"system": false, "user": false},
		Firmware:   map[string]bool{"legacyBIOS": true}, Resolver: map[string]bool{"enabled": false},
	}, "", "  ")
}

// makeInstance creates the instance of a sandbox. What an interrupted creation left is
// removed.
func (d *Driver) makeInstance(ctx context.Context, dir string, h vmdir.Handle) error {
	if _, err := os.Lstat(filepath.Join(dir, fileMade)); err == nil {
		return nil
	}
	if err := d.ready(ctx); err != nil {
		return err
	}
	if err := d.makeBin(); err != nil {
		return err
	}
	text, err := limaYAML(h, d.placeholder())
	if err != nil {
		return err
	}
	yaml := filepath.Join(dir, fileYAML)
	if err := durable.Replace(yaml, text, durable.None); err != nil {
		return vmdir.Fault(err, "cannot write %s", yaml)
	}
	if err := d.removeInstance(h.Spec.UID); err != nil {
		return err
	}
	d.at("instance not made")
	if err := d.runLimactl(ctx, "create", "--tty=false", "--name="+instanceName(h.Spec.UID), yaml); err != nil {
		return err
	}
	d.at("instance not named")
	instance := d.instance(h.Spec.UID)
	if _, err := os.Stat(filepath.Join(instance, limaDiffDisk)); err != nil {
		return vmdir.Fault(err, "limactl create has made no disk")
	}
	base := filepath.Join(instance, limaBaseDisk)
	if err := errors.Join(os.Remove(base), os.Symlink(h.Image.RootDisk, base)); err != nil {
		return vmdir.Fault(err, "cannot link the disk of the image")
	}
	if err := durable.Replace(filepath.Join(dir, fileMade), nil, durable.Content); err != nil {
		return vmdir.Fault(err, "cannot write %s", fileMade)
	}
	d.at("instance made")
	return nil
}

// removeInstance removes the instance of a sandbox whose VM does not run. All
// instances in home belong to sandboxes, and the caller has found the sandbox.
func (d *Driver) removeInstance(uid string) error {
	if err := os.RemoveAll(d.instance(uid)); err != nil {
		return vmdir.Fault(err, "cannot remove the instance %s", instanceName(uid))
	}
	return nil
}

// runLimactl runs a command of limactl that starts no VM.
func (d *Driver) runLimactl(ctx context.Context, args ...string) error {
	path, err := d.limactl()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, createPatience)
	defer cancel()
	out := bounded.Tail{Max: 4 << 10}
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.Dir, cmd.Env, cmd.Stdout, cmd.Stderr, cmd.WaitDelay = d.home(), d.env(), &out, &out, time.Second
	ended, err := qemuvm.StartUnprivileged(cmd, nil, false)
	if err == nil {
		<-ended
		if cmd.ProcessState.Success() {
			return nil
		}
		err = errors.New(cmd.ProcessState.String())
	}
	if ctx.Err() != nil {
		return agentlab.Errorf(agentlab.CodeUnavailable, "limactl %s: %w", args[0], context.Cause(ctx))
	}
	words := lastWords(out.String())
	if strings.Contains(words, "no space left on device") {
		err = syscall.ENOSPC
	}
	return vmdir.Fault(err, "limactl %s failed (%s)", args[0], words)
}

// messageRE matches the message in a line of limactl, or of its host agent (JSON).
var messageRE = lazyre.New(`"?msg"?[=:]"((?:[^"\\]|\\.)*)"`)

// lastWords returns the last message in the output of limactl.
func lastWords(text string) string {
	text = strings.TrimSpace(text)
	text = text[strings.LastIndexByte(text, '\n')+1:]
	if m := messageRE.FindStringSubmatch(text); m != nil {
		text = m[1]
	}
	return agentlab.OneLine(text, qemuvm.MaxReason)
}
