package devproxy

import (
	"fmt"
	"log/slog"
	"net/http"
	"path/filepath"
	"strings"
	"testing"

	"github.com/miekg/dns"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
)

// ask returns the code and the answers of a query.
func ask(t *testing.T, network, server, name string, qtype uint16) string {
	t.Helper()
	m := new(dns.Msg)
	m.SetQuestion(name, qtype)
	m.SetEdns0(1232, false)
	r, _, err := (&dns.Client{Net: network}).Exchange(m, server)
	if err != nil {
		t.Fatal(err)
	}
	if r.IsEdns0() == nil {
		t.Errorf("%s: the answer has no EDNS0 record, so that resolvers ask again", name)
	}
	out := dns.RcodeToString[r.Rcode]
	for _, rr := range r.Answer {
		out += " " + strings.Join(strings.Fields(rr.String())[3:], " ")
	}
	return out
}

func TestDNS(t *testing.T) {
	file := filepath.Join(t.TempDir(), "ports.json")
	w := &world{t: t, guests: map[int]*guestWorld{}, changed: make(chan struct{})}
	stop := w.start(file)
	if w.s.DNS().IsValid() {
		t.Error("it runs without a request")
	}
	at, err := w.s.SetDNS(true)
	if err != nil || !at.Addr().IsLoopback() {
		t.Fatalf("%v, %v", at, err)
	}
	for _, network := range []string{"udp", "tcp"} {
		for _, q := range []struct {
			name  string
			qtype uint16
			want  string
		}{
			{"shop.sandbox.local.", dns.TypeA, "NOERROR A 127.0.0.1"},
			{"Feature.Shop.Sandbox.LOCAL.", dns.TypeAAAA, "NOERROR AAAA ::1"},
			{"shop.sandbox.local.", dns.TypeMX, "NOERROR"},
			{"sandbox.local.", dns.TypeA, "NOERROR"},
			{"a.b.c.sandbox.local.", dns.TypeA, "NXDOMAIN"},
			{"example.com.", dns.TypeA, "REFUSED"},
			{"notsandbox.local.", dns.TypeA, "REFUSED"},
			{"shop.sandbox.localhost.", dns.TypeA, "REFUSED"},
		} {
			if got := ask(t, network, at.String(), q.name, q.qtype); got != q.want {
				t.Errorf("%s: %s %s: %s, want %s", network, q.name, dns.TypeToString[q.qtype], got, q.want)
			}
		}
	}
	stop()
	w.start(file)
	w.until("it runs again on the same port", func() bool { return w.s.DNS() == at })
	if got, err := w.s.SetDNS(false); err != nil || got.IsValid() {
		t.Errorf("%v, %v", got, err)
	}
	if _, _, err := (&dns.Client{Net: "tcp"}).Exchange(new(dns.Msg), at.String()); err == nil {
		t.Error("it answers after it was stopped")
	}
}

// A server gets a name below localhost, also as the origin of its own pages.
func TestNamesBelowLocal(t *testing.T) {
	w := newWorld(t, "")
	port := freePort(t)
	w.add(1001, "shop")
	w.serve(1001, guestapi.Listener{Port: port}, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Location", "http://"+r.Host+"/next")
		w.Header().Set("Access-Control-Allow-Origin", r.Header.Get("Origin"))
		w.WriteHeader(http.StatusFound)
		fmt.Fprint(w, r.Host, " ", r.Header.Get("Origin"))
	}))
	w.served(1001, port)
	here := fmt.Sprintf("http://shop.sandbox.local:%d", port)
	if resp, _ := w.get(here + "/"); resp.StatusCode != http.StatusMisdirectedRequest {
		t.Errorf("without the responder: %d", resp.StatusCode)
	}
	if _, err := w.s.SetDNS(true); err != nil {
		t.Fatal(err)
	}
	resp, body := w.get(here+"/", "Origin", here)
	want := fmt.Sprintf("shop.sandbox.localhost:%d http://shop.sandbox.localhost:%[1]d", port)
	if body != want || resp.Header.Get("Location") != here+"/next" || resp.Header.Get("Access-Control-Allow-Origin") != here {
		t.Errorf("got %s, want %s; %v", body, want, resp.Header)
	}
}

// Browsers send no Sec-Fetch headers to names below sandbox.local. A request that can be
// that of a page of another sandbox gets to the name below localhost, or is refused.
func TestRequestsBelowLocal(t *testing.T) {
	w := newWorld(t, "")
	port := freePort(t)
	w.add(1001, "shop")
	w.serve(1001, guestapi.Listener{Port: port, Worktree: "fix"}, say("shop"))
	w.served(1001, port)
	if _, err := w.s.SetDNS(true); err != nil {
		t.Fatal(err)
	}
	const own, evil, browserName = "http://fix.shop.sandbox.local:1/", "http://evil.sandbox.local:3000/", "Mozilla/5.0"
	here := fmt.Sprintf("http://fix.shop.sandbox.local:%d//a?b=c%%2f", port)
	there := fmt.Sprintf("http://fix.shop.sandbox.localhost:%d//a?b=c%%2f", port)
	for _, tc := range []struct {
		method string
		header []string
		want   int
	}{
		{"GET", nil, 200}, // a program
		{"POST", nil, 200},
		{"GET", []string{"Cookie", "a=b"}, 307},
		{"HEAD", []string{"Cookie", "a=b"}, 307},
		{"GET", []string{"Authorization", "Basic YTpi"}, 307},
		{"GET", []string{"Cookie", "a=b", "Referer", evil}, 307},
		{"GET", []string{"Cookie", "a=b", "Origin", "null"}, 307},
		{"GET", []string{"User-Agent", browserName}, 307},
		{"GET", []string{"User-Agent", browserName, "Referer", evil}, 307},
		{"POST", []string{"Cookie", "a=b"}, 403},
		{"POST", []string{"Cookie", "a=b", "Origin", "null"}, 403},
		{"POST", []string{"Cookie", "a=b", "Origin", "null", "Referer", evil}, 403},
		{"GET", []string{"Cookie", "a=b", "Connection", "Upgrade", "Upgrade", "websocket"}, 403},
		{"GET", []string{"Referer", evil}, 403},
		{"GET", []string{"Cookie", "a=b", "Origin", strings.TrimSuffix(evil, "/")}, 403},
		{"GET", []string{"Cookie", "a=b", "User-Agent", browserName, "Referer", own}, 200},
		{"POST", []string{"Cookie", "a=b", "User-Agent", browserName, "Origin", strings.TrimSuffix(own, "/")}, 200},
		{"POST", []string{"Cookie", "a=b", "User-Agent", browserName, "Origin", "https://app.example"}, 200},
	} {
		resp, body := w.do(browser(t, false), tc.method, here, tc.header...)
		if resp.StatusCode != tc.want || tc.want == 307 && resp.Header.Get("Location") != there {
			t.Errorf("%s %q: %d %s %s, want %d", tc.method, tc.header, resp.StatusCode, resp.Header.Get("Location"), body, tc.want)
		}
	}
}

func TestDNSWithoutPorts(t *testing.T) {
	s := New(Config{Off: true, Logger: slog.New(slog.DiscardHandler)})
	if err := s.Run(t.Context()); err != nil {
		t.Error(err)
	}
	if _, err := s.SetDNS(true); agentlab.CodeOf(err) != agentlab.CodeConflict {
		t.Errorf("%v", err)
	}
}
