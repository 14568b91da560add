//go:build linux

package guestd

import (
	"bufio"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/stream"
)

const (
	// listenersPause is the time between two looks at the sockets, while a client waits
	// for a change. The kernel does not report changes.
	listenersPause = time.Second
	// maxSockets bounds the listening sockets that are read.
	maxSockets = 1024
	// localDialTimeout bounds a connection to a port of this guest.
	localDialTimeout = 5 * time.Second
)

// Ports of programs that belong to the system of every guest.
const (
	portSSH = 22
	portDNS = 53
)

// socket is a listening TCP socket.
type socket struct {
	addr  netip.AddrPort
	inode string
}

func (s *Server) handleListeners(w http.ResponseWriter, r *http.Request) {
	var req guestapi.ListenersRequest
	if !decode(w, r, &req) {
		return
	}
	if req.Seconds < 0 || req.Seconds > guestapi.MaxListenersSeconds {
		fail(w, agentlab.Errorf(agentlab.CodeInvalid, "%d is not between 0 and %d", req.Seconds, guestapi.MaxListenersSeconds).WithField("seconds"))
		return
	}
	end := time.After(time.Duration(req.Seconds) * time.Second)
	again := time.NewTicker(listenersPause)
	defer again.Stop()
	for ended := req.Seconds == 0; ; {
		sockets, err := s.sockets()
		if err != nil {
			fail(w, agentlab.Errorf(agentlab.CodeInternal, "the sockets: %w", err))
			return
		}
		if state := stateOf(sockets); ended || state != req.State {
			reply(w, guestapi.Listeners{State: state, Listeners: s.listeners(sockets)})
			return
		}
		select {
		case <-again.C:
		case <-end:
			ended = true
		case <-r.Context().Done():
			return
		case <-s.ctx.Done():
			return
		}
	}
}

// sockets returns the listening TCP sockets in the order of their ports.
func (s *Server) sockets() (out []socket, err error) {
	for _, name := range []string{"/proc/net/tcp", "/proc/net/tcp6"} {
		f, err := os.Open(s.path(name))
		if err != nil {
			if os.IsNotExist(err) { // a kernel without IPv6
				continue
			}
			return nil, err
		}
		out = append(out, readSockets(f)...)
		_ = f.Close()
	}
	slices.SortFunc(out, func(a, b socket) int {
		return cmp.Or(cmp.Compare(a.addr.Port(), b.addr.Port()), a.addr.Compare(b.addr))
	})
	return out[:min(len(out), maxSockets)], nil
}

// readSockets reads the format of /proc/net/tcp (proc_net_tcp.rst), which begins with
// the sockets that listen.
func readSockets(r io.Reader) (out []socket) {
	lines := bufio.NewScanner(r)
	lines.Scan() // the names of the columns
	for lines.Scan() && len(out) < maxSockets {
		f := strings.Fields(lines.Text())
		if len(f) < 10 || f[3] != "0A" {
			return out
		}
		if addr, ok := socketAddr(f[1]); ok {
			out = append(out, socket{addr, f[9]})
		}
	}
	return out
}

// socketAddr decodes an address of /proc/net/tcp: 32-bit words in the byte order of the
// machine, and the port as a number.
func socketAddr(text string) (netip.AddrPort, bool) {
	host, port, _ := strings.Cut(text, ":")
	b, err := hex.DecodeString(host)
	n, perr := strconv.ParseUint(port, 16, 16)
	if err != nil || perr != nil || len(b)%4 != 0 {
		return netip.AddrPort{}, false
	}
	for i := 0; i < len(b); i += 4 {
		binary.NativeEndian.PutUint32(b[i:], binary.BigEndian.Uint32(b[i:]))
	}
	addr, ok := netip.AddrFromSlice(b)
	return netip.AddrPortFrom(addr.Unmap(), uint16(n)), ok
}

func stateOf(sockets []socket) string {
	h := sha256.New()
	for _, k := range sockets {
		fmt.Fprintln(h, k.addr, k.inode)
	}
	return hex.EncodeToString(h.Sum(nil)[:16])
}

// containerd listens on a port for Kubernetes only.
const containerd = "containerd"

