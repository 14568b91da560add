package gate_test

import (
	"context"
	"crypto/tls"
	"encoding/pem"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/egress"
	"github.com/agentlab-vm/agentlab/internal/egress/gate"
	"github.com/agentlab-vm/agentlab/test/fakenet"
)

// listen serves connections to a port of the loopback and returns its address.
func listen(t *testing.T, serve func(net.Conn)) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go serve(c)
		}
	}()
	return l.Addr().String()
}

func proxyDialer(t *testing.T, c gate.ProxyConfig) *gate.ProxyDialer {
	t.Helper()
	d, err := gate.NewProxyDialer(c)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func file(t *testing.T, mode os.FileMode, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(path, []byte(text), mode); err != nil {
		t.Fatal(err)
	}
	return path
}

func natGate(t *testing.T, d *gate.ProxyDialer, edit func(*agentlab.Network)) *gate.Gate {
	t.Helper()
	n := agentlab.Network{Mode: agentlab.NetworkNAT}
	if edit != nil {
		edit(&n)
	}
	p, err := egress.New(n)
	if err != nil {
		t.Fatal(err)
	}
	g, err := gate.New(gate.Config{Policy: p, Dialer: d, Resolver: d.Resolver(), Server: netip.MustParseAddrPort("10.77.0.1:53")})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(g.Close)
	return g
}

// dialFlow decides on a flow and opens it.
func dialFlow(t *testing.T, g *gate.Gate, proto egress.Proto, to netip.AddrPort) (net.Conn, error) {
	t.Helper()
	f, err := g.Begin(proto, to)
	if err != nil {
		return nil, err
	}
	t.Cleanup(f.End)
	return f.Dial()
}

func TestProxyCarriesAllowedFlowsByAddress(t *testing.T) {
	t.Parallel()
	internet := fakenet.New()
	t.Cleanup(internet.Close)
	internet.Echo("echo.test")
	echo := netip.AddrPortFrom(internet.Host("echo.test"), 7)
	ca, err := fakenet.NewCA()
	if err != nil {
		t.Fatal(err)
	}
	authority := file(t, 0o644, string(ca.PEM()))
	cert, err := ca.Issue("127.0.0.1")
	if err != nil {
		t.Fatal(err)
	}
	for _, scheme := range []string{"http", "https", "socks5"} {
		for _, credentials := range []string{"", "joe:se:cret"} {
			t.Run(scheme+" "+credentials, func(t *testing.T) {
				p := &fakenet.Proxy{Net: internet}
				c := gate.ProxyConfig{CAFile: authority}
				if credentials != "" {
					p.User, p.Password, _ = strings.Cut(credentials, ":")
					c.CredentialsFile = file(t, 0o600, credentials+"\n")
				}
				c.URL = scheme + "://" + listen(t, func(conn net.Conn) {
					if scheme == "https" {
						conn = tls.Server(conn, &tls.Config{Certificates: []tls.Certificate{cert}})
					}
					p.Serve(conn)
				})
				g := natGate(t, proxyDialer(t, c), func(n *agentlab.Network) { n.Deny = []agentlab.NetworkRule{{Rule: "192.31.196.200"}} })
				conn, err := dialFlow(t, g, egress.TCP, echo)
				if err != nil {
					t.Fatal(err)
				}
				defer func() { _ = conn.Close() }()
				_, _ = io.WriteString(conn, "hello")
				if err := conn.(interface{ CloseWrite() error }).CloseWrite(); err != nil {
					t.Error(err)
				}
				got := make([]byte, 5)
				if _, err := io.ReadFull(conn, got); err != nil || string(got) != "hello" {
					t.Errorf("%q, %v", got, err)
				}
				for _, denied := range []struct{ proto, to, rule string }{
					{"tcp", "10.0.0.1:443", egress.RulePrivate},
					{"tcp", "169.254.169.254:80", egress.RuleMetadata},
					{"tcp", strings.TrimPrefix(c.URL, scheme+"://"), egress.RuleLoopback},
					{"tcp", "192.31.196.200:443", "deny:192.31.196.200"},
					{"tcp", "[2606:4700::1]:443", egress.RuleProxy},
					{"tcp", "[64:ff9b::a00:1]:443", egress.RulePrivate},
					{"udp", "192.31.196.1:443", egress.RuleProxy},
					{"udp", "10.0.0.1:443", egress.RulePrivate},
					{"icmp", "192.31.196.1:0", egress.RuleProxy},
				} {
					_, err := dialFlow(t, g, egress.Proto(denied.proto), netip.MustParseAddrPort(denied.to))
					if e, ok := errors.AsType[*egress.DeniedError](err); !ok || e.Rule != denied.rule {
						t.Errorf("%v: %v", denied, err)
					}
				}
				if asked := p.Asked(); !slices.Equal(asked, []string{echo.String()}) {
					t.Errorf("the proxy was asked for %v", asked)
				}
			})
		}
	}
}

// The dialer has the last word: what it refuses never reaches the proxy.
func TestProxyDialerRefusesByItself(t *testing.T) {
	t.Parallel()
	p := &fakenet.Proxy{Net: fakenet.New()}
	t.Cleanup(p.Net.Close)
	d := proxyDialer(t, gate.ProxyConfig{URL: "http://" + listen(t, p.Serve)})
	for _, c := range []struct{ network, to, rule string }{
		{"tcp", "10.0.0.1:443", egress.RulePrivate}, {"tcp", "127.0.0.1:443", egress.RuleLoopback},
		{"tcp", "[::ffff:10.0.0.1]:443", egress.RulePrivate}, {"tcp", "[2606:4700::1]:443", egress.RuleProxy},
		{"udp", "8.8.8.8:443", egress.RuleProxy}, {"icmp", "8.8.8.8:0", egress.RuleProxy},
	} {
		_, err := d.DialContext(t.Context(), c.network, c.to)
		if e, ok := errors.AsType[*egress.DeniedError](err); !ok || e.Rule != c.rule {
			t.Errorf("%v: %v", c, err)
		}
	}
	for _, name := range []string{"echo.test:7", "localhost:80"} {
		if _, err := d.DialContext(t.Context(), "tcp", name); agentlab.CodeOf(err) != agentlab.CodeInvalid {
			t.Errorf("%s: %v", name, err)
		}
	}
	if asked := p.Asked(); len(asked) > 0 {
		t.Errorf("the proxy was asked for %v", asked)
	}
}

func TestProxyOpensPrivateDestinationsDirectly(t *testing.T) {
	t.Parallel()
	p := &fakenet.Proxy{Net: fakenet.New()}
	t.Cleanup(p.Net.Close)
	d := proxyDialer(t, gate.ProxyConfig{URL: "http://" + listen(t, p.Serve)})
	service := netip.MustParseAddrPort(listen(t, func(c net.Conn) { _, _ = io.WriteString(c, "model"); _ = c.Close() }))
	g := natGate(t, d, func(n *agentlab.Network) {
		n.Private = []agentlab.PrivateTarget{{Host: egress.HostName, Port: int(service.Port()), Reason: "a model"}}
	})
	conn, err := dialFlow(t, g, egress.TCP, netip.AddrPortFrom(netip.MustParseAddr("10.77.0.1"), service.Port()))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	if got, err := io.ReadAll(conn); string(got) != "model" || len(p.Asked()) > 0 {
		t.Errorf("%q, %v, the proxy was asked for %v", got, err, p.Asked())
	}
}

func TestProxyAnswersAreBounded(t *testing.T) {
	t.Parallel()
	drain := func(c net.Conn) { _, _ = io.Copy(io.Discard, c) }
	say := func(text string) func(net.Conn) {
		return func(c net.Conn) { go drain(c); _, _ = io.WriteString(c, text); <-t.Context().Done() }
	}
	endless := func(first string) func(net.Conn) {
		return func(c net.Conn) {
			defer func() { _ = c.Close() }()
			go drain(c)
			_, err := io.WriteString(c, first)
			for err == nil {
				_, err = io.WriteString(c, "X-Filler: aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\r\n")
			}
		}
	}
	for name, c := range map[string]struct {
		scheme string
		serve  func(net.Conn)
		want   string
	}{
		"refusal":        {"http", say("HTTP/1.1 403 \x1b[31mNo\r\n\r\n"), "upstream proxy refuses 192.31.196.9:443: 403 Forbidden"},
		"credentials":    {"http", say("HTTP/1.1 407 x\r\n\r\n"), "407 Proxy Authentication Required"},
		"not HTTP":       {"http", say("SSH-2.0-x\r\n\r\n"), "its answer is not HTTP"},
		"overlong":       {"http", endless("HTTP/1.1 200 OK\r\n"), "more than 16384 bytes"},
		"silent":         {"http", drain, "does not answer"},
		"half an answer": {"http", say("HTTP/1.1 200 OK\r\n"), "does not answer"},
		"closes":         {"http", func(c net.Conn) { _ = c.Close() }, "does not answer"},
		"TLS silent":     {"https", drain, "does not answer"},
		"SOCKS silent":   {"socks5", drain, "does not answer"},
		"SOCKS refusal":  {"socks5", say("\x05\xff"), "upstream proxy refuses 192.31.196.9:443"},
		"SOCKS nonsense": {"socks5", endless("HTTP"), "upstream proxy refuses"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := proxyDialer(t, gate.ProxyConfig{URL: c.scheme + "://" + listen(t, c.serve)})
			ctx := t.Context()
			if c.want == "does not answer" {
				var cancel context.CancelFunc
				ctx, cancel = context.WithTimeout(ctx, time.Second)
				defer cancel()
			}
			conn, err := d.DialContext(ctx, "tcp", "192.31.196.9:443")
			if err == nil {
				_ = conn.Close()
			}
			if agentlab.CodeOf(err) != agentlab.CodeUnavailable || agentlab.HintOf(err) == "" || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "\x1b") {
				t.Errorf("%v, want %q", err, c.want)
			}
		})
	}
}

