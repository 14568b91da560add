package agentcmd

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab/internal/durable"
	"github.com/agentlab-vm/agentlab/internal/hostos"
	"github.com/agentlab-vm/agentlab/test/guard"
)

// workspaceEnv is the variable with the directory of the workspace for processes of tests.
const workspaceEnv = "AGENTLAB_TEST_WORKSPACE"

// The test binary is agentlab-agent when it is called so.
func TestMain(m *testing.M) {
	if dir := os.Getenv(workspaceEnv); dir != "" {
		workspaceDir = dir
	}
	switch filepath.Base(os.Args[0]) {
	case "agentlab-agent":
		os.Exit(Main(os.Args[1:]))
	case "zellij":
		os.Exit(fakeZellijMain(os.Args[1:]))
	}
	os.Exit(m.Run())
}

// wrapper runs agentlab-agent as a process.
func wrapper(t *testing.T, stdin string, env []string, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	var out, errOut bytes.Buffer
	cmd := &exec.Cmd{Path: exe, Args: append([]string{"agentlab-agent"}, args...), Env: env, Stdin: strings.NewReader(stdin), Stdout: &out, Stderr: &errOut}
	err = cmd.Run()
	if err != nil && cmd.ProcessState == nil {
		t.Fatal(err)
	}
	return out.String(), errOut.String(), cmd.ProcessState.ExitCode()
}

