//go:build linux

package nft

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/egress/probe"
	"github.com/agentlab-vm/agentlab/internal/guest/prober"
	"github.com/agentlab-vm/agentlab/test/fakenet"
	"github.com/agentlab-vm/agentlab/test/guard"
)

// catchAll sends whatever arrives, on any port, to three sockets.
const catchAll = `table inet catchall {
	chain c {
		type nat hook prerouting priority dstnat
		udp dport 40000 accept comment "answers to frames, which no socket sent"
		iifname "eth0" udp dport 53 redirect to :5300
		iifname "eth0" meta l4proto udp redirect to :5301
		iifname "eth0" meta l4proto tcp redirect to :5302
	}
}
`

// role is a namespace of the world.
type role struct {
	kind string
	net  *fakenet.Net

	mu    sync.Mutex
	flows []probe.Trace
	held  map[string]net.Conn
}

// play serves orders until standard input ends.
func play(kind string) int {
	r := &role{kind: kind, net: fakenet.New(), held: map[string]net.Conn{}}
	in, out := json.NewDecoder(os.Stdin), json.NewEncoder(os.Stdout)
	for {
		var o order
		if err := in.Decode(&o); err != nil {
			return 0
		}
		answer, err := r.do(o)
		if err != nil {
			fmt.Fprintln(os.Stderr, kind, o.Do, err)
			return 1
		}
		if err := out.Encode(answer); err != nil {
			return 1
		}
	}
}

func (r *role) do(o order) (any, error) {
	switch o.Do {
	case "serve":
		return "ok", r.serve()
	case "probe":
		var out []guestapi.ProbeResult
		for res := range prober.Run(context.Background(), o.Probes, "10.77.0.1:53") {
			out = append(out, res)
		}
		return out, nil
	case "hold":
		return r.hold(o.Probes), nil
	case "drop":
		for id, conn := range r.held {
			_ = conn.(*net.TCPConn).SetLinger(0)
			_ = conn.Close()
			delete(r.held, id)
		}
		return "ok", nil
	case "time":
		return timeFlows(o.Probes[0].Target, o.Probes[0].Repeat)
	case "poke":
		return r.poke(o.Probes), nil
	case "report":
		r.mu.Lock()
		defer r.mu.Unlock()
		return probe.Outside{Flows: r.flows, Names: r.net.Outside().Names}, nil
	case "forget":
		r.mu.Lock()
		defer r.mu.Unlock()
		r.flows = nil
		r.net.ForgetOutside()
		return "ok", nil
	}
	return nil, fmt.Errorf("unknown order")
}

// hold opens connections and keeps them.
func (r *role) hold(list []guestapi.Probe) []guestapi.ProbeResult {
	out := make([]guestapi.ProbeResult, len(list))
	var wg sync.WaitGroup
	for i, p := range list {
		wg.Go(func() {
			conn, err := net.DialTimeout("tcp", p.Target, guard.Patience)
			out[i] = guestapi.ProbeResult{ID: p.ID, Connected: err == nil}
			if err == nil {
				r.mu.Lock()
				defer r.mu.Unlock()
				r.held[p.ID] = conn
			}
		})
	}
	wg.Wait()
	return out
}

// timeFlows opens UDP flows, one after the other, and waits for an answer on
// each.
func timeFlows(target string, n int) (time.Duration, error) {
	began := time.Now()
	buf := make([]byte, 100)
	for range n {
		conn, err := net.Dial("udp", target)
		if err != nil {
			return 0, err
		}
		_ = conn.SetDeadline(time.Now().Add(guard.Patience))
		if _, err := conn.Write([]byte("x")); err != nil {
			return 0, err
		}
		if _, err := conn.Read(buf); err != nil {
			return 0, err
		}
		_ = conn.Close()
	}
	return time.Since(began), nil
}

// poke says something on connections that are held, and waits for an answer.
func (r *role) poke(list []guestapi.Probe) []guestapi.ProbeResult {
	var out []guestapi.ProbeResult
	for _, p := range list {
		res := guestapi.ProbeResult{ID: p.ID}
		if conn := r.held[p.ID]; conn != nil {
			_ = conn.SetDeadline(time.Now().Add(time.Duration(p.TimeoutMS) * time.Millisecond))
			_, _ = io.WriteString(conn, "hello\r\n")
			n, err := conn.Read(make([]byte, 100))
			res.Reached = n > 0
			if err != nil {
				res.Error = err.Error()
			}
			_ = conn.Close()
			delete(r.held, p.ID)
		}
		out = append(out, res)
	}
	return out
}

