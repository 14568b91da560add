package runner

import (
	"context"
	"encoding/json"
	"io/fs"
	"net/http"
	"net/http/cgi"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/artifact"
	"github.com/agentlab-vm/agentlab/internal/guest/agentcmd"
	"github.com/agentlab-vm/agentlab/internal/guest/msgcmd"
	"github.com/agentlab-vm/agentlab/internal/guestplane/guesttest"
	"github.com/agentlab-vm/agentlab/test/guard"
)

// The test binary is agentlab-agent, and a runner that can be killed, when it
// is called so.
func TestMain(m *testing.M) {
	if filepath.Base(os.Args[0]) == "agentlab-agent" {
		os.Exit(agentcmd.Main(os.Args[1:]))
	}
	if name := filepath.Base(os.Args[0]); msgcmd.Programs(name) {
		os.Exit(msgcmd.Main(name, os.Args[1:]))
	}
	if text := os.Getenv("TEST_RUNNER_CONFIG"); text != "" {
		var cfg Config
		if err := json.Unmarshal([]byte(text), &cfg); err != nil {
			panic(err)
		}
		os.Exit(run(cfg))
	}
	os.Exit(guard.Run(m))
}

const secret = "hunter2-very-secret"

var quick = Timing{
	Grace: guard.Patience, LogBatch: 20 * time.Millisecond, Heartbeat: 500 * time.Millisecond,
	FirstRetry: 10 * time.Millisecond, MaxRetry: 200 * time.Millisecond, Patience: guard.Patience, Denied: 300 * time.Millisecond,
}

type sandbox struct {
	t *testing.T
	*guesttest.Controller
	cfg Config
}

// newSandbox makes a sandbox for a job, with a controller.
func newSandbox(t *testing.T, resp guestapi.BootstrapResponse, limits artifact.Limits) *sandbox {
	t.Helper()
	if resp.Env == nil {
		resp.Env = map[string]string{"API_KEY": secret}
	}
	s := &sandbox{t: t, Controller: guesttest.New(t, resp, limits)}
	shm, err := os.MkdirTemp("/dev/shm", "agentlab-test-*")
	if err != nil {
		t.Skipf("a runner needs a tmpfs: %v", err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(shm) })
	dir := t.TempDir()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	s.cfg = Config{
		Bootstrap: filepath.Join(dir, "bootstrap.json"), RunDir: filepath.Join(shm, "secrets"), TmpDir: filepath.Join(dir, "tmp"),
		Home: filepath.Join(dir, "home"), ClonePath: filepath.Join(dir, "repo"), Exe: exe, Timing: quick,
	}
	for _, d := range []string{s.cfg.TmpDir, s.cfg.Home} {
		if err := os.Mkdir(d, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	doc, _ := json.Marshal(guestapi.Bootstrap{Token: s.Token, Controller: s.URL(), VMID: s.VMID})
	if err := os.WriteFile(s.cfg.Bootstrap, doc, 0o600); err != nil {
		t.Fatal(err)
	}
	return s
}

// shellJob is a job whose task is a script.
func shellJob(script string) *guestapi.Job {
	return &guestapi.Job{Task: script, Agent: "shell", Mode: "dangerous", Upload: true}
}

func newShellSandbox(t *testing.T, script string) *sandbox {
	t.Helper()
	return newSandbox(t, guestapi.BootstrapResponse{Job: shellJob(script)}, artifact.Limits{})
}

// run runs the runner in this process until it ends.
func (s *sandbox) run() error {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(s.t.Context(), guard.Patience)
	defer cancel()
	r, err := New(s.cfg)
	if err != nil {
		s.t.Fatal(err)
	}
	return r.Run(ctx)
}

// finish runs the runner and returns its final report.
func (s *sandbox) finish() guestapi.Report {
	s.t.Helper()
	if err := s.run(); err != nil {
		s.t.Fatalf("run: %v", err)
	}
	s.wiped()
	return s.Final()
}

// untilSeen is a command that waits until finishIn has seen the report of its phase.
const untilSeen = "while [ ! -e ../seen ]; do sleep 0.02; done"

// finishIn is finish for a job that waits in a phase with untilSeen. The phase must be
// reported: that of a command that ends at once may be left out.
func (s *sandbox) finishIn(phase string) guestapi.Report {
	s.t.Helper()
	done := make(chan error, 1)
	go func() { done <- s.run() }()
	s.Wait("phase "+phase, func() bool {
		return slices.ContainsFunc(s.Reports(), func(r guestapi.Report) bool { return r.Phase == phase })
	})
	writeFile(s.t, filepath.Join(filepath.Dir(s.cfg.ClonePath), "seen"), "")
	if err := <-done; err != nil {
		s.t.Fatalf("run: %v", err)
	}
	s.wiped()
	return s.Final()
}

// wiped checks that nothing secret is left.
func (s *sandbox) wiped() {
	s.t.Helper()
	if left, err := os.ReadDir(s.cfg.RunDir); err != nil || len(left) != 0 {
		s.t.Errorf("left in the run directory: %v %v", left, err)
	}
	for _, dir := range []string{s.cfg.Home, s.cfg.TmpDir} {
		_ = filepath.WalkDir(dir, func(p string, e fs.DirEntry, err error) error {
			if err == nil && e.Type()&fs.ModeSymlink != 0 {
				s.t.Errorf("left: the link %s", p)
			}
			if err == nil && e.Type().IsRegular() {
				if b, _ := os.ReadFile(p); strings.Contains(string(b), secret) {
					s.t.Errorf("a secret is left in %s", p)
				}
			}
			return nil
		})
	}
}

// process is a runner in a process of its own.
type process struct {
	t   *testing.T
	cmd *exec.Cmd
	end chan error
}

func (s *sandbox) start() *process {
	s.t.Helper()
	text, err := json.Marshal(s.cfg)
	if err != nil {
		s.t.Fatal(err)
	}
	cmd := exec.Command(s.cfg.Exe)
	cmd.Args[0] = "agent-runner"
	cmd.Env = append(os.Environ(), "TEST_RUNNER_CONFIG="+string(text))
	cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr
	if err := cmd.Start(); err != nil {
		s.t.Fatal(err)
	}
	p := &process{t: s.t, cmd: cmd, end: make(chan error, 1)}
	go func() { p.end <- cmd.Wait() }()
	s.t.Cleanup(func() { _ = cmd.Process.Kill() })
	return p
}

// changeBoot changes what a runner that was killed has stored of its start, for example
// the end of the job's time.
func (s *sandbox) changeBoot(change func(*boot)) {
	s.t.Helper()
	var b boot
	if ok, err := dir(s.cfg.RunDir).load(fileBoot, &b); err != nil || !ok {
		s.t.Fatalf("%v, %v", ok, err)
	}
	change(&b)
	if err := dir(s.cfg.RunDir).save(fileBoot, b); err != nil {
		s.t.Fatal(err)
	}
}

func (p *process) kill() {
	_ = p.cmd.Process.Signal(syscall.SIGKILL)
	<-p.end
}

func (p *process) wait() {
	p.t.Helper()
	select {
	case err := <-p.end:
		if err != nil {
			p.t.Fatalf("the runner: %v", err)
		}
	case <-time.After(guard.Patience):
		p.t.Fatal("the runner does not end")
	}
}

// runGit runs git as a user would, in dir.
func runGit(t *testing.T, dir string, args ...string) string {
	t.Helper()
	cmd := exec.Command("git", args...)
	cmd.Dir = dir
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + dir, "GIT_CONFIG_NOSYSTEM=1", "GIT_CONFIG_GLOBAL=/dev/null",
		"GIT_AUTHOR_NAME=t", "GIT_AUTHOR_EMAIL=t@t", "GIT_COMMITTER_NAME=t", "GIT_COMMITTER_EMAIL=t@t"}
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("git %v: %v\n%s", args, err, out)
	}
	return strings.TrimSpace(string(out))
}

