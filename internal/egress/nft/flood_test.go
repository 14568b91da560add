//go:build linux

package nft

import (
	"context"
	"encoding/binary"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/time/rate"

	"github.com/agentlab-vm/agentlab"
)

// manyAddresses answers every name with addresses that were never told before.
type manyAddresses struct {
	each int
	n    atomic.Uint32
}

func (r *manyAddresses) Exchange(_ context.Context, q *dns.Msg) (*dns.Msg, error) {
	a := new(dns.Msg).SetReply(q)
	for range r.each {
		ip := binary.BigEndian.AppendUint32(nil, 0x08000000+r.n.Add(1)%0x00ffffff)
		a.Answer = append(a.Answer, &dns.A{Hdr: dns.RR_Header{Name: q.Question[0].Name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 300}, A: ip})
	}
	return a, nil
}

// question puts a question of a sandbox, as the server does.
func (m *Manager) question(t testing.TB, vmid int, name string) *dns.Msg {
	m.mu.Lock()
	g := m.members[vmid].gate
	m.mu.Unlock()
	wire, err := new(dns.Msg).SetQuestion(name, dns.TypeA).Pack()
	if err != nil {
		t.Error(err)
		return nil
	}
	out, answer := g.Answer(context.Background(), wire, false), new(dns.Msg)
	if out == nil || answer.Unpack(out) != nil {
		return nil
	}
	return answer
}

// flood makes a sandbox resolve new names, as many at a time as it may, until
// the returned function is called.
func (m *Manager) flood(t testing.TB, vmid int) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	var n atomic.Int64
	pace := rate.NewLimiter(200, 400) // as the gate's, which refuses what comes above it
	for range 64 {
		wg.Go(func() {
			for pace.Wait(ctx) == nil {
				m.question(t, vmid, fmt.Sprintf("n%d.flood.example.com.", n.Add(1)))
			}
		})
	}
	return func() { cancel(); wg.Wait() }
}

// floodWorld is a manager with a quiet sandbox and some that flood.
func floodWorld(t testing.TB, each, floods int) (*Manager, func()) {
	w := newWorld(t)
	m := w.manager(Options{Resolver: &manyAddresses{each: each}})
	n := agentlab.Network{Mode: agentlab.NetworkAllowlist, Allow: rulesOf("*.flood.example.com"), Limits: agentlab.NetworkLimits{DNSPerSecond: 200}}
	for i := range floods + 1 {
		s := testSandbox(2+i, testPolicy(t, n))
		s.Port = fmt.Sprintf("tap%di0", 101+i)
		if err := m.Set(context.Background(), s); err != nil {
			t.Fatal(err)
		}
	}
	var stops []func()
	for i := range floods {
		stops = append(stops, m.flood(t, testSandbox(3+i, nil).VMID))
	}
	return m, func() {
		for _, s := range stops {
			s()
		}
	}
}

// BenchmarkDNSBesideFloods measures how long a sandbox waits for an answer
// while others have their DNS answers, of many addresses each, opened.
func BenchmarkDNSBesideFloods(b *testing.B) {
	for _, floods := range []int{0, 1, 4} {
		b.Run(fmt.Sprint(floods), func(b *testing.B) {
			m, stop := floodWorld(b, 16, floods)
			defer stop()
			var all []float64
			for i := 0; b.Loop(); i++ {
				began := time.Now()
				if a := m.question(b, testSandbox(2, nil).VMID, fmt.Sprintf("q%d.flood.example.com.", i)); a == nil || len(a.Answer) == 0 {
					b.Fatal("no answer")
				}
				all = append(all, float64(time.Since(began).Microseconds())/1000)
			}
			slices.Sort(all)
			b.ReportMetric(all[len(all)/2], "ms-median")
			b.ReportMetric(all[len(all)-1], "ms-worst")
		})
	}
}

