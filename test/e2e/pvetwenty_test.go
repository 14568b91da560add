package e2e

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/test/pvenode"
)

const (
	twenty = 20
	// callBudget is how many calls a sandbox may cost until it is READY.
	callBudget = 12
	// benchMark begins the lines that the benchmark repeats.
	benchMark = "proxmox: "
)

// Twenty sandboxes are asked for at once, by as many command lines, on a node
// with the lock waits of a real one: each gets a VM, a number and an address
// of its own.
func TestProxmoxTwentyREST(t *testing.T) {
	t.Parallel()
	testTwenty(t, "rest")
}

// The same where the daemon runs pvesh on the node.
func TestProxmoxTwentyShell(t *testing.T) {
	t.Parallel()
	testTwenty(t, "shell")
}

func testTwenty(t *testing.T, transport string) {
	if !insideLightPVE(t) {
		return
	}
	p := newLightPVELab(t, transport, pvenode.Config{})
	p.plainProfile()
	p.ok("host", "network", "apply")
	p.node.ResetCalls()
	began := time.Now()
	boxes := make([]api.Sandbox, twenty)
	var wg sync.WaitGroup
	for i := range boxes {
		wg.Go(func() {
			r := p.run("", "--json", "sandbox", "new", "--profile", "plain")
			if err := json.Unmarshal([]byte(r.stdout), &boxes[i]); err != nil || r.code != 0 || boxes[i].State != "READY" {
				t.Errorf("%v %v", err, r)
			}
		})
	}
	wg.Wait()
	took, calls := time.Since(began), p.node.TotalCalls()
	if t.Failed() {
		return
	}
	vmids, ips := map[int]bool{}, map[string]bool{}
	for _, sb := range boxes {
		vmids[sb.VMID], ips[sb.IP] = true, true
	}
	if vms := p.vms(); len(vms) != twenty || len(vmids) != twenty || len(ips) != twenty || ips[""] {
		t.Errorf("%d VMs, %d numbers, %d addresses", len(vms), len(vmids), len(ips))
	}
	each := float64(calls) / twenty
	t.Logf(benchMark+"%d sandboxes at once over %s: %v, %d calls, %.1f for each (budget %d)", twenty, transport, took.Round(time.Millisecond), calls, each, callBudget)
	for _, line := range callTable(p.node.Calls()) {
		t.Log(benchMark + line)
	}
	if each > callBudget {
		t.Errorf("%.1f calls for each sandbox, more than %d", each, callBudget)
	}
	for i := range boxes {
		wg.Go(func() { p.run("", "sandbox", "destroy", fmt.Sprint(boxes[i].VMID)) })
	}
	wg.Wait()
	p.clean()
}

// callTable lists calls, the most frequent first.
func callTable(calls map[string]int) []string {
	var out []string
	for call, n := range calls {
		out = append(out, fmt.Sprintf("%4d %s", n, call))
	}
	slices.Sort(out)
	slices.Reverse(out)
	return out
}

// BenchmarkProxmox prints what twenty sandboxes at once cost in calls and
// time, over each transport. What it prints are the tests' own figures, taken
// in namespaces.
func BenchmarkProxmox(b *testing.B) {
	for _, transport := range []string{"REST", "Shell"} {
		cmd := exec.CommandContext(b.Context(), "/proc/self/exe", "-test.run", "^TestProxmoxTwenty"+transport+"$", "-test.v", "-test.timeout=10m")
		cmd.Stderr = os.Stderr
		out, err := cmd.StdoutPipe()
		if err == nil {
			err = cmd.Start()
		}
		if err != nil {
			b.Fatal(err)
		}
		for lines := bufio.NewScanner(out); lines.Scan(); {
			if _, figure, ok := strings.Cut(lines.Text(), benchMark); ok {
				b.Log(figure)
			}
		}
		if err := cmd.Wait(); err != nil {
			b.Errorf("%s: %v", transport, err)
		}
	}
}
