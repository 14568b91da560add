package e2e

import (
	"crypto/ed25519"
	"crypto/rand"
	"encoding/pem"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/crypto/ssh"

	"github.com/agentlab-vm/agentlab/test/fakellm"
	"github.com/agentlab-vm/agentlab/test/fakenet"
	"github.com/agentlab-vm/agentlab/test/testdaemon"
)

// newNetLab is a lab whose sandboxes see a fake internet and nothing else.
func newNetLab(t testing.TB) (*lab, *fakenet.Net) {
	t.Helper()
	n := fakenet.New()
	t.Cleanup(n.Close)
	l := newLab(t)
	l.testDaemon()
	if err := n.ServeUnix(filepath.Join(l.home, testdaemon.Internet)); err != nil {
		t.Fatal(err)
	}
	return l, n
}

func (l *lab) secret(key, value string) {
	l.Helper()
	if r := l.runInput("", strings.NewReader(value), "secrets", "set", key); r.code != 0 {
		l.Fatalf("secrets set %s: %v", key, r)
	}
}

// A repository by URL is cloned through the network, shallow and at a ref,
// over HTTP and SSH; with a credential its branch is pushed, and the
// credential is found in nothing that the job left.
func TestJobByURL(t *testing.T) {
	t.Parallel()
	l, n := newNetLab(t)
	const password = "hunter2-s3cret/&$token"
	pub, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	block, err := ssh.MarshalPrivateKey(key, "")
	if err != nil {
		t.Fatal(err)
	}
	sshPub, err := ssh.NewPublicKey(pub)
	if err != nil {
		t.Fatal(err)
	}
	host, err := fakenet.NewGitHost(t.TempDir(), fakenet.GitConfig{
		User: "x-access-token", Password: password, SSHKeys: []string{string(ssh.MarshalAuthorizedKey(sshPub))},
	})
	if err != nil {
		t.Fatal(err)
	}
	bare, err := host.Create(t.Context(), "org/repo.git", map[string]string{"README": "hello\n"})
	if err != nil {
		t.Fatal(err)
	}
	known, err := n.Git("git.example.com", host)
	if err != nil {
		t.Fatal(err)
	}
	l.secret("git.url", "http://git.example.com")
	l.secret("git.token", password)
	l.secret("git.ssh_private_key", string(pem.EncodeToMemory(block)))
	l.secret("git.ssh_known_hosts", known)

	const task = `git log --oneline | wc -l; env; echo more >> README; git commit -qam More`
	for _, url := range []string{"http://git.example.com/org/repo.git", "ssh://git@git.example.com/org/repo.git"} {
		j, r := l.job("--repo", url, "--ref", "main", "--depth", "1", "--agent", "shell", "--task", task)
		if j.Status != "COMPLETED" || j.Result.Commits != 1 || !j.Result.Pushed {
			t.Fatalf("%s: %+v\n%v\nlog:\n%s", url, j, r, l.ok("job", "logs", j.ID))
		}
		pushed, err := host.Git(t.Context(), "-C", bare, "show", "agentlab/"+j.ID+":README")
		if err != nil || strings.TrimSpace(pushed) != "hello\nmore" {
			t.Errorf("%s: pushed %q, %v", url, pushed, err)
		}
		out := filepath.Join(t.TempDir(), "all.tar.gz")
		l.ok("job", "artifacts", "download", j.ID, "--out", out)
		text, err := exec.Command("tar", "xzOf", out).Output()
		if err != nil || strings.Contains(string(text), password) || strings.Contains(r.stdout+r.stderr, password) {
			t.Errorf("%s: the credential is in what the job left (%v)", url, err)
		}
	}

	for name, args := range map[string][]string{
		"no such repository": {"--repo", "http://git.example.com/org/nope.git"},
		"no such ref":        {"--repo", "http://git.example.com/org/repo.git", "--ref", "nope"},
		"no such host":       {"--repo", "http://nowhere.example.com/x.git"},
		"private address":    {"--repo", "http://192.168.1.1/x.git"},
	} {
		j, _ := l.job(append(args, "--agent", "shell", "--task", "true")...)
		if j.Status != "FAILED" || j.Reason == "" {
			t.Errorf("%s: %s, reason %q", name, j.Status, j.Reason)
		}
		t.Logf("%s: %s", name, j.Reason)
	}
	l.noSandboxes()
}

