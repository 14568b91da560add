package e2e

import (
	"crypto/ed25519"
	"crypto/rand"
	"encoding/pem"
	"io"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"golang.org/x/crypto/ssh"

	"github.com/agentlab-vm/agentlab/test/fakenet"
)

// References are resolved when a job gets them, the agent's ssh finds the key
// for its host, a store outside gets copies of the artifacts; and a sandbox
// without a job has what it may have, too.
func TestSecrets(t *testing.T) {
	t.Parallel()
	l, n := newNetLab(t)
	_, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	block, err := ssh.MarshalPrivateKey(key, "")
	if err != nil {
		t.Fatal(err)
	}
	signer, err := ssh.NewSignerFromKey(key)
	if err != nil {
		t.Fatal(err)
	}
	host, err := fakenet.NewGitHost(t.TempDir(), fakenet.GitConfig{SSHKeys: []string{string(ssh.MarshalAuthorizedKey(signer.PublicKey()))}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := host.Create(t.Context(), "org/repo.git", map[string]string{"README": "hello\n"}); err != nil {
		t.Fatal(err)
	}
	if _, err := n.Git("git.example.com", host); err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	stored := map[string]string{}
	n.HandleHTTP("store.example.com", 80, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		p, _ := io.ReadAll(r.Body)
		mu.Lock()
		defer mu.Unlock()
		stored[r.Method+" "+r.URL.Path+" "+r.Header.Get("Authorization")] = string(p)
		w.WriteHeader(http.StatusCreated)
	}))
	file := filepath.Join(t.TempDir(), "key")
	if err := os.WriteFile(file, []byte("value-before-the-job\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	l.ok("secrets", "set", "env.FROM_CMD", "--ref", "cmd:sh -c 'echo value-of; echo two-lines'")
	l.ok("secrets", "set", "env.FROM_FILE", "--ref", "file:"+file)
	l.secret("ssh_keys.git.example.com", string(pem.EncodeToMemory(block)))
	l.secret("artifact.endpoint", "http://store.example.com/bucket")
	l.secret("artifact.token", "token-of-the-store")
	if err := os.WriteFile(file, []byte("value-at-the-job\n"), 0o600); err != nil {
		t.Fatal(err)
	}

	const task = `git ls-remote ssh://git@git.example.com/org/repo.git main
[ "$FROM_CMD" = "$(printf 'value-of\ntwo-lines')" ] && [ "$FROM_FILE" = value-at-the-job ] && echo "all is there"
echo "$FROM_CMD $FROM_FILE"; env | grep -c token-of || true
mkdir -p out && echo built > out/result.txt`
	j, r := l.job("--repo", sampleRepo(t), "--agent", "shell", "--task", task)
	log := l.ok("job", "logs", j.ID)
	if r.code != 0 || !strings.Contains(log, "refs/heads/main") || !strings.Contains(log, "all is there") {
		t.Errorf("%v\n%s", r, log)
	}
	if strings.Contains(log, "value-at") || strings.Contains(log, "two-lines") {
		t.Errorf("the log holds a secret: %s", log)
	}
	mu.Lock()
	copied := slices.Sorted(maps.Keys(stored))
	mu.Unlock()
	for _, want := range []string{"agent.log", "outputs/out/result.txt", "report.json"} {
		if !slices.Contains(copied, "PUT /bucket/"+j.ID+"/"+want+" Bearer token-of-the-store") {
			t.Errorf("no copy of %s among %q", want, copied)
		}
	}
	l.noSandboxes()

	l.ok("sandbox", "new", "--name", "box")
	var staged result
	if !eventually(settleLimit, func() bool {
		staged = l.run("", "exec", "box", "--", "sh", "-c", ". /run/agentlab/secrets/env.sh && echo $FROM_FILE && ls ~/.ssh/config && ls /run/agentlab/secrets")
		return staged.code == 0
	}) || !strings.Contains(staged.stdout, "value-at-the-job\n") {
		t.Errorf("%v", staged)
	}
	l.ok("sandbox", "destroy", "box")
	l.ok("secrets", "rotate")
	if out := l.ok("secrets", "validate", "--resolve"); out != "" {
		t.Errorf("%s", out)
	}
}
