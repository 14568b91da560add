package prober

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strings"
	"time"

	"golang.org/x/net/dns/dnsmessage"

	"github.com/agentlab-vm/agentlab"
)

const resolvConf = "/etc/resolv.conf"

var questionTypes = map[string]dnsmessage.Type{
	"": dnsmessage.TypeA, "A": dnsmessage.TypeA, "AAAA": dnsmessage.TypeAAAA, "TXT": dnsmessage.TypeTXT,
	"CNAME": dnsmessage.TypeCNAME, "MX": dnsmessage.TypeMX, "SRV": dnsmessage.TypeSRV, "HTTPS": 65, "NULL": 10,
}

// answer is the answer of a DNS server.
type answer struct {
	addrs []string
	text  string // of a record without an address
}

// ask asks the question of a probe.
func (p *prober) ask(ctx context.Context, a *attempt) error {
	network, server := "udp", a.Server
	if a.Kind == "dnstcp" {
		network = "tcp"
	}
	if server == "" {
		server = p.dns
	}
	var last error
	for range max(a.Repeat, 1) {
		got, err := p.lookup(ctx, network, server, a.Target, a.Type)
		a.res.Addrs = append(a.res.Addrs, got.addrs...)
		if got.text != "" {
			a.res.Answer = agentlab.OneLine(got.text, maxAnswer)
		}
		last = err
	}
	a.res.Reached = len(a.res.Addrs) > 0 || a.res.Answer != ""
	if a.res.Reached {
		return nil
	}
	if last == nil {
		last = errors.New("no address")
	}
	return last
}

// lookup asks one question. If the server answers with a failure code, the
// error has its name.
func (p *prober) lookup(ctx context.Context, network, server, name, typ string) (answer, error) {
	if server == "" {
		var err error
		if server, err = configured(); err != nil {
			return answer{}, err
		}
	}
	question, err := pack(name, typ)
	if err != nil {
		return answer{}, err
	}
	var d net.Dialer
	conn, err := d.DialContext(ctx, network, server)
	if err != nil {
		return answer{}, err
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	if network == "tcp" {
		question = append(binary.BigEndian.AppendUint16(nil, uint16(len(question))), question...)
	}
	if _, err := conn.Write(question); err != nil {
		return answer{}, err
	}
	reply, err := receive(conn, network)
	if err != nil {
		return answer{}, err
	}
	return unpack(reply)
}

func receive(conn net.Conn, network string) ([]byte, error) {
	buf := make([]byte, 64<<10)
	if network == "udp" {
		n, err := conn.Read(buf)
		return buf[:n], err
	}
	if _, err := io.ReadFull(conn, buf[:2]); err != nil {
		return nil, err
	}
	reply := buf[:binary.BigEndian.Uint16(buf)]
	_, err := io.ReadFull(conn, reply)
	return reply, err
}

func pack(name, typ string) ([]byte, error) {
	t, ok := questionTypes[typ]
	if !ok {
		return nil, fmt.Errorf("question type %q is not known", typ)
	}
	n, err := dnsmessage.NewName(strings.TrimSuffix(name, ".") + ".")
	if err != nil {
		return nil, err
	}
	m := dnsmessage.Message{
		Header:    dnsmessage.Header{ID: uint16(time.Now().UnixNano()), RecursionDesired: true},
		Questions: []dnsmessage.Question{{Name: n, Type: t, Class: dnsmessage.ClassINET}},
	}
	return m.Pack()
}

func unpack(b []byte) (answer, error) {
	var out answer
	var m dnsmessage.Message
	if err := m.Unpack(b); err != nil {
		return out, errors.New("the answer is not a DNS message")
	}
	for _, r := range m.Answers {
		switch body := r.Body.(type) {
		case *dnsmessage.AResource:
			out.addrs = append(out.addrs, netip.AddrFrom4(body.A).String())
		case *dnsmessage.AAAAResource:
			out.addrs = append(out.addrs, netip.AddrFrom16(body.AAAA).String())
		case *dnsmessage.TXTResource:
			out.text = strings.Join(body.TXT, "")
		case *dnsmessage.CNAMEResource: // an alias alone has no address
		default:
			out.text = r.Header.Type.String()
		}
	}
	switch m.RCode {
	case dnsmessage.RCodeSuccess:
		return out, nil
	case dnsmessage.RCodeNameError:
		return out, errors.New("NXDOMAIN")
	case dnsmessage.RCodeRefused:
		return out, errors.New("REFUSED")
	case dnsmessage.RCodeServerFailure:
		return out, errors.New("SERVFAIL")
	}
	return out, errors.New(m.RCode.String())
}

// configured returns the first name server of the system.
func configured() (string, error) {
	f, err := os.Open(resolvConf)
	if err != nil {
		return "", err
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		fields := strings.Fields(lines.Text())
		if len(fields) > 1 && fields[0] == "nameserver" {
			return net.JoinHostPort(fields[1], "53"), nil
		}
	}
	return "", errors.New("no name server is configured")
}
