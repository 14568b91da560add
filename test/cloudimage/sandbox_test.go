package cloudimage

import (
	"crypto/ed25519"
	"crypto/rand"
	"encoding/base64"
	"encoding/json"
	"net"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/control"
	"github.com/agentlab-vm/agentlab/internal/link"
	"github.com/agentlab-vm/agentlab/internal/stream"
	"github.com/agentlab-vm/agentlab/test/guard"
	"github.com/agentlab-vm/agentlab/test/sample"
)

const (
	testUID = "aaaaaaaaaaaaaaaaaaaaaaaaaa"
	testKey = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIBdEDKlEZqHUWrL9MGzjnqWmnSKdZnJWRyvMNDM4xRUd"

	// As Proxmox VE makes it of ipconfig0 and nameserver.
	networkConfig = `version: 1
config:
    - type: physical
      name: eth0
      mac_address: 'bc:24:11:00:00:01'
      subnets:
      - type: static
        address: '10.0.2.15'
        netmask: '255.255.255.0'
        gateway: '10.0.2.2'
    - type: nameserver
      address:
      - '10.0.2.3'
      search:
      - 'lab'
`
)

// run runs a script in the guest and returns what it prints.
func (v *vm) run(c *control.Client, user, script string) string {
	v.Helper()
	ctx := guard.Context(v)
	conn, err := c.Exec(ctx, guestapi.ExecRequest{Command: []string{"/bin/sh", "-c", script}, User: user})
	if err != nil {
		v.Fatalf("%s: %v", script, err)
	}
	defer func() { _ = conn.Close() }()
	var out strings.Builder
	for r := stream.NewReader(conn); ; {
		kind, p, err := r.Next()
		if err != nil {
			v.Fatalf("%s: %v", script, err)
		}
		switch kind {
		case stream.Stdout, stream.Stderr:
			_, _ = out.Write(p)
		case stream.Exit:
			var st stream.ExitStatus
			if err := json.Unmarshal(p, &st); err != nil || st.Code != 0 {
				v.Errorf("%s: %s\n%s", script, p, out.String())
			}
			return strings.TrimSpace(out.String())
		}
	}
}

// expect runs a script that must print want.
func (v *vm) expect(c *control.Client, user, script, want string) {
	v.Helper()
	if got := v.run(c, user, script); got != want {
		v.Errorf("%s: got %q, want %q", script, got, want)
	}
}

func (v *vm) controlJSON() []byte {
	pub, _ := v.key.Public().(ed25519.PublicKey)
	b, err := json.Marshal(guestapi.ControlConfig{VMID: 1001, UID: testUID, Controller: "http://10.0.2.2:8844", HostKey: pub})
	if err != nil {
		v.Fatal(err)
	}
	return b
}

func (v *vm) identity(c *control.Client, name string) guestapi.Health {
	v.Helper()
	id := guestapi.Identity{
		UID: testUID, Hostname: name, Time: time.Now(), Entropy: make([]byte, 64),
		Bootstrap: &guestapi.Bootstrap{Token: "not-a-token", Controller: "http://10.0.2.2:8844", VMID: 1001},
	}
	_, _ = rand.Read(id.Entropy)
	h, err := c.SetIdentity(v.Context(), id)
	if err != nil {
		v.Fatal(err)
	}
	if h.Identity != testUID {
		v.Errorf("the guest says that it is %q", h.Identity)
	}
	return h
}

// isSandbox checks the properties that every clone must have, however its
// template was built.
func (v *vm) isSandbox(c *control.Client, name string) {
	v.Helper()
	v.expect(c, "root", "hostname", name)
	v.expect(c, "root", "ip -4 -br addr show dev eth0 | awk '{print $3}'", "10.0.2.15/24")
	v.expect(c, "root", "sed -n 's/^nameserver //p' /etc/resolv.conf", "10.0.2.3")
	v.expect(c, "root", "cat /etc/machine-id | wc -c", "33")
	v.expect(c, "agent", "id -un; sudo -n id -un", "agent\nroot")
	v.expect(c, "agent", "agentlab-agent --version >/dev/null && echo yes", "yes")
	if size, err := strconv.Atoi(v.run(c, "root", "df --output=size -BM / | tail -n 1 | tr -dc 0-9")); err != nil || size < 4700 {
		v.Errorf("the root file system has %d MiB of a disk of 5 GiB", size)
	}
	v.expect(c, "root", "stat -c '%a %U' /etc/agentlab/control.json", "644 root")
}

// refusesOthers: the key of another sandbox is refused.
func (v *vm) refusesOthers() {
	v.Helper()
	other, err := link.SandboxKey(make([]byte, link.SeedLen), "another")
	if err != nil {
		v.Fatal(err)
	}
	raw, err := net.Dial("tcp", "127.0.0.1:"+strconv.Itoa(v.port))
	if err != nil {
		v.Fatal(err)
	}
	if _, err := link.DialTLS(v.Context(), raw, other); agentlab.CodeOf(err) != agentlab.CodeDenied {
		v.Errorf("another's key: %v", err)
	}
}

// sshKey authorises a key and returns the host key, once sshd answers.
func (v *vm) sshKey(c *control.Client) string {
	v.Helper()
	ctx := guard.Context(v)
	r, err := c.SSHKey(ctx, guestapi.SSHKeyRequest{PublicKey: testKey, Seconds: 600})
	if err != nil || len(r.HostKeys) != 1 {
		v.Fatalf("ssh: %v %v", r.HostKeys, err)
	}
	return r.HostKeys[0]
}

func (v *vm) noFailedUnits(c *control.Client) {
	v.Helper()
	v.run(c, "root", "cloud-init status --wait >/dev/null 2>&1 || true")
	v.expect(c, "root", "systemctl --failed --no-legend --plain", "")
	v.expect(c, "root", "cloud-init status | head -n 1", "status: done")
}

// seedThroughAgent writes the seed of the REST transport: Proxmox VE's own user-data, and the name of
// the controller through the guest agent once the guest is up.
func (v *vm) seedThroughAgent(name string) {
	v.Helper()
	v.seed(map[string][]byte{
		"user-data": []byte("#cloud-config\nhostname: " + name + "\nmanage_etc_hosts: true\nfqdn: " + name + ".lab\nuser: agent\nssh_authorized_keys:\n  - " + testKey +
			"\nchpasswd:\n  expire: False\nusers:\n  - default\npackage_upgrade: false\n"),
		"network-config": []byte(networkConfig), "meta-data": []byte("instance-id: 2\n"),
	})
	v.boot()
	v.eventually("the guest agent answers", func() error {
		_, err := v.agent("guest-ping", map[string]any{})
		return err
	})
	open, err := v.agent("guest-file-open", map[string]any{"path": guestapi.ControlFile, "mode": "wb"})
	if err != nil {
		v.Fatal(err)
	}
	handle, err := strconv.Atoi(string(open))
	if err != nil {
		v.Fatal(err)
	}
	if _, err := v.agent("guest-file-write", map[string]any{"handle": handle, "buf-b64": base64.StdEncoding.EncodeToString(v.controlJSON())}); err != nil {
		v.Fatal(err)
	}
	if _, err := v.agent("guest-file-close", map[string]any{"handle": handle}); err != nil {
		v.Fatal(err)
	}
}

// bootsVMs skips a test where it cannot run.
func bootsVMs(t testing.TB) {
	t.Helper()
	sample.Long(t, "it boots virtual machines")
	needsRoot(t)
}

func needsRoot(t testing.TB) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("skipped: it mounts, and that needs root")
	}
}