// What a guest may not reach answers nothing, however it is spelled; what it
// may reach answers. The probes have no way out of the machine: behind the
// policy there is only the fake internet.
func TestEgressFromGuest(t *testing.T) {
	t.Parallel()
	l, n := newNetLab(t)
	n.Web("web.example.com")
	n.SetName("rebind.example.com", mustAddr("10.1.2.3"))
	l.ok("sandbox", "new", "--name", "probe")
	curl := func(url string) result {
		return l.run("", "exec", "probe", "--", "curl", "-sS", "-m", "10", "-o", "/dev/null", "-w", "%{http_code}", url)
	}
	if r := curl("http://web.example.com/hello"); r.code != 0 || r.stdout != "200" {
		t.Errorf("the web: %v", r)
	}
	before := len(n.Dials())
	for _, url := range []string{
		"http://10.0.0.1/", "http://172.16.0.1/", "http://192.168.1.1/", "http://127.0.0.1:8844/", "http://169.254.169.254/latest/",
		"http://100.64.0.1/", "http://224.0.0.1/", "http://255.255.255.255/", "http://0.0.0.0/", "http://10.77.0.1:22/", "http://10.77.0.3/",
		"http://rebind.example.com/", "http://[::1]/", "http://[fd00::1]/", "http://[fe80::1]/", "http://[::ffff:10.0.0.1]/",
	} {
		if r := curl(url); r.code == 0 {
			t.Errorf("%s answered %s", url, r.stdout)
		}
	}
	for _, dial := range n.Dials()[before:] {
		if !strings.Contains(dial, ":53") {
			t.Errorf("a forbidden probe left the sandbox: %s", dial)
		}
	}
	l.ok("sandbox", "destroy", "probe")
}

// agentScript is the work that the scripted model gives the agents.
var agentScript = []fakellm.Step{
	{Run: "cat greeting.txt"},
	{Run: "echo hello > greeting.txt && sh test.sh"},
	{Run: `git commit -qam "Fix the greeting" && git log --oneline`},
	{Say: "I mended the greeting and committed it."},
}

// Real coding agents, with a model from a script, do a whole job in a real
// VM: they edit a file, run its test and commit.
func TestRealAgents(t *testing.T) {
	t.Parallel()
	tests := []struct {
		agent   string
		secrets map[string]string
	}{
		{"claude", map[string]string{"env.ANTHROPIC_BASE_URL": "http://llm.example.com", "env.ANTHROPIC_AUTH_TOKEN": "sk-test-anthropic"}},
		{"codex", map[string]string{"env.OPENAI_BASE_URL": "http://llm.example.com/v1", "env.OPENAI_API_KEY": "sk-test-openai"}},
	}
	for _, tt := range tests {
		t.Run(tt.agent, func(t *testing.T) {
			l, n := newNetLab(t)
			llm := fakellm.New(agentScript...)
			n.HandleHTTP("llm.example.com", 80, llm)
			for k, v := range tt.secrets {
				l.secret(k, v)
			}
			repo := sampleRepo(t)
			j, r := l.job("--repo", repo, "--agent", tt.agent, "--task", "Fix the greeting so that its test passes, and commit.")
			if j.Status != "COMPLETED" || j.Result.Commits != 1 {
				t.Fatalf("%+v\n%v\nlog:\n%s\nrequests: %+v", j, r, tail(l.ok("job", "logs", j.ID), 60), llm.Requests())
			}
			if r := l.run(repo, "job", "fetch", j.ID); r.code != 0 {
				t.Fatal(r)
			}
			if got := git(t, repo, "show", "refs/agentlab/"+j.ID+":greeting.txt"); got != "hello" {
				t.Errorf("the file holds %q", got)
			}
			if log := l.ok("job", "logs", j.ID); !strings.Contains(log, "I mended the greeting") {
				t.Errorf("the log does not hold the agent's last words:\n%s", tail(log, 60))
			}
			checkModelCalls(t, llm, tt.secrets)
			l.noSandboxes()
		})
	}
}

func checkModelCalls(t *testing.T, llm *fakellm.Server, secrets map[string]string) {
	t.Helper()
	last := -1
	for _, q := range llm.Requests() {
		last = max(last, q.Turn)
		ok := false
		for _, v := range secrets {
			ok = ok || q.Auth == v
		}
		if !ok {
			t.Errorf("a request to %s came with credential %q", q.Path, q.Auth)
		}
	}
	if last != len(agentScript)-1 {
		t.Errorf("the conversation ended at step %d: %s", last, fmt.Sprint(llm.Requests()))
	}
}