// serve answers everything that arrives, and notes what does.
func (r *role) serve() error {
	if err := r.net.ProbeWorld(); err != nil {
		return err
	}
	if err := r.sniff(); err != nil {
		return err
	}
	cmd := exec.Command("/usr/sbin/nft", "-f", "-")
	in, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	_, _ = io.WriteString(in, catchAll)
	_ = in.Close()
	if err := cmd.Wait(); err != nil {
		return err
	}
	for _, port := range []uint16{5300, 5301} {
		pc, err := net.ListenPacket("udp", fmt.Sprintf(":%d", port))
		if err != nil {
			return err
		}
		go r.datagrams(pc, map[uint16]uint16{5300: 53, 5301: 4000}[port])
	}
	l, err := net.Listen("tcp", ":5302")
	if err != nil {
		return err
	}
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go r.stream(conn)
		}
	}()
	return nil
}

func (r *role) stream(conn net.Conn) {
	defer conn.Close()
	dst, err := originalDst(conn)
	if err != nil {
		return
	}
	far, err := r.net.DialContext(context.Background(), "tcp", netip.AddrPortFrom(dst.Addr().Unmap(), dst.Port()).String())
	if err != nil {
		return
	}
	go func() {
		_, _ = io.Copy(far, conn)
		if h, ok := far.(interface{ CloseWrite() error }); ok {
			_ = h.CloseWrite()
		}
	}()
	_, _ = io.Copy(conn, far)
	_ = far.Close()
}

func (r *role) datagrams(pc net.PacketConn, port uint16) {
	buf := make([]byte, 64<<10)
	for {
		n, from, err := pc.ReadFrom(buf)
		if err != nil {
			return
		}
		msg := append([]byte(nil), buf[:n]...)
		go func() {
			far, err := r.net.DialContext(context.Background(), "udp", fmt.Sprintf("192.31.196.200:%d", port))
			if err != nil {
				return
			}
			defer far.Close()
			answer := make([]byte, 64<<10)
			if _, err := far.Write(msg); err != nil {
				return
			}
			if n, err := far.Read(answer); err == nil {
				_, _ = pc.WriteTo(answer[:n], from)
			}
		}()
	}
}

// sniff notes every packet that comes in on eth0 and is not for its own
// housekeeping.
func (r *role) sniff() error {
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, int(htons(unix.ETH_P_ALL)))
	if err != nil {
		return err
	}
	go func() {
		buf := make([]byte, 64<<10)
		for {
			n, from, err := unix.Recvfrom(fd, buf, 0)
			if err != nil {
				return
			}
			ll, ok := from.(*unix.SockaddrLinklayer)
			if !ok || ll.Pkttype == unix.PACKET_OUTGOING {
				continue
			}
			if tr, ok := trace(buf[:n], htons(ll.Protocol)); ok {
				r.mu.Lock()
				r.flows = append(r.flows, tr)
				r.mu.Unlock()
			}
		}
	}()
	return nil
}

func htons(v uint16) uint16 { return v<<8 | v>>8 }

// trace reads where a packet was going.
func trace(b []byte, etherType uint16) (probe.Trace, bool) {
	var proto, hops byte
	var dst netip.Addr
	switch {
	case etherType == unix.ETH_P_IP && len(b) >= 20:
		proto, dst = b[9], netip.AddrFrom4([4]byte(b[16:20]))
		b = b[min(len(b), int(b[0]&15)*4):]
	case etherType == unix.ETH_P_IPV6 && len(b) >= 40:
		proto, dst, hops = b[6], netip.AddrFrom16([16]byte(b[24:40])), b[7]
		b = b[40:]
	default:
		return probe.Trace{}, false
	}
	tr := probe.Trace{Proto: fmt.Sprintf("ip-%d", proto), Addr: dst}
	if proto == unix.IPPROTO_ICMPV6 && len(b) > 0 && (b[0] == 135 || b[0] == 136) && hops != 255 {
		return tr, true // neighbour discovery that came from another network
	}
	switch proto {
	case unix.IPPROTO_TCP, unix.IPPROTO_UDP:
		if len(b) < 4 {
			return tr, true
		}
		if proto == unix.IPPROTO_TCP && len(b) > 13 && b[13]&4 != 0 {
			return tr, false // the host's own answer to a packet without a connection
		}
		tr.Proto, tr.Port = map[byte]string{6: probe.TCP, 17: probe.UDP}[proto], binary.BigEndian.Uint16(b[2:])
	case unix.IPPROTO_ICMP, unix.IPPROTO_ICMPV6:
		if len(b) == 0 || b[0] != 8 && b[0] != 128 {
			return tr, false // an answer, an error, or neighbour discovery
		}
		tr.Proto = probe.ICMP
	}
	return tr, true
}
