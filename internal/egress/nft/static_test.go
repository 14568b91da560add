//go:build linux

package nft

import (
	"bytes"
	"context"
	"net"
	"os/exec"
	"strings"
	"testing"
)

// TestStaticRules runs scripts/net/apply.sh --static: its file loads, on this
// kernel too, and is then what the code would have loaded.
func TestStaticRules(t *testing.T) {
	w := newWorld(t)
	run := func(args ...string) {
		t.Helper()
		cmd := exec.Command("bash", append([]string{"../../../scripts/net/apply.sh"}, args...)...)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v: %v\n%s", args, err, out)
		}
	}
	c := testConfig() // as the default configuration is
	c.Uplink, c.LogGroup = "", 8847
	m, err := New(context.Background(), Options{Config: c})
	if err != nil {
		t.Fatal(err)
	}
	ctx := context.Background()
	if err := m.kernel.load(ctx, removal(ours...)); err != nil { // of tests before
		t.Fatal(err)
	}
	run("--static")
	if st, err := m.Status(ctx); err != nil || len(st.Tables) > 0 {
		t.Fatalf("after a dry run: %+v, %v", st, err)
	}
	for range 2 { // again changes nothing
		run("--static", "--apply")
		st, err := m.Status(ctx)
		if err != nil || !st.Applied() {
			t.Fatalf("%+v, %v", st, err)
		}
		// The LAN of this host is not in the file.
		for _, d := range st.Drift {
			if !strings.Contains(d, "always_lan") && !strings.Contains(d, "always4") && !strings.Contains(d, "always6") && !strings.Contains(d, "isatap") {
				t.Error(d)
			}
		}
	}
	if l, err := net.InterfaceByName("vmbr1"); err != nil || !bytes.Equal(l.HardwareAddr, bridgeMAC) {
		t.Errorf("%+v, %v: not the address %s", l, err, bridgeMAC)
	}
	w.sh("ip link set vmbr1 address 02:00:00:00:00:02")
	run("--static", "--apply")
	if l, err := net.InterfaceByName("vmbr1"); err != nil || l.HardwareAddr.String() != "02:00:00:00:00:02" {
		t.Errorf("%+v, %v: the address of the owner was changed", l, err)
	}
	for _, target := range []string{"192.31.196.20:8080", "10.77.0.1:53", "192.168.1.50:8080", "10.77.0.3:8080"} {
		if w.guests[0].reaches("tcp", target) {
			t.Errorf("%s was reached by who is no sandbox", target)
		}
	}
	if out, err := exec.Command("nft", "list", "set", "bridge", "agentlab", "ports").Output(); !m.opts.Config.BridgeMeta && (err != nil || !strings.Contains(string(out), taps[1])) {
		t.Errorf("ports are not known: %s %v", out, err)
	}
	for _, f := range w.outside().Flows {
		if f.Port == 8080 {
			t.Errorf("%v arrived", f)
		}
	}
}
