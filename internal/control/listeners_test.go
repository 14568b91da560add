//go:build linux

package control_test

import (
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/stream"
	"github.com/agentlab-vm/agentlab/test/guard"
)

const (
	tcpHead  = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
	tcpTail  = " 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 "
	tcp6Tail = " 00000000000000000000000000000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 "
)

// process writes the files of a process that has a socket.
func (g *guest) process(t *testing.T, pid int, comm, cwd string, inodes ...int) {
	t.Helper()
	dir := fmt.Sprintf("proc/%d", pid)
	g.put(t, dir+"/comm", comm+"\n")
	g.put(t, dir+"/fd/.keep", "")
	for i, inode := range inodes {
		if err := os.Symlink(fmt.Sprintf("socket:[%d]", inode), filepath.Join(g.root, dir, "fd", fmt.Sprint(3+i))); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink(cwd, filepath.Join(g.root, dir, "cwd")); err != nil {
		t.Fatal(err)
	}
}

func TestListeners(t *testing.T) {
	g := newGuest(t, nil)
	first := tcpHead +
		"   0: 0100007F:1435" + tcpTail + "11 1 0\n" + // 127.0.0.1:5173
		"   1: 00000000:0BB8" + tcpTail + "12 1 0\n" + // 0.0.0.0:3000
		"   2: 0200000A:0BB9" + tcpTail + "13 1 0\n" + // 10.0.0.2:3001
		"   3: 00000000:0016" + tcpTail + "14 1 0\n" + // sshd
		"   4: 3500007F:0035" + tcpTail + "15 1 0\n" + // resolver
		"   5: 00000000:1F40" + tcpTail + "16 1 0\n" + // of this process
		"   9: 0100007F:8031" + tcpTail + "19 1 0\n" // of containerd
	established := "   6: 00000000:0FA0 0100007F:0001 01 00000000:00000000 00:00000000 00000000  1000        0 17 1 0\n"
	g.put(t, "proc/net/tcp", first+established)
	g.put(t, "proc/net/tcp6", tcpHead+
		"   0: 00000000000000000000000001000000:1436"+tcp6Tail+"21 1 0\n"+ // [::1]:5174
		"   1: 00000000000000000000000000000000:0BB8"+tcp6Tail+"22 1 0\n"+ // [::]:3000
		"   2: malformed\n")
	g.put(t, "work/repo/.worktrees/feature/login/.git", "gitdir: x")
	g.process(t, 30, "node", "/work/repo", 12, 22)
	g.process(t, 31, "node child", "/", 12)
	g.process(t, 40, "vite\x1b[2J", "/work/repo/.worktrees/feature/login/web/src", 11)
	g.process(t, 41, "vite", "/workspace/.worktrees/plain/src", 21)
	g.process(t, 42, "api", "/work/repo/.worktrees/-odd name", 13)
	g.process(t, os.Getpid(), "guestd", "/", 16)
	g.process(t, 43, "containerd", "/", 19)
	want := []guestapi.Listener{
		{Port: 3000, Program: "node"},
		{Port: 3001, Program: "api"},
		{Port: 5173, Local: true, Program: "vite [2J", Worktree: "feature/login"},
		{Port: 5174, Local: true, Program: "vite", Worktree: "plain"},
	}
	l, err := g.Listeners(guard.Context(t), "", time.Minute)
	if err != nil || !reflect.DeepEqual(l.Listeners, want) {
		t.Fatalf("%v, got\n%+v, want\n%+v", err, l.Listeners, want)
	}
	changed := make(chan guestapi.Listeners, 1)
	go func() {
		next, _ := g.Listeners(guard.Context(t), l.State, time.Minute)
		changed <- next
	}()
	g.put(t, "proc/net/tcp", first+"   6: 00000000:0BBA"+tcpTail+"18 1 0\n"+established)
	if got := <-changed; len(got.Listeners) != 5 || got.Listeners[2].Port != 3002 || got.State == l.State {
		t.Errorf("after a change: %+v", got)
	}
	if _, err := g.Listeners(guard.Context(t), "", 0); err != nil {
		t.Error(err)
	}
}

// At most so many ports are reported as the controller accepts.
func TestManyListeners(t *testing.T) {
	g := newGuest(t, nil)
	var b strings.Builder
	b.WriteString(tcpHead)
	for port := 40000; port > 38000; port-- {
		fmt.Fprintf(&b, "   0: 00000000:%04X%s%d 1 0\n", port, tcpTail, port)
	}
	g.put(t, "proc/net/tcp", b.String())
	l, err := g.Listeners(guard.Context(t), "", 0)
	if err != nil || len(l.Listeners) != guestapi.MaxListeners {
		t.Errorf("%d ports, %v", len(l.Listeners), err)
	}
}

func TestDialPort(t *testing.T) {
	g := newGuest(t, nil)
	for _, addr := range []string{"127.0.0.1:0", "[::1]:0"} {
		l, err := net.Listen("tcp", addr)
		if err != nil {
			t.Logf("no address %s: %v", addr, err)
			continue
		}
		go func() {
			if c, err := l.Accept(); err == nil {
				b, _ := io.ReadAll(c) // until the half close
				_, _ = c.Write(append([]byte("got "), b...))
				_ = c.Close()
			}
		}()
		port := uint16(l.Addr().(*net.TCPAddr).Port)
		conn, err := g.DialPort(guard.Context(t), port)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.WriteString(conn, "hello")
		_ = stream.CloseWrite(conn)
		if b, err := io.ReadAll(conn); err != nil || string(b) != "got hello" {
			t.Errorf("%s: %q, %v", addr, b, err)
		}
		_ = conn.Close()
		_ = l.Close()
		_, err = g.DialPort(guard.Context(t), port)
		checkError(t, err, agentlab.CodeUnavailable)
	}
	_, err := g.DialPort(guard.Context(t), 0)
	checkError(t, err, agentlab.CodeInvalid)
}

// The controller accepts no list that agent-runner never sends.
func TestHostileListeners(t *testing.T) {
	many := strings.Repeat(`{"port":1},`, 100)
	for name, list := range map[string]string{
		"port 0":           `{"port":0}`,
		"large port":       `{"port":70000}`,
		"twice":            `{"port":3000},{"port":3000}`,
		"not in order":     `{"port":3001},{"port":3000}`,
		"escape codes":     `{"port":3000,"program":"\u001b]0;x\u0007"}`,
		"long program":     `{"port":3000,"program":"` + strings.Repeat("x", 65) + `"}`,
		"parent directory": `{"port":3000,"worktree":"../../x"}`,
		"new line":         `{"port":3000,"worktree":"a\nb"}`,
		"too many":         many[:len(many)-1],
	} {
		c := hostile(t, func(conn net.Conn) {
			_, _ = io.WriteString(conn, body("200 OK", `{"state":"x","listeners":[`+list+`]}`))
		})
		if _, err := c.Listeners(guard.Context(t), "", 0); err == nil {
			t.Errorf("%s was accepted", name)
		} else {
			checkError(t, err, agentlab.CodeUnavailable)
		}
	}
	c := hostile(t, func(conn net.Conn) {
		_, _ = io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: agentlab-stream\r\n\r\n")
	})
	if _, err := c.DialPort(guard.Context(t), 80); err == nil {
		t.Error("another protocol was accepted")
	}
}