// TestAnswersShareTransactions: a sandbox does not wait for its answer until
// each address that others were told has had a transaction of its own.
func TestAnswersShareTransactions(t *testing.T) {
	m, stop := floodWorld(t, 16, 3)
	defer stop()
	dir := t.TempDir()
	runs := filepath.Join(dir, "runs")
	script := fmt.Sprintf("#!/bin/sh\necho run >> %s\nexec %s \"$@\"\n", runs, m.kernel.program)
	if err := os.WriteFile(filepath.Join(dir, "nft"), []byte(script), 0o700); err != nil {
		t.Fatal(err)
	}
	m.mu.Lock()
	m.kernel.program = filepath.Join(dir, "nft")
	m.mu.Unlock()
	count := func() int {
		text, _ := os.ReadFile(runs)
		return strings.Count(string(text), "run")
	}
	for i := range 10 {
		before, name := count(), fmt.Sprintf("q%d.flood.example.com.", i)
		a := m.question(t, testSandbox(2, nil).VMID, name)
		if a == nil || len(a.Answer) != 16 {
			t.Fatalf("no answer: %v", a)
		}
		// One was under way, one is ours; the rest looks whether all is well.
		if n := count() - before; n > 30 {
			t.Errorf("an answer took %d runs of nft", n)
		}
		first, _ := netip.AddrFromSlice(a.Answer[0].(*dns.A).A.To4())
		if list := openFor(t, m, "10.77.0.2", first); !strings.Contains(list, "timeout") {
			t.Errorf("%s is told and not open: %s", first, list)
		}
	}
}

// openFor asks the kernel for the element that opens HTTPS to an address.
func openFor(t *testing.T, m *Manager, guest string, to netip.Addr) string {
	t.Helper()
	m.mu.Lock() // the kernel does not answer while others change what is asked for
	defer m.mu.Unlock()
	out, err := m.kernel.run(context.Background(), "", "get", "element", "inet", tableName, "named4", fmt.Sprintf("{ %s . %s . 443 }", guest, to))
	if err != nil {
		return err.Error()
	}
	return out
}

// cutting is a layer, as a guest may put it on itself, that cuts the ports of
// a name into as many pieces as it can.
func cutting() agentlab.Network {
	layer := agentlab.Network{Mode: agentlab.NetworkAllowlist}
	for i := range 1000 {
		layer.Allow = append(layer.Allow, rulesOf(fmt.Sprintf("*.flood.example.com:%d", 1000+2*i))...)
	}
	return layer
}

// TestAddressesAreBounded: whatever rules a guest puts on itself, an address
// takes a bounded number of elements, of bounded cost, and what would be above
// that is closed.
func TestAddressesAreBounded(t *testing.T) {
	for _, layers := range []int{1, 8} {
		n := agentlab.Network{Mode: agentlab.NetworkNAT}
		for range layers {
			n.Layers = append(n.Layers, cutting())
		}
		s := testSandbox(2, testPolicy(t, n))
		l := Learned{Sandbox: s, Addr: mustAddr("8.8.8.8"), TTL: time.Hour}
		for i := range maxNamesPer {
			l.Names = append(l.Names, fmt.Sprintf("n%d.flood.example.com.", i))
			list, weight := l.elements(planOf(s))
			if len(list) != len(denyAll) || weight > maxChecks/checksPerElement || !strings.HasPrefix(list[0].verdict, "goto no_") {
				t.Fatalf("%d layers, %d names: %d elements of weight %d", layers, i+1, len(list), weight)
			}
		}
	}
	var rules []agentlab.NetworkRule
	for i := range 100 { // few enough
		rules = append(rules, rulesOf(fmt.Sprintf("*.flood.example.com:%d", 1000+2*i))...)
	}
	p := testPolicy(t, agentlab.Network{Mode: agentlab.NetworkAllowlist, Allow: rules})
	m, w := &Manager{opts: Options{Now: time.Now}}, &strings.Builder{}
	x := &member{Sandbox: testSandbox(2, p), plan: planOf(testSandbox(2, p)), answers: map[netip.Addr]map[string]time.Time{}, elems: map[netip.Addr]opened{}}
	a := mustAddr("8.0.0.0")
	for range 400 {
		a = a.Next()
		w.Reset()
		if n := m.writeAnswers(w, x, []*pendingAnswer{{name: "a.flood.example.com.", addrs: []netip.Addr{a}, ttl: time.Hour}}); n != 1 {
			t.Fatal("one address is too much for one turn")
		}
		elems, weight := 0, 0
		for _, o := range x.elems {
			elems, weight = elems+len(o.list), weight+o.weight
		}
		if weight != x.opens || weight > maxOpens || elems > weight || len(x.elems[a].list) != 100 || len(x.elems) != len(x.answers) {
			t.Fatalf("%d elements of weight %d, counted as %d; %d addresses are told, %d open", elems, weight, x.opens, len(x.answers), len(x.elems))
		}
	}
	if !strings.Contains(w.String(), "add element inet agentlab learned4 { 10.77.0.2 . "+a.String()) {
		t.Errorf("the last address is not opened by %s", w)
	}
	x.plan = planOf(testSandbox(2, testPolicy(t, agentlab.Network{Mode: agentlab.NetworkAllowlist, Allow: append(rules, rulesOf("*.flood.example.com:1-199")...)})))
	if x.trim(time.Now()); len(x.answers) == 0 || x.answers[a] == nil || x.count() != x.pairs {
		t.Errorf("under another policy %d addresses are left", len(x.answers))
	}
}