// listeners returns the ports of the sockets with their processes.
func (s *Server) listeners(sockets []socket) []guestapi.Listener {
	owners := s.owners(sockets)
	out := []guestapi.Listener{}
	for _, k := range sockets {
		o := owners[k.inode]
		if p := k.addr.Port(); p == portSSH || p == portDNS || o.pid == os.Getpid() || o.program == containerd {
			continue
		}
		l := guestapi.Listener{Port: k.addr.Port(), Local: !onNetwork(k.addr.Addr()), Program: o.program, Worktree: o.worktree}
		if last := len(out) - 1; last >= 0 && out[last].Port == l.Port { // a server with several addresses
			out[last].Local = out[last].Local && l.Local
			continue
		}
		if len(out) == guestapi.MaxListeners {
			break
		}
		out = append(out, l)
	}
	return out
}

// onNetwork reports whether a socket with this address accepts connections to the IPv4
// address of the guest.
func onNetwork(a netip.Addr) bool {
	return a.IsUnspecified() || a.Is4() && !a.IsLoopback()
}

// owner is the process of a socket.
type owner struct {
	pid               int
	program, worktree string
}

// owners returns the processes of sockets by their inodes. If several processes have a
// socket, it is the one with the lowest number.
func (s *Server) owners(sockets []socket) map[string]owner {
	wanted := map[string]string{}
	for _, k := range sockets {
		wanted["socket:["+k.inode+"]"] = k.inode
	}
	out := map[string]owner{}
	procs, _ := os.ReadDir(s.path("/proc"))
	for _, p := range procs {
		pid, err := strconv.Atoi(p.Name())
		if err != nil {
			continue
		}
		dir := s.path(filepath.Join("/proc", p.Name()))
		fds, _ := os.ReadDir(filepath.Join(dir, "fd"))
		for _, fd := range fds {
			to, _ := os.Readlink(filepath.Join(dir, "fd", fd.Name()))
			inode, ok := wanted[to]
			if had, found := out[inode]; !ok || found && had.pid < pid {
				continue
			}
			cwd, _ := os.Readlink(filepath.Join(dir, "cwd"))
			out[inode] = owner{pid: pid, program: agentlab.OneLine(s.line(filepath.Join("/proc", p.Name(), "comm")), 64), worktree: s.worktreeOf(cwd)}
		}
	}
	return out
}

// worktreeOf returns the worktree that contains a directory, relative to
// guestapi.WorktreesDir: the nearest directory with a .git, or the first below
// WorktreesDir if there is none. It is "" for any other directory.
func (s *Server) worktreeOf(dir string) string {
	var rel string
	for _, trees := range []string{guestapi.RepoDir + "/" + guestapi.WorktreesDir, guestapi.ProjectDir + "/" + guestapi.WorktreesDir} {
		if below, ok := strings.CutPrefix(dir, trees+"/"); ok {
			rel = filepath.Clean(below)
		}
	}
	name, _, _ := strings.Cut(rel, "/")
	for at := rel; at != "" && at != "."; at = filepath.Dir(at) {
		if _, err := os.Lstat(s.path(filepath.Join(guestapi.RepoDir, guestapi.WorktreesDir, at, ".git"))); err == nil {
			name = at
			break
		}
	}
	if agentlab.ValidateRef(name) != nil { // no worktree of a branch
		return ""
	}
	return name
}

func (s *Server) handleDial(w http.ResponseWriter, r *http.Request) {
	var req guestapi.DialRequest
	if !decode(w, r, &req) {
		return
	}
	far, err := dialLocal(r.Context(), req.Port)
	if err != nil {
		fail(w, err)
		return
	}
	conn, in, ok := upgrade(w, r, guestapi.TCPProtocol)
	if !ok {
		_ = far.Close()
		return
	}
	s.wg.Add(1)
	defer s.wg.Done()
	defer context.AfterFunc(s.ctx, func() {
		_ = conn.Close()
		_ = far.Close()
	})()
	stream.Splice(stream.Unread(conn, in), far)
}

// dialLocal connects to a port of this machine.
func dialLocal(ctx context.Context, port uint16) (net.Conn, error) {
	if port == 0 {
		return nil, agentlab.Errorf(agentlab.CodeInvalid, "0 is not a port").WithField("port")
	}
	d := net.Dialer{Timeout: localDialTimeout}
	text := strconv.Itoa(int(port))
	for _, host := range []string{"127.0.0.1", "::1"} {
		if conn, err := d.DialContext(ctx, "tcp", net.JoinHostPort(host, text)); err == nil {
			return conn, nil
		}
	}
	return nil, agentlab.Errorf(agentlab.CodeUnavailable, "nothing listens on port %d of the guest", port)
}