func writeFile(t *testing.T, name, content string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(name, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
}

// newRepo makes a repository with three commits on main, a branch "dev" one
// commit ahead, and a tag "v1" on the first.
func newRepo(t *testing.T, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	runGit(t, dir, "init", "-q", "-b", "main")
	for i, m := range []string{"one", "two", "three"} {
		writeFile(t, filepath.Join(dir, "file.txt"), m+"\n")
		if i == 2 {
			for name, content := range files {
				writeFile(t, filepath.Join(dir, name), content)
			}
		}
		runGit(t, dir, "add", "-A")
		runGit(t, dir, "commit", "-q", "-m", m)
		if i == 0 {
			runGit(t, dir, "tag", "-a", "-m", "first", "v1")
		}
	}
	runGit(t, dir, "checkout", "-q", "-b", "dev")
	writeFile(t, filepath.Join(dir, "dev.txt"), "dev\n")
	runGit(t, dir, "add", "-A")
	runGit(t, dir, "commit", "-q", "-m", "dev")
	runGit(t, dir, "checkout", "-q", "main")
	return dir
}

// gitServer serves bare clones of repositories over HTTP with the real
// git-http-backend. With a token, nothing is served without it.
type gitServer struct {
	*httptest.Server
	root  string
	token string
}

func newGitServer(t *testing.T, token string) *gitServer {
	t.Helper()
	exec, err := exec.Command("git", "--exec-path").Output()
	if err != nil {
		t.Fatal(err)
	}
	s := &gitServer{root: t.TempDir(), token: token}
	backend := &cgi.Handler{
		Path: filepath.Join(strings.TrimSpace(string(exec)), "git-http-backend"),
		Env:  []string{"GIT_PROJECT_ROOT=" + s.root, "GIT_HTTP_EXPORT_ALL=1", "REMOTE_USER=x", "GIT_CONFIG_NOSYSTEM=1", "HOME=" + s.root},
	}
	s.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if s.token != "" {
			if _, pw, _ := r.BasicAuth(); pw != s.token {
				w.Header().Set("WWW-Authenticate", `Basic realm="git"`)
				w.WriteHeader(http.StatusUnauthorized)
				return
			}
		}
		backend.ServeHTTP(w, r)
	}))
	t.Cleanup(s.Close)
	return s
}

// add serves a repository and returns its URL.
func (s *gitServer) add(t *testing.T, name, repo string) string {
	t.Helper()
	bare := filepath.Join(s.root, name)
	runGit(t, s.root, "clone", "-q", "--bare", repo, bare)
	runGit(t, bare, "config", "http.receivepack", "true")
	runGit(t, bare, "config", "uploadpack.allowAnySHA1InWant", "true")
	return s.URL + "/" + name
}