// What the far server says first, in the packet of the proxy's answer, is
// part of the connection.
func TestProxyAnswerIsComplete(t *testing.T) {
	t.Parallel()
	d := proxyDialer(t, gate.ProxyConfig{URL: "http://" + listen(t, func(c net.Conn) {
		_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\n\r\nSSH-2.0-server\r\n")
		_ = c.(*net.TCPConn).CloseWrite()
	})})
	conn, err := d.DialContext(t.Context(), "tcp", "192.31.196.9:22")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	if got, err := io.ReadAll(conn); string(got) != "SSH-2.0-server\r\n" {
		t.Errorf("%q, %v", got, err)
	}
}

func TestProxyFiles(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		config gate.ProxyConfig
		field  string
	}{
		"open":    {gate.ProxyConfig{CredentialsFile: file(t, 0o644, "a:b")}, "upstream_proxy.credentials_file"},
		"no user": {gate.ProxyConfig{CredentialsFile: file(t, 0o600, "secret")}, "upstream_proxy.credentials_file"},
		"lines":   {gate.ProxyConfig{CredentialsFile: file(t, 0o600, "a:b\r\nX-Header: 1\n")}, "upstream_proxy.credentials_file"},
		"long":    {gate.ProxyConfig{CredentialsFile: file(t, 0o600, "a:"+strings.Repeat("b", 2000))}, "upstream_proxy.credentials_file"},
		"missing": {gate.ProxyConfig{CredentialsFile: "/nonexistent"}, "upstream_proxy.credentials_file"},
		"no PEM":  {gate.ProxyConfig{CAFile: file(t, 0o644, "x")}, "upstream_proxy.ca_file"},
	} {
		c.config.URL = "http://127.0.0.1:1"
		_, err := gate.NewProxyDialer(c.config)
		if e, ok := errors.AsType[*agentlab.Error](err); !ok || e.Code != agentlab.CodeInvalid || e.Field != c.field || strings.Contains(err.Error(), "secret") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// dohServer answers DNS over HTTPS out of a fakenet's zone.
func dohServer(t *testing.T, internet *fakenet.Net) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		question := new(dns.Msg)
		if err != nil || question.Unpack(body) != nil || question.Id != 0 || r.Header.Get("Content-Type") != "application/dns-message" {
			http.Error(w, "no question", http.StatusBadRequest)
			return
		}
		answer, err := gate.NewUpstream(internet).Exchange(r.Context(), question)
		if err != nil {
			t.Error(err)
			return
		}
		answer.Id = 0
		wire, _ := answer.Pack()
		w.Header().Set("Content-Type", "application/dns-message")
		_, _ = w.Write(wire)
	})
}

