package sandboxcmd

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"testing"

	"github.com/creack/pty"
	"golang.org/x/term"

	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/cli"
	"github.com/agentlab-vm/agentlab/internal/stream"
)

// An attached terminal shows a line when the lease ends soon. It shows nothing for
// other events of the lease.
func TestTerminalShowsTheEndOfTheLease(t *testing.T) {
	shown := make(chan struct{})
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/sandboxes/play/exec", func(w http.ResponseWriter, _ *http.Request) {
		conn, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer func() { _ = conn.Close() }()
		_, _ = fmt.Fprintf(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: %s\r\n\r\n", guestapi.StreamProtocol)
		<-shown
		_ = stream.NewWriter(conn).JSON(stream.Exit, stream.ExitStatus{})
	})
	mux.HandleFunc("GET /v1/events", func(w http.ResponseWriter, r *http.Request) {
		if q := r.URL.Query(); q.Get("sandbox") != "play" || q.Get("kind") != "sandbox.lease" {
			t.Errorf("events of %s", r.URL)
		}
		w.Header().Set("Content-Type", "text/event-stream")
		for id, data := range []string{`{"lease_expires_at":"2030-01-01T00:00:00Z"}`, `{"minutes_left":"\u001b[2J"}`, `{"minutes_left":5}`} {
			_, _ = fmt.Fprintf(w, "id: %d\nevent: event\ndata: {\"id\":%d,\"kind\":\"sandbox.lease\",\"sandbox_vmid\":1001,\"msg\":\"m\",\"data\":%s}\n\n", id+1, id+1, data)
		}
		_ = http.NewResponseController(w).Flush()
		<-r.Context().Done()
	})
	socket := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	srv := &http.Server{Handler: mux}
	go func() { _ = srv.Serve(l) }()
	defer func() { _ = srv.Close() }()

	ptmx, tty, err := pty.Open()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = ptmx.Close() }()
	if _, err := term.MakeRaw(int(tty.Fd())); err != nil { // the notice may come before exec does this
		t.Fatal(err)
	}
	text := make(chan string, 1)
	go func() {
		var all strings.Builder
		r := bufio.NewReader(io.TeeReader(ptmx, &all))
		for {
			line, err := r.ReadString('\n')
			if strings.Contains(line, "ends in 5 minutes") {
				close(shown)
			}
			if err != nil {
				text <- all.String()
				return
			}
		}
	}()
	app := &cli.App{Stdin: tty, Stdout: tty, Stderr: tty}
	if err := execute(t.Context(), app, client.New(socket), "play", guestapi.ExecRequest{Command: []string{"sh"}, TTY: true}, false); err != nil {
		t.Error(err)
	}
	_ = tty.Close()
	if got := <-text; strings.Count(got, "agentlab:") != 1 || !strings.Contains(got, "\r\n[agentlab: the lease of this sandbox ends in 5 minutes; ") ||
		!strings.Contains(got, "agentlab sandbox lease renew 1001 --ttl 4h]\r\n") || strings.Contains(got, "[2J") {
		t.Errorf("%q", got)
	}
}
