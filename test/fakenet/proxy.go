package fakenet

import (
	"bufio"
	"context"
	"encoding/binary"
	"io"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"sync"
)

// Proxy is a CONNECT and SOCKS5 proxy before a Net.
type Proxy struct {
	Net            *Net
	User, Password string // "" asks for no credentials

	mu    sync.Mutex
	asked []string
}

// Asked returns the targets that clients with the right credentials named.
func (p *Proxy) Asked() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.asked)
}

// Serve serves one connection of a client and closes it.
func (p *Proxy) Serve(conn net.Conn) {
	defer func() { _ = conn.Close() }()
	r := bufio.NewReader(conn)
	first, err := r.Peek(1)
	if err != nil {
		return
	}
	var far net.Conn
	if first[0] == 5 {
		far = p.socks(r, conn)
	} else {
		far = p.connect(r, conn)
	}
	if far == nil {
		return
	}
	defer func() { _ = far.Close() }()
	go func() {
		_, _ = io.Copy(far, r)
		if h, ok := far.(interface{ CloseWrite() error }); ok {
			_ = h.CloseWrite()
		}
	}()
	_, _ = io.Copy(conn, far)
}

func (p *Proxy) dial(target string) net.Conn {
	p.mu.Lock()
	p.asked = append(p.asked, target)
	p.mu.Unlock()
	far, err := p.Net.DialContext(context.Background(), "tcp", target)
	if err != nil {
		return nil
	}
	return far
}

func (p *Proxy) connect(r *bufio.Reader, w io.Writer) net.Conn {
	req, err := http.ReadRequest(r)
	if err != nil {
		return nil
	}
	asked := &http.Request{Header: http.Header{"Authorization": req.Header.Values("Proxy-Authorization")}}
	user, password, _ := asked.BasicAuth()
	answer, far := "502 Bad Gateway", net.Conn(nil)
	switch {
	case req.Method != http.MethodConnect:
		answer = "405 Method Not Allowed"
	case user != p.User || password != p.Password:
		answer = "407 Proxy Authentication Required"
	default:
		if far = p.dial(req.Host); far != nil {
			answer = "200 Connection established"
		}
	}
	_, _ = io.WriteString(w, "HTTP/1.1 "+answer+"\r\n\r\n")
	return far
}

// socks speaks RFC 1928 and RFC 1929.
func (p *Proxy) socks(r io.Reader, w io.Writer) net.Conn {
	head := make([]byte, 2)
	if _, err := io.ReadFull(r, head); err != nil {
		return nil
	}
	methods := make([]byte, head[1])
	if _, err := io.ReadFull(r, methods); err != nil {
		return nil
	}
	method := byte(0)
	if p.User != "" {
		method = 2
	}
	if !slices.Contains(methods, method) {
		_, _ = w.Write([]byte{5, 0xff})
		return nil
	}
	_, _ = w.Write([]byte{5, method})
	if method == 2 {
		user, password := socksText(r, 1), socksText(r, 0)
		if user != p.User || password != p.Password {
			_, _ = w.Write([]byte{1, 1})
			return nil
		}
		_, _ = w.Write([]byte{1, 0})
	}
	target := socksTarget(r)
	far, code := net.Conn(nil), byte(2) // not allowed
	if target != "" {
		if far = p.dial(target); far == nil {
			code = 5 // refused
		} else {
			code = 0
		}
	}
	_, _ = w.Write([]byte{5, code, 0, 1, 0, 0, 0, 0, 0, 0})
	return far
}

// socksText reads a text after its length, which comes after skip bytes.
func socksText(r io.Reader, skip int) string {
	head := make([]byte, skip+1)
	if _, err := io.ReadFull(r, head); err != nil {
		return ""
	}
	text := make([]byte, head[skip])
	_, _ = io.ReadFull(r, text)
	return string(text)
}

// socksTarget reads a request to connect.
func socksTarget(r io.Reader) string {
	head := make([]byte, 4)
	if _, err := io.ReadFull(r, head); err != nil || head[1] != 1 {
		return ""
	}
	host := ""
	switch head[3] {
	case 1, 4:
		b := make([]byte, 4+12*int(head[3]/4))
		_, _ = io.ReadFull(r, b)
		a, _ := netip.AddrFromSlice(b)
		host = a.String()
	case 3:
		host = socksText(r, 0)
	}
	port := make([]byte, 2)
	_, _ = io.ReadFull(r, port)
	return net.JoinHostPort(host, strconv.Itoa(int(binary.BigEndian.Uint16(port))))
}