func TestProxyResolvesOverHTTPS(t *testing.T) {
	t.Parallel()
	internet := fakenet.New()
	t.Cleanup(internet.Close)
	ca, err := fakenet.NewCA()
	if err != nil {
		t.Fatal(err)
	}
	const doh = "192.31.196.253"
	internet.SetName(doh, netip.MustParseAddr(doh))
	if _, err := internet.HandleHTTPS(doh, 443, ca, dohServer(t, internet)); err != nil {
		t.Fatal(err)
	}
	www := internet.Host("www.test")
	internet.SetName("mixed.test", www, netip.MustParseAddr("10.0.0.7"), netip.MustParseAddr("127.0.0.1"))
	p := &fakenet.Proxy{Net: internet}
	d := proxyDialer(t, gate.ProxyConfig{URL: "socks5://" + listen(t, p.Serve), CAFile: file(t, 0o644, string(ca.PEM())), DNS: "https://" + doh + "/dns-query"})
	if err := d.Check(t.Context()); err != nil {
		t.Error(err)
	}
	g := natGate(t, d, nil)
	for name, want := range map[string]string{"www.test.": www.String(), "mixed.test.": www.String()} {
		question := new(dns.Msg).SetQuestion(name, dns.TypeA)
		wire, _ := question.Pack()
		answer := new(dns.Msg)
		if err := answer.Unpack(g.Answer(t.Context(), wire, true)); err != nil {
			t.Fatal(err)
		}
		if len(answer.Answer) != 1 || answer.Id != question.Id || !strings.HasSuffix(answer.Answer[0].String(), "\t"+want) {
			t.Errorf("%s: %v", name, answer)
		}
	}
	for _, asked := range p.Asked() {
		if asked != doh+":443" {
			t.Errorf("the proxy was asked for %v", p.Asked())
		}
	}
}

