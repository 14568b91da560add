package cloudimage

import (
	"bufio"
	"bytes"
	"context"
	"crypto/ed25519"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/control"
	"github.com/agentlab-vm/agentlab/internal/link"
	"github.com/agentlab-vm/agentlab/test/guard"
	"github.com/agentlab-vm/agentlab/test/pvenode/machine"
)

// bootLimit is generous: guests are emulated, on machines that do other work.
const bootLimit = 3 * guard.Patience

// vm is a clone of the template in a QEMU as Proxmox starts it, but for the
// network, which leads nowhere: only guest control is forwarded, on loopback.
type vm struct {
	testing.TB
	dir  string
	key  ed25519.PrivateKey
	port int
}

func newVM(t testing.TB, uid, disk, format string) *vm {
	t.Helper()
	master := make([]byte, link.SeedLen)
	key, err := link.SandboxKey(master, uid)
	if err != nil {
		t.Fatal(err)
	}
	v := &vm{TB: t, dir: t.TempDir(), key: key}
	out, err := exec.Command("qemu-img", "create", "-q", "-f", "qcow2", "-b", disk, "-F", format, v.path("disk.qcow2"), "5G").CombinedOutput()
	if err != nil {
		t.Fatalf("qemu-img: %v %s", err, out)
	}
	return v
}

func (v *vm) path(name string) string { return filepath.Join(v.dir, name) }

func (v *vm) seed(files map[string][]byte) {
	v.Helper()
	if err := Seed(v.path("seed.iso"), files); err != nil {
		v.Fatal(err)
	}
}

// boot starts QEMU; the channel is closed when it has ended.
func (v *vm) boot() <-chan struct{} {
	v.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		v.Fatal(err)
	}
	v.port = l.Addr().(*net.TCPAddr).Port
	_ = l.Close()
	console, err := os.Create(v.path("console"))
	if err != nil {
		v.Fatal(err)
	}
	cmd := exec.Command("qemu-system-x86_64", "-machine", "pc,accel=tcg", "-cpu", machine.Emulated, "-m", "512", "-smp", "1", "-nographic", "-nodefaults",
		"-serial", "stdio",
		"-device", "virtio-scsi-pci,id=scsihw0", "-drive", "if=none,id=d0,format=qcow2,discard=on,file="+v.path("disk.qcow2"),
		"-device", "scsi-hd,bus=scsihw0.0,drive=d0,bootindex=100",
		"-drive", "if=none,id=cd,media=cdrom,format=raw,readonly=on,file="+v.path("seed.iso"), "-device", "ide-cd,bus=ide.1,unit=0,drive=cd",
		"-device", "virtio-serial", "-chardev", "socket,id=qga0,server=on,wait=off,path="+v.path("qga.sock"),
		"-device", "virtserialport,chardev=qga0,name=org.qemu.guest_agent.0",
		"-netdev", fmt.Sprintf("user,id=net0,restrict=on,hostfwd=tcp:127.0.0.1:%d-10.0.2.15:%d", v.port, link.ControlPort),
		"-device", "virtio-net-pci,netdev=net0,mac=BC:24:11:00:00:01")
	cmd.Stdout, cmd.Stderr = console, console
	if err := cmd.Start(); err != nil {
		v.Fatal(err)
	}
	done := make(chan struct{})
	go func() { _ = cmd.Wait(); _ = console.Close(); close(done) }()
	v.Cleanup(func() {
		_ = cmd.Process.Kill()
		<-done
		if v.Failed() {
			b, _ := os.ReadFile(v.path("console"))
			v.Logf("console:\n%s", b[max(0, len(b)-6000):])
		}
	})
	return done
}

// dial opens guest control, as a driver's DialControl does.
func (v *vm) dial(ctx context.Context) (net.Conn, error) {
	var d net.Dialer
	raw, err := d.DialContext(ctx, "tcp", "127.0.0.1:"+strconv.Itoa(v.port))
	if err != nil {
		return nil, err
	}
	return link.DialTLS(ctx, raw, v.key)
}

// up waits until guest control answers.
func (v *vm) up() (*control.Client, guestapi.Health, time.Duration) {
	v.Helper()
	began := time.Now()
	c := control.New(v.dial)
	ctx, cancel := context.WithTimeout(v.Context(), bootLimit)
	defer cancel()
	for {
		h, err := c.Health(ctx)
		if err == nil {
			return c, h, time.Since(began)
		}
		select {
		case <-ctx.Done():
			v.Fatalf("guest control does not answer: %v", err)
		case <-time.After(500 * time.Millisecond):
		}
	}
}

// agent asks the guest agent and returns what is under "return".
func (v *vm) agent(command string, args any) (json.RawMessage, error) {
	c, err := net.Dial("unix", v.path("qga.sock"))
	if err != nil {
		return nil, err
	}
	defer func() { _ = c.Close() }()
	_ = c.SetDeadline(time.Now().Add(guard.Patience))
	b, err := json.Marshal(map[string]any{"execute": command, "arguments": args})
	if err != nil {
		return nil, err
	}
	if _, err := c.Write(append(b, '\n')); err != nil {
		return nil, err
	}
	line, err := bufio.NewReader(c).ReadBytes('\n')
	if err != nil {
		return nil, err
	}
	var r struct {
		Return json.RawMessage `json:"return"`
		Error  json.RawMessage `json:"error"`
	}
	if err := json.Unmarshal(bytes.TrimLeft(line, "\xff"), &r); err != nil || r.Error != nil {
		return nil, fmt.Errorf("%s: %v", line, err)
	}
	return r.Return, nil
}

func (v *vm) eventually(what string, cond func() error) {
	v.Helper()
	deadline := time.Now().Add(bootLimit)
	for {
		err := cond()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			v.Fatalf("%s: %v", what, err)
		}
		time.Sleep(500 * time.Millisecond)
	}
}
