package hostscripts

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/proxmox/pve"
	"github.com/agentlab-vm/agentlab/test/pvenode"
	"github.com/agentlab-vm/agentlab/test/sample"
)

// What the script makes on the strict node of the driver's tests is a token
// with which the driver's preflight has nothing to say, and a sandbox lives.
func TestTokenOnNode(t *testing.T) {
	sample.Long(t, "it runs the programs of a node")
	if os.Geteuid() != 0 {
		t.Skip("the script is root's")
	}
	for _, version := range []string{"8.4", "9.2"} {
		t.Run(version, func(t *testing.T) {
			n := pvenode.New(t, pvenode.Config{Version: version})
			n.AddTemplate(t, pvenode.Template{})
			out := filepath.Join(t.TempDir(), "token")
			script := func(args ...string) string {
				t.Helper()
				argv := append(n.Host(), root+"/scripts/create_api_token.sh", "--template", "9000", "--out", out)
				cmd := exec.Command(argv[0], append(argv[1:], args...)...)
				var stdout, stderr bytes.Buffer
				cmd.Stdout, cmd.Stderr = &stdout, &stderr
				if err := cmd.Run(); err != nil {
					t.Fatalf("%q: %v\n%s%s", args, err, stdout.String(), stderr.String())
				}
				return stdout.String()
			}
			if dry := script(); !strings.Contains(dry, "+ pveum user token add agentlab@pve ctl --privsep 1 ") {
				t.Errorf("dry: %s", dry)
			}
			script("--apply")
			if again := script(); again != "" {
				t.Errorf("again: %s", again)
			}
			secret, err := os.ReadFile(out)
			if err != nil {
				t.Fatal(err)
			}
			transport, err := pve.NewREST(pve.RESTOptions{URL: n.URL(), TokenID: "agentlab@pve!ctl", Secret: strings.TrimSpace(string(secret)), Fingerprint: n.Fingerprint()})
			if err != nil {
				t.Fatal(err)
			}
			defer transport.Close()
			c := pve.New(transport)
			ctx := context.Background()
			storages := strings.SplitN(n.Config(9000)["scsi0"], ":", 2)[:1]
			for _, f := range c.Preflight(ctx, pve.Needs{TokenID: "agentlab@pve!ctl", Nodes: []string{"pve"}, Templates: []int{9000}, Pool: "agentlab", Storages: storages, Bridges: []string{"vmbr1"}}) {
				if f.Level != backend.LevelOK {
					t.Errorf("%+v", f)
				}
			}
			life(ctx, t, c)
			script("--remove", "--apply")
			if again := script("--remove"); again != "" {
				t.Errorf("removed, and still: %s", again)
			}
			if _, err := c.VMs(ctx, "pve"); err == nil {
				t.Error("the token is good after it was removed")
			}
		})
	}
}

// life is a sandbox's, as far as rights matter.
func life(ctx context.Context, t *testing.T, c *pve.Client) {
	t.Helper()
	task := func(what string, u pve.UPID, err error) {
		t.Helper()
		if err == nil {
			_, err = c.Wait(ctx, u)
		}
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
	}
	u, err := c.Clone(ctx, "pve", 9000, pve.CloneOptions{NewID: 1000, Name: "sandbox", Pool: "agentlab"})
	task("clone", u, err)
	err = c.Set(ctx, "pve", 1000, pve.Changes{Set: map[string]string{
		"cores": "2", "memory": "1024", "net0": "virtio=BC:24:11:00:00:09,bridge=vmbr1", "ipconfig0": "ip=10.77.0.9/16,gw=10.77.0.1", "tags": "agentlab",
		"ciuser": "agent", "onboot": "0", "protection": "0",
	}})
	if err != nil {
		t.Fatal(err)
	}
	u, err = c.Start(ctx, "pve", 1000)
	task("start", u, err)
	if _, err := c.AgentInterfaces(ctx, "pve", 1000); err != nil && errors.As(err, new(*pve.Fault)) && strings.Contains(err.Error(), "Permission") {
		t.Error(err)
	}
	u, err = c.Stop(ctx, "pve", 1000)
	task("stop", u, err)
	u, err = c.Destroy(ctx, "pve", 1000, true)
	task("destroy", u, err)
}
