package fakenet

import (
	"context"
	"crypto/subtle"
	"fmt"
	"net"
	"net/http"
	"net/http/cgi"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// GitHost is a place of bare repositories, served over smart HTTP and SSH.
// Anybody may fetch; who may push is said by Config.
type GitHost struct {
	dir string
	cfg GitConfig
	bin string // of git
	env []string
}

// GitConfig says what a GitHost asks of its clients.
type GitConfig struct {
	User, Password string   // basic auth for a push over HTTP; an empty Password refuses every push
	Private        bool     // fetching over HTTP needs them as well
	SSHKeys        []string // public keys (authorized_keys lines) that may fetch and push over SSH; none means any key
}

// NewGitHost makes a host for the repositories in dir, which is made when it
// is missing.
func NewGitHost(dir string, cfg GitConfig) (*GitHost, error) {
	bin, err := exec.LookPath("git")
	if err != nil {
		return nil, err
	}
	if dir, err = filepath.Abs(dir); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	env := []string{
		"HOME=" + dir, "PATH=" + os.Getenv("PATH"), "GIT_CONFIG_NOSYSTEM=1", "GIT_CONFIG_GLOBAL=/dev/null", "GIT_TERMINAL_PROMPT=0",
		"GIT_AUTHOR_NAME=Fake Net", "GIT_AUTHOR_EMAIL=fake@git.test", "GIT_COMMITTER_NAME=Fake Net", "GIT_COMMITTER_EMAIL=fake@git.test",
		"GIT_AUTHOR_DATE=2024-01-01T00:00:00Z", "GIT_COMMITTER_DATE=2024-01-01T00:00:00Z",
		// Everything may be fetched by id, as on the large hosts.
		"GIT_CONFIG_COUNT=2",
		"GIT_CONFIG_KEY_0=uploadpack.allowAnySHA1InWant", "GIT_CONFIG_VALUE_0=true",
		"GIT_CONFIG_KEY_1=safe.directory", "GIT_CONFIG_VALUE_1=*",
	}
	return &GitHost{dir: dir, cfg: cfg, bin: bin, env: env}, nil
}

// Create makes a bare repository with one commit on branch "main" that holds
// these files, and returns its directory. Names end in ".git".
func (g *GitHost) Create(ctx context.Context, name string, files map[string]string) (string, error) {
	bare := filepath.Join(g.dir, filepath.FromSlash(name))
	work, err := os.MkdirTemp("", "fakenet-git-")
	if err != nil {
		return "", err
	}
	defer func() { _ = os.RemoveAll(work) }()
	for path, text := range files {
		full := filepath.Join(work, filepath.FromSlash(path))
		if err := os.MkdirAll(filepath.Dir(full), 0o700); err != nil {
			return "", err
		}
		if err := os.WriteFile(full, []byte(text), 0o600); err != nil {
			return "", err
		}
	}
	steps := [][]string{
		{"init", "-q", "-b", "main", work},
		{"-C", work, "add", "-A"},
		{"-C", work, "commit", "-q", "--allow-empty", "-m", "first commit"},
		{"clone", "-q", "--bare", work, bare},
		{"-C", bare, "remote", "remove", "origin"},
		{"-C", bare, "config", "http.receivepack", "true"},
	}
	for _, args := range steps {
		if out, err := g.Git(ctx, args...); err != nil {
			return "", fmt.Errorf("git %s: %w: %s", args[0], err, out)
		}
	}
	return bare, nil
}

// Git runs git as the host would and returns its output, for tests that look
// at what was pushed: Git(ctx, "-C", bare, "log", …).
func (g *GitHost) Git(ctx context.Context, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, g.bin, args...)
	cmd.Env = g.env
	out, err := cmd.CombinedOutput()
	return strings.TrimSpace(string(out)), err
}

// ServeHTTP serves the smart HTTP protocol at /NAME.git/.
func (g *GitHost) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	push := strings.HasSuffix(r.URL.Path, "/git-receive-pack") || r.URL.Query().Get("service") == "git-receive-pack"
	env := slices.Clone(g.env)
	if push || g.cfg.Private {
		user, password, ok := r.BasicAuth()
		if !ok || !g.allowed(user, password) {
			w.Header().Set("WWW-Authenticate", `Basic realm="git"`)
			http.Error(w, "who are you?", http.StatusUnauthorized)
			return
		}
		env = append(env, "REMOTE_USER="+user)
	}
	env = append(env, "GIT_PROJECT_ROOT="+g.dir, "GIT_HTTP_EXPORT_ALL=1")
	if v := r.Header.Get("Git-Protocol"); v != "" {
		env = append(env, "GIT_PROTOCOL="+v)
	}
	h := &cgi.Handler{Path: g.bin, Args: []string{"http-backend"}, Dir: g.dir, Env: env}
	h.ServeHTTP(w, r)
}

func (g *GitHost) allowed(user, password string) bool {
	same := func(a, b string) bool { return subtle.ConstantTimeCompare([]byte(a), []byte(b)) == 1 }
	return g.cfg.Password != "" && same(user, g.cfg.User) && same(password, g.cfg.Password)
}

// Git serves g on ports 80 and 22 of a host and returns the SSH host key as a
// line for known_hosts.
func (n *Net) Git(name string, g *GitHost) (knownHost string, err error) {
	n.HandleHTTP(name, 80, g)
	srv, key, err := g.sshServer()
	if err != nil {
		return "", err
	}
	at := n.HandleTCP(name, 22, func(c net.Conn) { g.serveSSH(n.ctx, c, srv) })
	return knownHostLine(name, at.Addr(), key), nil
}

func knownHostLine(name string, addr netip.Addr, key string) string {
	return name + "," + addr.String() + " " + key
}
