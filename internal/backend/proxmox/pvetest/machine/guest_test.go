package machine

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab/test/cloudimage"
	"github.com/agentlab-vm/agentlab/test/netlab"
)

// bootLimit is generous: guests are emulated, on machines that do other work.
const bootLimit = 6 * time.Minute

func cacheDir(t *testing.T) string {
	t.Helper()
	dir := os.Getenv("AGENTLAB_TEST_CACHE")
	if dir == "" {
		dir = "../../../../../.cache/test"
	}
	dir, err := filepath.Abs(dir)
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// template is the cloud disk with an agent-runner built from here.
func template(t *testing.T) string {
	t.Helper()
	runner := filepath.Join(t.TempDir(), "agent-runner")
	cmd := exec.Command("go", "build", "-o", runner, "github.com/agentlab-vm/agentlab/cmd/agent-runner")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("go build: %v\n%s", err, out)
	}
	disk, err := cloudimage.Template(t.Context(), cacheDir(t), runner, os.Stderr)
	if err != nil {
		t.Fatal(err)
	}
	return disk
}

// What Proxmox VE makes of the options in the test.
const (
	guestUser = "#cloud-config\nhostname: sb-101\nmanage_etc_hosts: true\nfqdn: sb-101\nuser: agent\nchpasswd:\n  expire: False\nusers:\n  - default\n"

	guestNetwork = "version: 1\nconfig:\n    - type: physical\n      name: eth0\n      mac_address: 'bc:24:11:00:00:02'\n      subnets:\n" +
		"      - type: static\n        address: '10.77.0.5'\n        netmask: '255.255.0.0'\n        gateway: '10.77.0.1'\n" +
		"    - type: nameserver\n      address:\n      - '10.77.0.1'\n"
)

// A real guest reads the seed as Proxmox VE makes it from options: hostname,
// user, address; its agent answers, and powers it off.
func TestGuest(t *testing.T) {
	if testing.Short() {
		t.Skip("real VMs run without -short")
	}
	need(t, "qemu-system-x86_64", "qemu-img", "mmdebstrap")
	if !netlab.IsInside(t) {
		template(t) // made where there is a network
	}
	if !netlab.Inside(t) {
		return
	}
	netlab.Sh(t, "ip link add vmbr1 type bridge; ip addr add 10.77.0.1/16 dev vmbr1; ip link set vmbr1 up")
	s := testSpec(t, Config{
		"memory": "512", "net0": "virtio=BC:24:11:00:00:02,bridge=vmbr1", "ipconfig0": "ip=10.77.0.5/16,gw=10.77.0.1", "ciuser": "agent",
		"ciupgrade": "0", "nameserver": "10.77.0.1", "ide2": "local:101/vm-101-cloudinit.qcow2,media=cdrom",
	})
	disk := s.Disks["scsi0"].File
	if err := os.Remove(disk); err != nil {
		t.Fatal(err)
	}
	if err := LinkedClone(t.Context(), template(t), "qcow2", disk); err != nil {
		t.Fatal(err)
	}
	if err := ResizeDisk(t.Context(), disk, "qcow2", 5<<30); err != nil {
		t.Fatal(err)
	}
	seed := filepath.Join(filepath.Dir(disk), "vm-101-cloudinit.qcow2")
	files := map[string]string{"user-data": guestUser, "network-config": guestNetwork, "meta-data": "instance-id: 9e9b09d63559102a5fa1052beefd198f20c49d1b\n"}
	if err := WriteSeed(t.Context(), seed, "qcow2", files); err != nil {
		t.Fatal(err)
	}
	s.Disks["ide2"] = Disk{File: seed, Format: "qcow2", CDROM: true}

	began := time.Now()
	m := start(t, s)
	defer func() {
		if text, err := os.ReadFile(m.Console()); err == nil && t.Failed() {
			t.Logf("console:\n%s", text[max(0, len(text)-5000):])
		}
	}()
	ask := func(command string, args any) json.RawMessage {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), bootLimit)
		defer cancel()
		out, err := m.Agent(ctx, command, args)
		if err != nil {
			t.Fatalf("%s: %v", command, err)
		}
		return out
	}
	ask("guest-ping", nil) // waits for it: what is said before is in the port
	t.Logf("the agent answers after %v", time.Since(began).Round(time.Second))
	if out := string(ask("guest-get-host-name", nil)); !strings.Contains(out, "sb-101") {
		t.Errorf("host name: %s", out)
	}
	if out := string(ask("guest-network-get-interfaces", nil)); !strings.Contains(out, "10.77.0.5") || !strings.Contains(out, "bc:24:11:00:00:02") {
		t.Errorf("interfaces: %s", out)
	}
	conn, err := net.DialTimeout("tcp", "10.77.0.5:22", 30*time.Second)
	if err == nil {
		_ = conn.Close()
	} else if !errors.Is(err, syscall.ECONNREFUSED) { // also an answer
		t.Errorf("over the bridge: %v", err)
	}
	ask("guest-shutdown", nil)
	select {
	case <-m.Done():
	case <-time.After(bootLimit):
		t.Fatal("it does not power off")
	}
}
