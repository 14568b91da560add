package fake

import (
	"bufio"
	"fmt"
	"maps"
	"net"
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
)

// ports are the ports on which programs of a guest listen.
type ports struct {
	open    map[uint16]string // worktree by port
	changed chan struct{}     // closed at the next change; nil if nothing waits
}

// listen adds a web server to the guest: PORT [WORKTREE].
func (g *guest) listen(args []string) int {
	if len(args) == 0 {
		return 2
	}
	port, err := strconv.ParseUint(args[0], 10, 16)
	if err != nil {
		return 2
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.ports.open == nil {
		g.ports.open = map[uint16]string{}
	}
	g.ports.open[uint16(port)] = ""
	if len(args) > 1 {
		g.ports.open[uint16(port)] = args[1]
	}
	if g.ports.changed != nil {
		close(g.ports.changed)
		g.ports.changed = nil
	}
	return 0
}

func (g *guest) listeners(w http.ResponseWriter, r *http.Request) {
	req, ok := request[guestapi.ListenersRequest](w, r)
	if !ok {
		return
	}
	end := time.After(time.Duration(req.Seconds) * time.Second)
	for ended := false; ; {
		g.mu.Lock()
		l := guestapi.Listeners{State: fmt.Sprint(len(g.ports.open)), Listeners: []guestapi.Listener{}}
		for _, port := range slices.Sorted(maps.Keys(g.ports.open)) {
			l.Listeners = append(l.Listeners, guestapi.Listener{Port: port, Program: "fake", Worktree: g.ports.open[port]})
		}
		if g.ports.changed == nil {
			g.ports.changed = make(chan struct{})
		}
		changed := g.ports.changed
		g.mu.Unlock()
		if ended || req.Seconds == 0 || l.State != req.State {
			reply(w, l)
			return
		}
		select {
		case <-changed:
		case <-end:
			ended = true
		case <-r.Context().Done():
			return
		case <-g.ctx.Done():
			return
		}
	}
}

// listens reports whether a program of the guest listens on a port.
func (g *guest) listens(port uint16) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	_, ok := g.ports.open[port]
	return ok
}

// serveWeb answers each request with the name of the guest and the port.
func (g *guest) serveWeb(conn net.Conn, port uint16) {
	in := bufio.NewReader(conn)
	for {
		if _, err := http.ReadRequest(in); err != nil {
			return
		}
		mem, _ := g.in.memory(g)
		text := fmt.Sprintf("port %d of %s\n", port, mem.Hostname)
		if _, err := fmt.Fprintf(conn, "HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s", len(text), text); err != nil {
			return
		}
	}
}

// dialLocal refuses: no program of a fake guest listens on its loopback only.
func (g *guest) dialLocal(w http.ResponseWriter, r *http.Request) {
	if req, ok := request[guestapi.DialRequest](w, r); ok {
		refuse(w, http.StatusServiceUnavailable, agentlab.CodeUnavailable, fmt.Sprintf("nothing listens on port %d of the guest", req.Port))
	}
}
