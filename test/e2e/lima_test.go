package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab/test/limactl"
	"github.com/agentlab-vm/agentlab/test/sample"
)

// reachTask tries the network of the host in the ways of Lima's own network.
const reachTask = `
for address in 10.0.2.2 192.168.5.2 169.254.169.254; do
    if curl -sm 5 "http://$address/"; then echo "reached $address"; fi
done`

// One daemon drives two backends: the same job runs in an instance of Lima and in a
// microVM, and both guests have the same network policy.
func TestLima(t *testing.T) {
	sample.Long(t, "it boots virtual machines")
	path := limactl.Build(t, "../..")
	l := newLab(t)
	var err error
	if l.attr, err = limactl.UserAttr(); err != nil {
		t.Fatal(err)
	}
	config := fmt.Sprintf("backend: mac\nbackends:\n  local: {driver: qemu}\n  mac: {driver: lima, limactl: %s}\n", path)
	if err := os.MkdirAll(filepath.Join(l.home, "config"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(l.home, "config", "config.yaml"), []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	repo := sampleRepo(t)
	for _, name := range []string{"mac", "local"} {
		j, r := l.job("--backend", name, "--repo", repo, "--agent", "shell", "--task", mendTask+reachTask)
		if r.code != 0 || j.Status != "COMPLETED" || j.Backend != name {
			t.Fatalf("%s: %+v\n%v", name, j, r)
		}
		if log := l.ok("job", "logs", j.ID); !strings.Contains(log, "the work is done") || strings.Contains(log, "reached") {
			t.Errorf("%s: log is %q", name, log)
		}
		if r := l.run(repo, "job", "fetch", j.ID); r.code != 0 {
			t.Errorf("%s: fetch: %v", name, r)
		}
	}
	l.noSandboxes()
	if left, _ := filepath.Glob(filepath.Join(l.home, "state", "backends", "*", "lima", "home", "[a-z]*")); len(left) > 0 {
		t.Errorf("instances are left: %q", left)
	}
}
