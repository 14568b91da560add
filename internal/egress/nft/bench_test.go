//go:build linux

package nft

import (
	"context"
	"encoding/binary"
	"fmt"
	"net/netip"
	"sort"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
)

// manyNames makes an allow list of n names.
func manyNames(n int) agentlab.Network {
	out := agentlab.Network{Mode: agentlab.NetworkAllowlist}
	for i := range n {
		out.Allow = append(out.Allow, agentlab.NetworkRule{Rule: fmt.Sprintf("host%d.example.com:2000", i)})
	}
	return out
}

// told is what a sandbox was told for n names.
func told(s Sandbox, n int) []Learned {
	out := make([]Learned, n)
	for i := range out {
		var a [4]byte
		binary.BigEndian.PutUint32(a[:], 0x20000000+uint32(i))
		out[i] = Learned{Sandbox: s, Addr: netip.AddrFrom4(a), Names: []string{fmt.Sprintf("host%d.example.com.", i)}, TTL: time.Hour}
	}
	return out
}

// BenchmarkLoad1000Names loads all rules of a host with a sandbox whose
// policy allows 1,000 names, each of which it was told an address for.
func BenchmarkLoad1000Names(b *testing.B) {
	k := benchKernel(b)
	s := testSandbox(2, testPolicy(b, manyNames(1000)))
	s.Port = "tap1002i0"
	st := State{Config: testConfig(), Sandboxes: []Sandbox{s}, Learned: told(s, 1000)}
	var render, load time.Duration
	for b.Loop() {
		began := time.Now()
		text, err := Render(st)
		if err != nil {
			b.Fatal(err)
		}
		render += time.Since(began)
		began = time.Now()
		if err := k.load(context.Background(), text); err != nil {
			b.Fatal(err)
		}
		load += time.Since(began)
	}
	b.ReportMetric(float64(render.Milliseconds())/float64(b.N), "ms-render/op")
	b.ReportMetric(float64(load.Milliseconds())/float64(b.N), "ms-load/op")
	if each := (render + load) / time.Duration(b.N); each > time.Second {
		b.Errorf("1,000 names took %s to load; the promise is less than a second", each)
	}
}

func benchKernel(b *testing.B) kernel {
	b.Helper()
	k, err := findNFT()
	if err != nil {
		b.Skip(err)
	}
	if _, err := k.tables(); err != nil {
		b.Skip(err)
	}
	return k
}

// BenchmarkPacketByNames measures the way of a packet to an allowed address
// and back, first packets only, so that every one of them is looked up: with
// 10, 1,000 and 100,000 addresses in the sets, in turn and in one run.
func BenchmarkPacketByNames(b *testing.B) {
	w := newWorld(b)
	sizes := []int{10, 1000, 100000}
	samples := map[int][]float64{}
	m, err := New(context.Background(), Options{Config: testConfig(), Resolver: testResolver{}})
	if err != nil {
		b.Fatal(err)
	}
	defer m.Close()
	n := manyNames(10)
	n.Allow = append(n.Allow, agentlab.NetworkRule{Rule: "host1.example.com:4000/udp"})
	if err := m.Apply(context.Background()); err != nil {
		b.Fatal(err)
	}
	s := w.tenants(m, n)
	state := State{Config: m.opts.Config, Sandboxes: s[:], Ports: taps[:]}
	for range 3 * b.N {
		for _, size := range sizes {
			state.Learned = told(s[0], size)
			for i := 10; i < size; i++ {
				state.Learned[i].Names = []string{"host1.example.com."}
			}
			text, err := Render(state)
			if err != nil {
				b.Fatal(err)
			}
			if err := m.kernel.load(context.Background(), text); err != nil {
				b.Fatal(err)
			}
			samples[size] = append(samples[size], w.firstPackets(300))
		}
	}
	var out []string
	medians := map[int]float64{}
	for _, size := range sizes {
		sort.Float64s(samples[size])
		medians[size] = samples[size][len(samples[size])/2]
		b.ReportMetric(medians[size], fmt.Sprintf("us/packet-%d", size))
		out = append(out, fmt.Sprintf("%d: %.1f", size, samples[size]))
	}
	b.Logf("microseconds of a first packet and its answer, by addresses in the sets: %s", strings.Join(out, "; "))
	b.ReportMetric(medians[100000]/medians[10], "x-100000-to-10")
}

// firstPackets returns the mean time of a new UDP flow to an allowed address
// and its first answer, in microseconds.
func (w *world) firstPackets(n int) float64 {
	w.t.Helper()
	var took time.Duration
	w.guests[0].ask("time", &took, guestapi.Probe{Target: "32.0.0.1:4000", Repeat: n})
	return float64(took.Microseconds()) / float64(n)
}