func TestOverHTTPSRefusesAnswers(t *testing.T) {
	t.Parallel()
	other := new(dns.Msg).SetQuestion("other.test.", dns.TypeA)
	other.Response = true
	wire, _ := other.Pack()
	for want, serve := range map[string]http.HandlerFunc{
		"status 418":           func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusTeapot) },
		"status 302":           func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, "/x", http.StatusFound) },
		"is not a DNS message": func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(wire) },
		"does not match the question": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/dns-message")
			_, _ = w.Write(wire)
		},
		"the answer is too long": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/dns-message")
			for _, err := w.Write(make([]byte, 4096)); err == nil; _, err = w.Write(make([]byte, 4096)) {
			}
		},
	} {
		t.Run(want, func(t *testing.T) {
			t.Parallel()
			s := httptest.NewTLSServer(serve)
			t.Cleanup(s.Close)
			// The proxy leads every connection to this server.
			proxy := listen(t, func(c net.Conn) {
				defer func() { _ = c.Close() }()
				_, _ = c.Read(make([]byte, 4096))
				far, err := net.Dial("tcp", s.Listener.Addr().String())
				if err != nil {
					return
				}
				defer func() { _ = far.Close() }()
				_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\n\r\n")
				go func() { _, _ = io.Copy(far, c); _ = far.Close() }()
				_, _ = io.Copy(c, far)
			})
			_, port, _ := net.SplitHostPort(s.Listener.Addr().String())
			d := proxyDialer(t, gate.ProxyConfig{URL: "http://" + proxy, CAFile: file(t, 0o644, string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw}))), DNS: "https://127.0.0.1:" + port + "/dns-query"})
			_, err := d.Resolver().Exchange(t.Context(), new(dns.Msg).SetQuestion("www.test.", dns.TypeA))
			if agentlab.CodeOf(err) != agentlab.CodeUnavailable || !strings.Contains(err.Error(), want) {
				t.Error(err)
			}
		})
	}
}