// fakeAgents puts programs with the agents' names on a PATH. Each prints how
// it was called.
func fakeAgents(t *testing.T, names ...string) (path string) {
	t.Helper()
	dir := t.TempDir()
	for _, n := range names {
		script := "#!/bin/bash\nif [ \"$1\" = --version ]; then echo \"" + n + " 1.2.3\"; exit; fi\n" +
			"printf '%s\\n' \"args: $*\"; printf 'stdin: '; cat; echo; env | grep -E '^(OPENCODE_PERMISSION|IS_SANDBOX|CODEX_API_KEY|GEMINI_CLI|TERM|CI)' | sort; exit 3\n"
		if err := os.WriteFile(filepath.Join(dir, n), []byte(script), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return dir + ":/usr/bin:/bin"
}

// How each agent is called. What these flags do was checked with the real
// programs; here it is pinned that they are given.
func TestCommands(t *testing.T) {
	path := fakeAgents(t, "claude", "codex", "opencode", "gemini")
	cases := map[string]struct {
		args, env string
	}{
		"claude":   {"-p --dangerously-skip-permissions --output-format stream-json --verbose", "IS_SANDBOX=1"},
		"codex":    {"exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox --color never -", "CODEX_API_KEY=k"},
		"opencode": {"run", `OPENCODE_PERMISSION={"*":"allow"}`},
		"gemini":   {"--approval-mode=yolo", "GEMINI_CLI_TRUST_WORKSPACE=true"},
	}
	for name, c := range cases {
		task := name + " " + strings.Repeat("long task ", 20000) // longer than one argument may be
		out, errOut, code := wrapper(t, task, []string{"PATH=" + path, "OPENAI_API_KEY=k", "TERM=xterm"}, "run", "--agent", name)
		if code != 3 || errOut != "" {
			t.Errorf("%s: code %d, stderr %q", name, code, errOut)
		}
		for _, want := range []string{"args: " + c.args + "\n", "stdin: " + task, c.env, "TERM=xterm", "CI=1"} {
			if !strings.Contains(out, want) {
				t.Errorf("%s: no %.80q in %.300q", name, want, out)
			}
		}
	}
}

func TestRunShell(t *testing.T) {
	env := []string{"PATH=/usr/bin:/bin", "A=b"}
	out, errOut, code := wrapper(t, "echo \"$A\"; cat; echo err >&2; exit 5", env, "run", "--agent", "shell")
	if out != "b\n" || errOut != "err\n" || code != 5 {
		t.Errorf("%q %q %d", out, errOut, code)
	}
	file := filepath.Join(t.TempDir(), "task")
	if err := os.WriteFile(file, []byte("kill -TERM $$"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, _, code := wrapper(t, "", env, "run", "--agent=shell", "--task-file", file); code != 143 {
		t.Errorf("killed: %d", code)
	}
}

func TestUsage(t *testing.T) {
	env := []string{"PATH=/usr/bin:/bin"}
	if out, _, code := wrapper(t, "", env, "--help"); code != 0 || !strings.Contains(out, "claude, codex, opencode, gemini, shell") {
		t.Errorf("--help: %d %q", code, out)
	}
	for _, args := range [][]string{{}, {"x"}, {"run"}, {"run", "--agent", "hal"}, {"run", "--agent", "shell", "x"}, {"run", "--x"}, {"supervise"}, {"versions", "x"}} {
		if _, errOut, code := wrapper(t, "", env, args...); code != 2 || errOut == "" && args[0] != "versions" {
			t.Errorf("%q: %d %q", args, code, errOut)
		}
	}
	if _, errOut, code := wrapper(t, "task", env, "run", "--agent", "gemini"); code != 127 || !strings.Contains(errOut, "choose one with --image") {
		t.Errorf("not installed: %d %q", code, errOut)
	}
	if _, errOut, code := wrapper(t, "", env, "run", "--agent", "shell", "--task-file", "/nonexistent"); code != 126 || errOut == "" {
		t.Errorf("no task: %d %q", code, errOut)
	}
}

func TestVersions(t *testing.T) {
	path := fakeAgents(t, "claude", "gemini")
	out, _, code := wrapper(t, "", []string{"PATH=" + path}, "versions")
	if code != 0 || !strings.Contains(out, "claude    1.2.3\n") || !strings.Contains(out, "codex     not installed\n") {
		t.Errorf("%d %q", code, out)
	}
	out, _, _ = wrapper(t, "", []string{"PATH=" + path}, "versions", "--json")
	var got map[string]string
	if err := json.Unmarshal([]byte(out), &got); err != nil || got["gemini"] != "1.2.3" || got["shell"] == "" || len(got) != 3 {
		t.Errorf("%q %v", out, err)
	}
}

// testdata/claude.jsonl is what Claude Code 2.1.197 wrote.
func TestRenderClaude(t *testing.T) {
	raw, err := os.ReadFile("testdata/claude.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	w := renderClaude(&b)
	for rest := raw; len(rest) > 0; {
		n := min(100, len(rest))
		_, _ = w.Write(rest[:n])
		rest = rest[n:]
	}
	_, _ = io.WriteString(w, "not JSON\n{\"type\":\"new kind\"}\n{\"type\":\"result\",\"subtype\":\"error_max_turns\",\"is_error\":true,\"result\":\"gave up\"}\n"+
		`{"type":"system","subtype":"api_retry","attempt":1,"max_retries":10,"retry_delay_ms":610.7,"error_status":401,"error":"authentication_failed","session_id":"s"}`+"\n"+
		`{"type":"system","subtype":"api_retry","attempt":2,"max_retries":10,"retry_delay_ms":610.7,"error_status":null,"error":"unknown","session_id":"s"}`+"\n"+
		`{"type":"result","subtype":"success","is_error":true,"api_error_status":401,"num_turns":1,"result":"Not logged in"}`+"\nlast")
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	got := b.String()
	for _, want := range []string{
		"[claude: model claude-opus-4-8[1m]]\n> Bash echo hello > made.txt && ls\n  made.txt\n", "  line 20\n  … 10 more lines\n",
		"  error: Exit code 1\nAll done.\nI made a file.\n[claude: ended after 4 turns, ", "not JSON\n", `{"type":"new kind"}` + "\n",
		"[claude: error_max_turns] gave up\n", "last",
		"[claude: the model answers 401 (authentication_failed); retry 1 of 10]\n[claude: the model does not answer (unknown); retry 2 of 10]\n",
		"[claude: the model answers 401 to the last request]\n[claude: success] Not logged in\n",
	} {
		if !strings.Contains(got, want) {
			t.Errorf("no %q in %s", want, got)
		}
	}
	if strings.Contains(got, "session") {
		t.Errorf("raw events in %s", got)
	}
}

// What the agents of the image wrote when a model rejected their key.
func TestKeyRejected(t *testing.T) {
	for name, c := range map[string]struct {
		agent, output, exit string
		want                bool
	}{
		"claude":         {"claude", `{"type":"system","subtype":"api_retry","attempt":1,"max_retries":10,"error_status":401,"error":"authentication_failed"}`, "1", true},
		"no right":       {"claude", `{"type":"result","subtype":"success","is_error":true,"api_error_status":403,"result":"no"}`, "1", true},
		"overloaded":     {"claude", `{"type":"system","subtype":"api_retry","attempt":1,"max_retries":10,"error_status":529,"error":"overloaded"}`, "1", false},
		"it succeeded":   {"claude", `{"type":"system","subtype":"api_retry","attempt":1,"max_retries":10,"error_status":401,"error":"authentication_failed"}`, "0", false},
		"codex":          {"codex", "ERROR: unexpected status 401 Unauthorized: Incorrect API key provided, url: http://127.0.0.1:18401/v1/responses", "1", true},
		"codex, limit":   {"codex", "ERROR: unexpected status 429 Too Many Requests", "1", false},
		"opencode":       {"opencode", "\x1b[91m\x1b[1mError: \x1b[0minvalid x-api-key", "1", true},
		"gemini gateway": {"gemini", "at async Turn.run {\n  status: 401\n}", "1", true},
		"gemini":         {"gemini", `[API Error: {"error":{"code":400,"message":"API key not valid. Please pass a valid API key."}}]`, "1", true},
		"a test of code": {"codex", "the test of status 401 Unauthorized fails", "1", false},
	} {
		t.Run(name, func(t *testing.T) {
			bin, out := t.TempDir(), filepath.Join(t.TempDir(), "out")
			if err := os.WriteFile(out, []byte(c.output+"\n"), 0o600); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(bin, c.agent), []byte("#!/bin/sh\ncat "+out+"\nexit "+c.exit+"\n"), 0o755); err != nil {
				t.Fatal(err)
			}
			dir, end, _ := supervised(t, Plan{Agent: c.agent, Env: []string{"PATH=" + bin + ":/usr/bin:/bin"}}, "task")
			if err := <-end; err != nil {
				t.Fatal(err)
			}
			if e, log := exitOf(t, dir); e.KeyRejected != c.want {
				t.Errorf("%+v: %s", e, log)
			}
		})
	}
}

func FuzzRenderClaude(f *testing.F) {
	raw, err := os.ReadFile("testdata/claude.jsonl")
	if err != nil {
		f.Fatal(err)
	}
	for line := range bytes.Lines(raw) {
		f.Add(line, 7)
	}
	f.Fuzz(func(t *testing.T, p []byte, n int) {
		if n < 1 {
			return
		}
		render := func(n int) string {
			var b bytes.Buffer
			w := renderClaude(&b)
			for rest := p; len(rest) > 0; {
				k := min(n, len(rest))
				if got, err := w.Write(rest[:k]); got != k || err != nil {
					t.Fatal(got, err)
				}
				rest = rest[k:]
			}
			_ = w.Close()
			return b.String()
		}
		if a, b := render(n), render(len(p)+1); a != b {
			t.Errorf("split: %q, whole: %q", a, b)
		}
	})
}

func TestPrepare(t *testing.T) {
	home, dir := t.TempDir(), t.TempDir()
	settings := filepath.Join(home, ".claude/settings.json")
	if err := os.MkdirAll(filepath.Dir(settings), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(settings, []byte("the image's"), 0o600); err != nil {
		t.Fatal(err)
	}
	env := map[string]string{"OPENAI_BASE_URL": "http://h/v1?a=\"b\"\né", "OPENAI_MODEL": "m", "CODEX_AUTH_JSON": `{"tokens":{}}`}
	for range 2 {
		if err := Prepare(home, dir, `{"a":1}`, env); err != nil {
			t.Fatal(err)
		}
	}
	if p, _ := os.ReadFile(settings); string(p) != `{"a":1}` {
		t.Errorf("settings %q", p)
	}
	if p, _ := os.ReadFile(settings + ".orig"); string(p) != "the image's" {
		t.Errorf("orig %q", p)
	}
	codex := filepath.Join(home, ".codex/config.toml")
	p, err := os.ReadFile(codex)
	if err != nil || !strings.Contains(string(p), `base_url = "http://h/v1?a=\"b\"\n\u00e9"`) || !strings.Contains(string(p), `model = "m"`) {
		t.Errorf("codex %q %v", p, err)
	}
	if to, _ := os.Readlink(codex); filepath.Dir(to) != dir {
		t.Errorf("config.toml is not on the tmpfs: %q", to)
	}
	auth := filepath.Join(home, ".codex/auth.json")
	if p, err := os.ReadFile(auth); string(p) != `{"tokens":{}}` {
		t.Errorf("auth.json %q %v", p, err)
	}
	if to, _ := os.Readlink(auth); filepath.Dir(to) != dir {
		t.Errorf("auth.json is not on the tmpfs: %q", to)
	}
	if err := Unprepare(home, dir); err != nil {
		t.Fatal(err)
	}
	for _, link := range []string{settings, codex, auth} {
		if _, err := os.Lstat(link); err == nil {
			t.Errorf("%s is left", link)
		}
	}
	if err := Prepare(home, dir, "", nil); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(settings); err == nil {
		t.Error("settings without settings")
	}
}

// supervised starts a supervisor as the runner does.
func supervised(t *testing.T, p Plan, script string) (dir string, end <-chan error, pid int) {
	t.Helper()
	return supervisedAfter(t, p, script, func(string) {})
}

// supervisedAfter is supervised with something to do in the directory first.
func supervisedAfter(t *testing.T, p Plan, script string, first func(dir string)) (dir string, end <-chan error, pid int) {
	t.Helper()
	dir = t.TempDir()
	first(dir)
	p.TaskFile, p.LogFile = filepath.Join(dir, "task"), filepath.Join(dir, "log")
	if p.Agent == "" {
		p.Agent = "shell"
	}
	if p.Dir == "" {
		p.Dir = dir
	}
	if p.LogBytes == 0 {
		p.LogBytes = 1 << 20
	}
	if p.Env == nil {
		p.Env = []string{"PATH=/usr/bin:/bin"}
	}
	if p.Inner != nil {
		p.Inner.RunDir = dir
	}
	if err := os.WriteFile(p.TaskFile, []byte(script), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := durable.ReplaceJSON(filepath.Join(dir, PlanFile), p, durable.None); err != nil {
		t.Fatal(err)
	}
	lock, err := os.Create(filepath.Join(dir, LockFile))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = lock.Close() }()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	exe, _ := os.Executable()
	cmd := &exec.Cmd{
		Path: exe, Args: []string{"agentlab-agent", "supervise", dir}, ExtraFiles: []*os.File{lock},
		Stderr: os.Stderr, SysProcAttr: &syscall.SysProcAttr{Setsid: true},
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ch := make(chan error, 1)
	go func() { ch <- cmd.Wait() }()
	t.Cleanup(func() { _ = cmd.Process.Kill() })
	return dir, ch, cmd.Process.Pid
}

func exitOf(t *testing.T, dir string) (e Exit, log string) {
	t.Helper()
	p, err := os.ReadFile(filepath.Join(dir, ExitFile))
	if err == nil {
		err = json.Unmarshal(p, &e)
	}
	if err != nil {
		t.Fatal(err)
	}
	p, err = os.ReadFile(filepath.Join(dir, "log"))
	if err != nil {
		t.Fatal(err)
	}
	return e, string(p)
}

// The lock is held exactly as long as the supervisor lives, and not by what
// the agent leaves behind, not even by what escapes all signals.
func TestLockIsTheSupervisors(t *testing.T) {
	dir, end, pid := supervised(t, Plan{Grace: time.Second}, `ls -l /proc/self/fd | grep -c agent.lock || true; while [ ! -e go ]; do sleep 0.01; done`)
	free := func() bool {
		f, err := os.Open(filepath.Join(dir, LockFile))
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = f.Close() }()
		return unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB) == nil
	}
	if free() {
		t.Error("it is not locked while the supervisor lives")
	}
	if err := os.WriteFile(filepath.Join(dir, "go"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := <-end; err != nil {
		t.Fatal(err)
	}
	if !free() {
		t.Error("it is locked after the supervisor's end")
	}
	if e, log := exitOf(t, dir); e.Code != 0 || log != "0\n" {
		t.Errorf("%+v, log %q: the agent has the lock too", e, log)
	}
	if _, err := hostos.ProcStart(pid); err == nil {
		t.Error("the supervisor lives")
	}
}

func TestSuperviseStop(t *testing.T) {
	for name, c := range map[string]struct {
		script string
		grace  time.Duration
		code   int
	}{
		"ends by TERM": {"echo ready; sleep 600", guard.Patience, 143},
		"needs KILL":   {"trap '' TERM; echo ready; while :; do sleep 0.05; done", 300 * time.Millisecond, 137},
		"exits well":   {"trap 'exit 0' TERM; echo ready; while :; do sleep 0.05; done", guard.Patience, 0},
	} {
		t.Run(name, func(t *testing.T) {
			dir, end, pid := supervised(t, Plan{Grace: c.grace}, c.script)
			guard.Until(t, "the agent starts", func() bool {
				p, _ := os.ReadFile(filepath.Join(dir, "log"))
				return string(p) == "ready\n"
			})
			if err := syscall.Kill(pid, syscall.SIGTERM); err != nil {
				t.Fatal(err)
			}
			if err := <-end; err != nil {
				t.Fatal(err)
			}
			if e, _ := exitOf(t, dir); e.Code != c.code || !e.Stopped {
				t.Errorf("%+v", e)
			}
		})
	}
}

func TestSuperviseLog(t *testing.T) {
	dir, end, _ := supervised(t, Plan{LogBytes: 1000, Secrets: []string{"top-secret-value"}}, `echo top-secret-value; for i in $(seq 1000); do echo "line $i"; done; exit 4`)
	if err := <-end; err != nil {
		t.Fatal(err)
	}
	e, log := exitOf(t, dir)
	if e.Code != 4 || !strings.HasPrefix(log, "[redacted]\nline 1\n") || !strings.Contains(log, "log limit") || len(log) > 1100 {
		t.Errorf("%+v %q", e, log)
	}
	dir, end, _ = supervised(t, Plan{Agent: "codex"}, "x")
	if err := <-end; err != nil {
		t.Fatal(err)
	}
	if e, log := exitOf(t, dir); e.Code != ExitNotFound || e.Error == "" || !strings.Contains(log, "codex is not installed") {
		t.Errorf("%+v %q", e, log)
	}
	dir, end, _ = supervised(t, Plan{Dir: "/nonexistent"}, "x")
	if err := <-end; err != nil {
		t.Fatal(err)
	}
	if e, _ := exitOf(t, dir); e.Code != ExitNotRun || e.Error == "" {
		t.Errorf("%+v", e)
	}
}

func TestLines(t *testing.T) {
	var got []string
	l := &lines{max: 5, each: func(line []byte, whole bool) error {
		got = append(got, fmt.Sprintf("%s %v", line, whole))
		return nil
	}}
	_, _ = io.WriteString(l, "ab\n\n12345\n1234567")
	_, _ = io.WriteString(l, "89\nx")
	_ = l.Close()
	if want := "ab true, true,12345 true,12345 false,x true"; strings.Join(got, ",") != want {
		t.Errorf("got %q", strings.Join(got, ","))
	}
}
