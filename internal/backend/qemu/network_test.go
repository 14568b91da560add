package qemu

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/stream"
	"github.com/agentlab-vm/agentlab/test/fakenet"
)

func rules(texts ...string) []agentlab.NetworkRule {
	out := make([]agentlab.NetworkRule, len(texts))
	for i, t := range texts {
		out[i].Rule = t
	}
	return out
}

// fakeInternet is an internet for the sandboxes of f.
func fakeInternet(t *testing.T, f *fixed) *fakenet.Net {
	t.Helper()
	internet := fakenet.New()
	t.Cleanup(internet.Close)
	sock := filepath.Join(f.StateDir, "i")
	if err := internet.ServeUnix(sock); err != nil {
		t.Fatal(err)
	}
	f.Internet = sock
	return internet
}

// TestNetworkInTheVM runs real clients in a real guest against the policies.
func TestNetworkInTheVM(t *testing.T) {
	f := warmFixture(t)
	internet := fakeInternet(t, &f)
	internet.Web("www.test")
	internet.Web("other.test")
	internet.Echo("echo.test")
	six := netip.MustParseAddr("2620:4f:8000::7")
	internet.SetName("six.test", six)
	internet.Echo("six.test")
	internet.Web("six.test")
	drips := internet.HandleTCP("www.test", 8080, drip)
	b := newBox(t, f, nil)
	b.boot()
	b.identify()

	other := internet.Host("other.test")
	try := func(script, want string) {
		t.Helper()
		if got := b.output(script); got != want {
			t.Errorf("%s: %q, want %q", script, got, want)
		}
	}
	const get = "curl -s -m 20 -o /dev/null -w '%{http_code}' "
	try(get+"http://www.test/hello", "200")
	try(get+"-g http://six.test/hello", "200") // which has an IPv6 address only
	try("ping -c 1 -W 10 "+internet.Host("echo.test").String()+" >/dev/null 2>&1; echo $?", "0")
	try("ping -c 1 -W 10 "+six.String()+" >/dev/null 2>&1; echo $?", "0")
	try("ping -c 1 -W 10 fd77::1 >/dev/null 2>&1; echo $?", "0")
	try("ping -c 1 -W 10 192.168.1.1 2>&1 | grep -c 'Packet filtered'", "1")
	try("curl -s -m 20 http://[fd12::1]/; echo $?", "7") // at once

	flow := b.sh("curl -s -N http://" + drips.String() + "/")
	readUntil(t, flow, "drop")
	b.ok(b.d.UpdateNetwork(b.ctx, b.ref, agentlab.Network{Mode: agentlab.NetworkAllowlist, Allow: rules("www.test")}))
	if code := exitCode(t, flow); code == 0 {
		t.Error("a flow that the new policy forbids ends well")
	}
	try(get+"http://www.test/hello", "200")
	try(get+"http://other.test/ || echo $?", "0006")                                                            // no such name
	try(get+"http://"+other.String()+"/ || echo $?", "0007")                                                    // no IP rule
	try(get+"--resolve other.test:80:"+internet.Host("www.test").String()+" http://other.test/ || true", "000") // a Host that lies
	b.ok(b.d.Stop(b.ctx, b.ref, 0))
	before, err := b.d.EgressLog(b.ctx, b.ref, 0, 1000)
	b.ok(err)
	b.boot() // the policy and the numbers of the records live on
	b.identify()
	try(get+"http://www.test/hello", "200")
	try(get+"http://other.test/ || echo $?", "0006")
	checkRecords(t, b, before)
}

func checkRecords(t *testing.T, b *box, before []agentlab.EgressRecord) {
	t.Helper()
	last := before[len(before)-1].Seq
	var after []agentlab.EgressRecord
	eventually(t, bootTimeout, "the records of the second run come", func() (err error) {
		after, err = b.d.EgressLog(b.ctx, b.ref, last, 1000)
		if err == nil && len(after) == 0 {
			err = fmt.Errorf("none after %d", last)
		}
		return err
	})
	if after[0].Seq != last+1 {
		t.Errorf("record %d follows %d", after[0].Seq, last)
	}
	seen := map[string]bool{}
	for _, r := range before {
		seen[fmt.Sprintf("%s %s %v %s", r.Proto, r.Name, r.Allow, r.Rule)] = true
	}
	for _, want := range []string{
		"dns www.test true mode.nat", "tcp www.test true mode.nat", "icmp six.test true mode.nat", "icmp  false always.private",
		"tcp  false always.ula", "tcp www.test true allow:www.test", "dns other.test false mode.allowlist", "tcp other.test false name.mismatch",
	} {
		if !seen[want] {
			t.Errorf("no record says %q: %v", want, seen)
		}
	}
}

// drip sends a little every now and then until the other side is gone.
func drip(c net.Conn) {
	_, _ = io.WriteString(c, "HTTP/1.0 200 OK\r\n\r\n")
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for range tick.C {
		if _, err := io.WriteString(c, "drop\n"); err != nil {
			return
		}
	}
}

func readUntil(t *testing.T, conn net.Conn, text string) {
	t.Helper()
	frames := stream.NewReader(conn)
	var got strings.Builder
	for !strings.Contains(got.String(), text) {
		kind, p, err := frames.Next()
		if err != nil || kind == stream.Exit {
			t.Fatalf("the command ended (%v) after %q", err, got.String())
		}
		got.Write(p)
	}
}

// exitCode reads a command to its end.
func exitCode(t *testing.T, conn net.Conn) int {
	t.Helper()
	_ = conn.SetReadDeadline(time.Now().Add(bootTimeout))
	frames := stream.NewReader(conn)
	for {
		kind, p, err := frames.Next()
		if err != nil {
			t.Fatal(err)
		}
		if kind == stream.Exit {
			var st stream.ExitStatus
			if err := json.Unmarshal(p, &st); err != nil {
				t.Fatal(err)
			}
			return st.Code
		}
	}
}