// TestBatchesAreBounded: of what one sandbox asks for, a transaction holds a
// part; the rest comes later, in its order.
func TestBatchesAreBounded(t *testing.T) {
	p := testPolicy(t, agentlab.Network{Mode: agentlab.NetworkAllowlist, Allow: rulesOf("*.flood.example.com")})
	m, w := &Manager{opts: Options{Now: time.Now}}, &strings.Builder{}
	x := &member{Sandbox: testSandbox(2, p), plan: planOf(testSandbox(2, p)), answers: map[netip.Addr]map[string]time.Time{}, elems: map[netip.Addr]opened{}}
	a := mustAddr("8.0.0.0")
	var list []*pendingAnswer
	for i := range 10 {
		l := &pendingAnswer{vmid: 2, name: fmt.Sprintf("n%d.flood.example.com.", i), ttl: time.Hour}
		for range 30 {
			a = a.Next()
			l.addrs = append(l.addrs, a)
		}
		list = append(list, l)
	}
	if n := m.writeAnswers(w, x, list); n != 2 || len(list[2].addrs) != 30-(maxBatchAddrs-60) || len(x.answers) != maxBatchAddrs {
		t.Errorf("%d answers are complete, %d addresses of the next are left, %d are told", n, len(list[2].addrs), len(x.answers))
	}
	var q pendingAnswers
	for i, l := range list {
		if q.add(l) != (i == 0) {
			t.Error("not the first alone sees to it")
		}
	}
	q.requeue(2, q.takeAll()[2][2:])
	q.add(list[0])
	if got := q.takeAll()[2]; len(got) != 9 || got[0] != list[2] || got[8] != list[0] {
		t.Error("the order is another one")
	}
	if q.takeAll() != nil || !q.add(list[0]) {
		t.Error("later answers are not applied")
	}
}

// TestAnswersOfAnotherBefore: what a sandbox asked for opens nothing to the one
// that has its number when the answer comes.
func TestAnswersOfAnotherBefore(t *testing.T) {
	newWorld(t)
	m, err := New(context.Background(), Options{Config: testConfig()})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	s := testSandbox(2, testPolicy(t, agentlab.Network{Mode: agentlab.NetworkAllowlist, Allow: rulesOf("a.example.com")}))
	x, err := m.newMember(s, nil)
	if err != nil {
		t.Fatal(err)
	}
	y, err := m.newMember(s, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer x.gate.Close()
	m.members[s.VMID] = y
	err = m.learn(s.VMID, x.gate, "a.example.com.", []netip.Addr{mustAddr("9.9.9.9")}, time.Hour)
	if agentlab.CodeOf(err) != agentlab.CodeNotFound || len(y.answers) > 0 {
		t.Errorf("%v; answers: %v", err, y.answers)
	}
}
