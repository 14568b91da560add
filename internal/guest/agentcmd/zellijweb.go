package agentcmd

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/agentlab-vm/agentlab/guestapi"
)

// zellijPort is the default port of Zellij's web server.
const zellijPort = 8082

// webToken is the line with a token in the output of 'zellij web --create-token'.
var webToken = regexp.MustCompile(`(?m)^(\S+): (\S+)$`)

// web implements multiplexer: it starts the web server unless it runs, and makes a token
// for it. The token that it made before becomes invalid.
func (z *zellij) web(o opening) (w guestapi.TerminalWeb, err error) {
	if w.Session, err = z.open(o); err != nil {
		return w, err
	}
	if w.Port, err = z.webServer(); err != nil {
		return w, err
	}
	at := filepath.Join(z.dir, "web-token")
	if p, err := os.ReadFile(at); err == nil {
		_, _ = z.run("web", "--revoke-token", string(p)) // the user may have done it
	}
	out, err := z.run("web", "--create-token")
	if err != nil {
		return w, err
	}
	m := webToken.FindStringSubmatch(out)
	if m == nil {
		return w, fmt.Errorf("zellij web --create-token: no token in the output")
	}
	w.Token = m[2]
	return w, os.WriteFile(at, []byte(m[1]), 0o600)
}

// webServer returns the port of the web server, which it starts unless it runs.
func (z *zellij) webServer() (uint16, error) {
	at := filepath.Join(z.dir, "web-port")
	if p, err := os.ReadFile(at); err == nil {
		if port, err := strconv.ParseUint(strings.TrimSpace(string(p)), 10, 16); err == nil && zellijAnswers(uint16(port)) {
			return uint16(port), nil
		}
	}
	port, err := freePort()
	if err != nil {
		return 0, err
	}
	if _, err := z.run("web", "--start", "--daemonize", "--ip", "127.0.0.1", "--port", strconv.Itoa(int(port))); err != nil {
		return 0, err
	}
	if !waitUntil(paneWait, func() bool { return zellijAnswers(port) }) {
		return 0, fmt.Errorf("the web server of zellij does not answer on port %d", port)
	}
	return port, os.WriteFile(at, []byte(strconv.Itoa(int(port))), 0o600)
}

// freePort returns Zellij's default port, or another one if a program uses it.
func freePort() (uint16, error) {
	var lc net.ListenConfig
	for _, port := range []int{zellijPort, 0} {
		if l, err := lc.Listen(context.Background(), "tcp4", fmt.Sprintf("127.0.0.1:%d", port)); err == nil {
			port := l.Addr().(*net.TCPAddr).Port
			_ = l.Close()
			return uint16(port), nil
		}
	}
	return 0, fmt.Errorf("no TCP port is free")
}

// zellijAnswers reports whether a web server of Zellij answers on a port.
func zellijAnswers(port uint16) bool {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, fmt.Sprintf("http://127.0.0.1:%d/info/version", port), nil)
	if err != nil {
		return false
	}
	direct := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}} // without a proxy
	resp, err := direct.Do(req)
	if err != nil {
		return false
	}
	defer func() { _ = resp.Body.Close() }()
	p, err := io.ReadAll(io.LimitReader(resp.Body, 64))
	return err == nil && resp.StatusCode == http.StatusOK && versionOnly.Match(p)
}

var versionOnly = regexp.MustCompile(`^\d+\.\d+\.\d+\S*\s*$`)
