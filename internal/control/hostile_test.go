//go:build linux

package control_test

import (
	"context"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
	"time"
	"unicode"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/control"
	"github.com/agentlab-vm/agentlab/internal/stream"
	"github.com/agentlab-vm/agentlab/test/guard"
)

func body(status, text string) string {
	return fmt.Sprintf("HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s", status, len(text), text)
}

func TestHostileAnswers(t *testing.T) {
	for name, tc := range map[string]struct {
		say  string
		code agentlab.Code
	}{
		"nothing":        {"", agentlab.CodeUnavailable},
		"no http":        {"SSH-2.0-x\r\n\r\n", agentlab.CodeUnavailable},
		"cut":            {"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{}", agentlab.CodeUnavailable},
		"no json":        {body("200 OK", "hello"), agentlab.CodeUnavailable},
		"wrong json":     {body("200 OK", `{"version":5}`), agentlab.CodeUnavailable},
		"long":           {body("200 OK", `{"version":"`+strings.Repeat("x", 300<<10)+`"}`), agentlab.CodeUnavailable},
		"escape codes":   {body("200 OK", `{"version":"\u001b[2J"}`), agentlab.CodeUnavailable},
		"redirect":       {"HTTP/1.1 302 Found\r\nLocation: http://10.0.0.1/\r\nContent-Length: 0\r\n\r\n", agentlab.CodeUnavailable},
		"long head":      {"HTTP/1.1 200 OK\r\n" + strings.Repeat("A: b\r\n", 10000), agentlab.CodeUnavailable},
		"unasked switch": {"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n", agentlab.CodeUnavailable},
		"continue":       {"HTTP/1.1 100 Continue\r\n\r\n", agentlab.CodeUnavailable},
		"error":          {body("404 Not Found", `{"code":"not_found","message":"no"}`), agentlab.CodeNotFound},
		"strange code":   {body("500 No", `{"code":"schema","message":"no"}`), agentlab.CodeInternal},
		"empty error":    {body("500 No", `{}`), agentlab.CodeUnavailable},
		"error text": {
			body("400 No", `{"code":"invalid","message":"\u001b]0;x\u0007\n`+strings.Repeat("é", 1000)+`"}`),
			agentlab.CodeInvalid,
		},
	} {
		t.Run(name, func(t *testing.T) {
			c := hostile(t, func(conn net.Conn) { _, _ = io.WriteString(conn, tc.say) })
			_, err := c.Health(guard.Context(t))
			checkError(t, err, tc.code)
			_, err = c.SSHKey(guard.Context(t), guestapi.SSHKeyRequest{})
			checkError(t, err, "")
			if _, err = c.Exec(guard.Context(t), guestapi.ExecRequest{}); err == nil {
				t.Error("exec took it")
			}
			checkError(t, err, "")
		})
	}
}

// checkError checks the code, unless it is "", and that the text is one short
// printable line.
func checkError(t *testing.T, err error, code agentlab.Code) {
	t.Helper()
	if err == nil {
		t.Fatal("no error")
	}
	if got := agentlab.CodeOf(err); code != "" && got != code {
		t.Errorf("code %q, want %q: %v", got, code, err)
	}
	text := err.Error()
	if len(text) > 500 || strings.ContainsFunc(text, func(r rune) bool { return !unicode.IsPrint(r) }) {
		t.Errorf("unfit for a terminal: %q", text)
	}
}

func TestSlowGuest(t *testing.T) {
	stop := make(chan struct{})
	c := hostile(t, func(conn net.Conn) {
		_, _ = io.WriteString(conn, "HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{")
		<-stop
	})
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	_, err := c.Health(ctx)
	close(stop)
	checkError(t, err, agentlab.CodeTimeout)
	mute := hostile(t, func(conn net.Conn) { _, _ = conn.Read(make([]byte, 1)) })
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = mute.Exec(gone, guestapi.ExecRequest{})
	checkError(t, err, agentlab.CodeUnavailable)
}

// TestBytesAfterUpgrade checks that what comes in one piece with the answer's
// head is not lost.
func TestBytesAfterUpgrade(t *testing.T) {
	c := hostile(t, func(conn net.Conn) {
		_, _ = io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: agentlab-stream\r\n\r\nearly")
		_, _ = io.WriteString(conn, strings.Repeat("-", 100_000)+"late")
	})
	conn, err := c.Attach(guard.Context(t), guestapi.AttachRequest{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	b, err := io.ReadAll(conn)
	if err != nil || len(b) != 100_009 || !strings.HasPrefix(string(b), "early-") || !strings.HasSuffix(string(b), "-late") {
		t.Errorf("%d bytes, %v", len(b), err)
	}
}

func TestRehearse(t *testing.T) {
	g := newGuest(t, nil)
	if err := g.Rehearse(guard.Context(t)); err != nil {
		t.Error(err)
	}
	const upgraded = "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: agentlab-stream\r\n\r\n"
	for name, after := range map[string]func(net.Conn){
		"ends":   func(net.Conn) {},
		"silent": func(conn net.Conn) { _, _ = io.Copy(io.Discard, conn) }, // until the client closes it
		"floods": func(conn net.Conn) {
			w := stream.NewWriter(conn)
			for w.Frame(stream.Stdout, make([]byte, 1<<10)) == nil {
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			c := hostile(t, func(conn net.Conn) {
				_, _ = io.WriteString(conn, upgraded)
				after(conn)
			})
			ctx := guard.Context(t)
			if name == "silent" {
				var cancel context.CancelFunc
				ctx, cancel = context.WithTimeout(ctx, 20*time.Millisecond)
				defer cancel()
			}
			checkError(t, c.Rehearse(ctx), agentlab.CodeUnavailable)
		})
	}
}

func FuzzAnswer(f *testing.F) {
	f.Add([]byte(body("200 OK", `{"version":"1","uptime_ns":5}`)))
	f.Add([]byte(body("200 OK", `{"user":"agent","port":22,"host_keys":["ssh-ed25519 AAAA"]}`)))
	f.Add([]byte("HTTP/1.1 101 Switching Protocols\r\nUpgrade: agentlab-stream\r\n\r\nx"))
	f.Add([]byte("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"))
	f.Fuzz(func(t *testing.T, say []byte) {
		dial := func(context.Context) (net.Conn, error) {
			a, b := net.Pipe()
			go func() {
				go func() { _, _ = io.Copy(io.Discard, b) }()
				_, _ = b.Write(say)
				_ = b.Close()
			}()
			return a, nil
		}
		c := control.New(dial)
		if _, err := c.Health(t.Context()); err != nil {
			checkError(t, err, "")
		}
		if _, err := c.SSHKey(t.Context(), guestapi.SSHKeyRequest{}); err != nil {
			checkError(t, err, "")
		}
		if conn, err := c.Exec(t.Context(), guestapi.ExecRequest{}); err == nil {
			_, _ = io.Copy(io.Discard, conn)
			_ = conn.Close()
		}
	})
}
