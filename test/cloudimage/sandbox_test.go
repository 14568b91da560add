package cloudimage

import (
	"context"
	"crypto/ed25519"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/control"
	"github.com/agentlab-vm/agentlab/internal/stream"
)

// run runs a script in the guest and returns what it prints.
func (v *vm) run(c *control.Client, user, script string) string {
	v.Helper()
	ctx, cancel := context.WithTimeout(v.Context(), 2*time.Minute)
	defer cancel()
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

func (v *vm) controlJSON(uid string) []byte {
	pub, _ := v.key.Public().(ed25519.PublicKey)
	b, err := json.Marshal(guestapi.ControlConfig{VMID: 1001, UID: uid, Controller: "http://10.77.0.1:8844", HostKey: pub})
	if err != nil {
		v.Fatal(err)
	}
	return b
}

const networkConfig = `version: 1
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

// The seed of the shell transport: user-data names the controller, and the
// guest answers it alone.
func TestSandboxOfUserData(t *testing.T) {
	const uid = "aaaaaaaaaaaaaaaaaaaaaaaaaa"
	v := newVM(t, uid)
	user := fmt.Sprintf("#cloud-config\nhostname: box-1\nmanage_etc_hosts: true\nuser: agent\npackage_upgrade: false\nwrite_files:\n- path: /etc/agentlab/control.json\n  permissions: '0644'\n  encoding: b64\n  content: %s\n",
		base64.StdEncoding.EncodeToString(v.controlJSON(uid)))
	v.seed(map[string][]byte{
		"user-data": []byte(user), "network-config": []byte(networkConfig), "meta-data": []byte("instance-id: 1\n"),
	})
	v.boot()
	c, h, took := v.up()
	t.Logf("guest control after %s: %+v", took.Round(100*time.Millisecond), h)
	t.Log(v.run(c, "root", "hostname; cat /etc/machine-id; ip -br a; cat /etc/resolv.conf; ls -la /etc/agentlab /etc/ssh; df -h /; cloud-init status --wait --long; systemctl --failed; systemd-analyze; systemd-analyze blame | head -20"))
}
