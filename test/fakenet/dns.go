package fakenet

import (
	"encoding/binary"
	"io"
	"net"
	"net/netip"
	"strings"

	"github.com/miekg/dns"
)

func canonical(name string) string { return dns.CanonicalName(name) }

func (n *Net) serveDNSPackets(conn net.Conn) {
	buf := make([]byte, dns.MaxMsgSize)
	for {
		size, err := conn.Read(buf)
		if err != nil {
			return
		}
		if answer := n.answerDNS(buf[:size], true); answer != nil {
			if _, err := conn.Write(answer); err != nil {
				return
			}
		}
	}
}

func (n *Net) serveDNSStream(conn net.Conn) {
	for {
		var head [2]byte
		if _, err := io.ReadFull(conn, head[:]); err != nil {
			return
		}
		question := make([]byte, binary.BigEndian.Uint16(head[:]))
		if _, err := io.ReadFull(conn, question); err != nil {
			return
		}
		answer := n.answerDNS(question, false)
		framed := binary.BigEndian.AppendUint16(nil, uint16(len(answer)))
		if _, err := conn.Write(append(framed, answer...)); err != nil {
			return
		}
	}
}

// answersFor finds the addresses of a name, and notes that it was asked for.
func (n *Net) answersFor(q dns.Question) ([]netip.Addr, bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	name := canonical(q.Name)
	n.outside.Names = append(n.outside.Names, strings.TrimSuffix(name, "."))
	addrs, known := n.zone[name]
	if later, changes := n.later[name]; changes {
		key := name + " " + dns.TypeToString[q.Qtype]
		if n.asked[key] {
			addrs = later
		}
		n.asked[key] = true
	}
	return addrs, known
}

// answerDNS answers from the zone. A TXT question is answered with the name
// itself, so that there is something that is no address.
func (n *Net) answerDNS(wire []byte, udp bool) []byte {
	query := new(dns.Msg)
	if query.Unpack(wire) != nil || len(query.Question) != 1 {
		return nil
	}
	q := query.Question[0]
	addrs, known := n.answersFor(q)
	reply := new(dns.Msg).SetReply(query)
	head := dns.RR_Header{Name: q.Name, Rrtype: q.Qtype, Class: dns.ClassINET, Ttl: 60}
	switch {
	case !known:
		reply.Rcode = dns.RcodeNameError
	case q.Qtype == dns.TypeTXT:
		reply.Answer = append(reply.Answer, &dns.TXT{Hdr: head, Txt: []string{q.Name}})
	}
	for _, a := range addrs {
		if q.Qtype == dns.TypeA && a.Is4() {
			reply.Answer = append(reply.Answer, &dns.A{Hdr: head, A: a.AsSlice()})
		} else if q.Qtype == dns.TypeAAAA && a.Is6() {
			reply.Answer = append(reply.Answer, &dns.AAAA{Hdr: head, AAAA: a.AsSlice()})
		}
	}
	if udp {
		size := dns.MinMsgSize
		if opt := query.IsEdns0(); opt != nil {
			size = int(opt.UDPSize())
		}
		reply.Truncate(size)
	}
	out, err := reply.Pack()
	if err != nil {
		return nil
	}
	return out
}
