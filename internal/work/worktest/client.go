package worktest

import (
	"encoding/json"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/stream"
	"github.com/agentlab-vm/agentlab/internal/version"
)

// SilentGuest never answers a command of the repository, and lets run what else is
// asked with other.
func SilentGuest(t *testing.T, upgrades bool, other func(conn io.Writer)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		var req guestapi.ExecRequest
		if err := json.NewDecoder(r.Body).Decode(&req); err != nil {
			t.Error(err)
		}
		command := strings.Join(req.Command, " ")
		if command != "true" && !upgrades || command == "true" && other == nil {
			<-r.Context().Done()
			return
		}
		conn, rw, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer func() { _ = conn.Close() }()
		_, _ = io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: "+guestapi.StreamProtocol+"\r\n\r\n")
		if command == "true" {
			other(conn)
			return
		}
		_, _ = io.Copy(io.Discard, rw) // until the host gives up
	}
}

// CommandClient returns a client whose sandboxes all run commands with guest.
func CommandClient(t *testing.T, guest func(command []string, in []byte) (out []byte, errOut string, code int)) *client.Client {
	t.Helper()
	return HandlerClient(t, CommandHandler(t, guest))
}

// HandlerClient returns a client of an HTTP handler.
func HandlerClient(t *testing.T, h http.Handler) *client.Client {
	t.Helper()
	return client.New(ServeAPI(t, h))
}

// ServeAPI serves an API on a socket, whose path it returns.
func ServeAPI(t *testing.T, h http.Handler) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "al") // the path of a socket is short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	socket := filepath.Join(dir, "s")
	l, err := net.Listen("unix", socket) //nolint:noctx // a test
	if err != nil {
		t.Fatal(err)
	}
	srv := &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set(api.VersionHeader, version.Get().Version)
		h.ServeHTTP(w, r)
	})}
	go func() { _ = srv.Serve(l) }()
	t.Cleanup(func() { _ = srv.Close() })
	return socket
}

// CommandHandler runs the commands of requests with guest.
func CommandHandler(t *testing.T, guest func(command []string, in []byte) (out []byte, errOut string, code int)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		var req guestapi.ExecRequest
		if err := json.NewDecoder(r.Body).Decode(&req); err != nil {
			t.Error(err)
		}
		conn, rw, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer func() { _ = conn.Close() }()
		_, _ = io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: "+guestapi.StreamProtocol+"\r\n\r\n")
		var in []byte
		for frames := stream.NewReader(rw.Reader); ; {
			kind, p, err := frames.Next()
			if err != nil || kind == stream.StdinEOF {
				break
			}
			in = append(in, p...)
		}
		out, errOut, code := guest(req.Command, in)
		answer := stream.NewWriter(conn)
		_, _ = answer.Data(stream.Stdout).Write(out)
		_, _ = answer.Data(stream.Stderr).Write([]byte(errOut))
		_ = answer.JSON(stream.Exit, stream.ExitStatus{Code: code})
	}
}
