package e2e

import (
	"crypto/rand"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/control"
	"github.com/agentlab-vm/agentlab/internal/stream"
)

// What the guest moves per sample, in bytes, and how often it connects.
const (
	netBulk     = 96 << 20
	netConnects = 60
)

// bulkSite gives and takes bytes.
func bulkSite() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /none", func(http.ResponseWriter, *http.Request) {})
	mux.HandleFunc("GET /bulk", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Length", strconv.Itoa(netBulk))
		block := make([]byte, 256<<10)
		for range netBulk / len(block) {
			if _, err := w.Write(block); err != nil {
				return
			}
		}
	})
	mux.HandleFunc("PUT /bulk", func(_ http.ResponseWriter, r *http.Request) { _, _ = io.Copy(io.Discard, r.Body) })
	return mux
}

// netGuest runs shell commands as root in a guest and returns their output.
type netGuest struct {
	url string // of the site, as this guest sees it
	sh  func(script string) string
}

// down and up return bytes per second as the guest's own curl measured them.
func (g netGuest) down(b *testing.B) float64 {
	return number(b, g.sh("curl -sf -o /dev/null -w '%{speed_download}' "+g.url+"/bulk"))
}

func (g netGuest) up(b *testing.B) float64 {
	return number(b, g.sh("curl -sf -o /dev/null -w '%{speed_upload}' -H Expect: -T /root/bulk "+g.url+"/bulk"))
}

// connect returns the median time of a TCP connection in microseconds.
func (g netGuest) connect(b *testing.B) float64 {
	out := g.sh(fmt.Sprintf("curl -sf -o /dev/null -H 'Connection: close' -w '%%{time_connect}\\n' '%s/none?[1-%d]'", g.url, netConnects))
	var all []float64
	for line := range strings.Lines(out) {
		all = append(all, number(b, line)*1e6)
	}
	if len(all) != netConnects {
		b.Fatalf("%d connections: %q", len(all), out)
	}
	slices.Sort(all)
	return all[len(all)/2]
}

func number(b *testing.B, s string) float64 {
	b.Helper()
	v, err := strconv.ParseFloat(strings.TrimSpace(s), 64)
	if err != nil {
		b.Fatalf("not a number: %q", s)
	}
	return v
}

// slirpGuest boots the same machine with QEMU's own user network.
func slirpGuest(b *testing.B, vm rawVM) netGuest {
	b.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	srv := &http.Server{Handler: bulkSite(), ReadHeaderTimeout: time.Minute}
	go func() { _ = srv.Serve(l) }()
	b.Cleanup(func() { _ = srv.Close() })
	guest, _ := vm.start(b, "-netdev", "user,id=n0", "-device", "virtio-net-device,netdev=n0")
	id := guestapi.Identity{
		UID: "bench", Hostname: "bench", Time: time.Now().UTC(), Entropy: make([]byte, 64),
		Network: &guestapi.Network{Address: "10.0.2.15/24", Gateway: "10.0.2.2", DNS: []string{"10.0.2.3"}, MTU: 1500},
	}
	_, _ = rand.Read(id.Entropy)
	if _, err := guest.SetIdentity(b.Context(), id); err != nil {
		b.Fatal(err)
	}
	_, port, _ := net.SplitHostPort(l.Addr().String())
	return netGuest{url: "http://10.0.2.2:" + port, sh: func(script string) string { return guestShell(b, guest, script) }}
}

func guestShell(b *testing.B, guest *control.Client, script string) string {
	b.Helper()
	conn, err := guest.Exec(b.Context(), guestapi.ExecRequest{Command: []string{"sh", "-c", script}, User: "root"})
	if err != nil {
		b.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	var out, errs strings.Builder
	for r := stream.NewReader(conn); ; {
		kind, data, err := r.Next()
		switch {
		case err != nil:
			b.Fatalf("%s: %v", script, err)
		case kind == stream.Stdout:
			out.Write(data)
		case kind == stream.Stderr:
			errs.Write(data)
		case kind == stream.Exit:
			if !strings.Contains(string(data), `"code":0`) {
				b.Fatalf("%s: %s: %s", script, data, errs.String())
			}
			return out.String()
		}
	}
}

// BenchmarkNetwork compares a sandbox's network with QEMU's own user network
// in an equal machine: throughput of one TCP stream (budget 1.3 times at
// least, both ways) and the time of a connection (budget 2 times at most).
func BenchmarkNetwork(b *testing.B) {
	l, n := newNetLab(b)
	l.config("qemu:\n  template_cache_gb: 0\n") // both guests have booted
	n.HandleHTTP("bulk.example.com", 80, bulkSite())
	l.ok("sandbox", "new", "--name", "bench", "--cores", "2", "--memory-mb", "1024")
	sandbox := netGuest{
		url: "http://" + n.Host("bulk.example.com").String(),
		sh:  func(script string) string { return l.ok("exec", "--user", "root", "bench", "--", "sh", "-c", script) },
	}
	slirp := slirpGuest(b, l.inspectVM())
	for _, g := range []netGuest{sandbox, slirp} {
		g.sh(fmt.Sprintf("head -c %d /dev/zero >/root/bulk", netBulk))
		g.connect(b) // the emulator translates code when it first sees it
		g.down(b)
		g.up(b)
	}
	measures := []struct {
		name, unit string
		scale      float64
		of         func(netGuest, *testing.B) float64
	}{
		{"down", "Mbit/s", 8e-6, netGuest.down},
		{"up", "Mbit/s", 8e-6, netGuest.up},
		{"connect", "µs", 1, netGuest.connect},
	}
	for b.Loop() {
		for _, m := range measures {
			var ours, theirs []float64
			for range benchSamples {
				ours = append(ours, m.of(sandbox, b)*m.scale)
				theirs = append(theirs, m.of(slirp, b)*m.scale)
			}
			ratio := middle(b, "sandbox "+m.name, m.unit, ours) / middle(b, "QEMU user network "+m.name, m.unit, theirs)
			b.ReportMetric(ratio, m.name+"/slirp")
		}
	}
}

// middle prints raw samples and returns the median.
func middle(b *testing.B, name, unit string, v []float64) float64 {
	b.Helper()
	var raw []string
	for _, x := range v {
		raw = append(raw, strconv.FormatFloat(x, 'f', 0, 64))
	}
	sorted := slices.Sorted(slices.Values(v))
	m := sorted[len(sorted)/2]
	b.Logf("%s: median %.0f %s of [%s]", name, m, unit, strings.Join(raw, " "))
	return m
}
