package e2e

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
)

// debian is the archive of a small Debian with Redis, for container images: no registry
// can be reached. Its user dev has another UID than the VM's agent.
func debian(t testing.TB) string {
	t.Helper()
	at := filepath.Join(cacheDir(t), "debian-redis.tar")
	if _, err := os.Stat(at); err == nil {
		return at
	}
	tmp, err := os.MkdirTemp(cacheDir(t), "debian-*")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = os.RemoveAll(tmp) }()
	file := filepath.Join(tmp, "debian.tar")
	args := []string{"--variant=essential", "--include=redis-server,libstdc++6,passwd", "--customize-hook=chroot \"$1\" useradd --create-home --uid 1234 --shell /bin/bash dev"}
	for _, unused := range []string{"doc", "man", "locale", "info"} {
		args = append(args, "--dpkgopt=path-exclude=/usr/share/"+unused+"/*")
	}
	if out, err := exec.Command("mmdebstrap", append(args, "bookworm", file)...).CombinedOutput(); err != nil {
		t.Fatalf("mmdebstrap: %v\n%s", err, tail(string(out), 20))
	}
	if err := os.Rename(file, at); err != nil {
		t.Fatal(err)
	}
	return at
}

// environmentFiles is a repository with a database as a service, and a dev container with
// a feature, from the local image.
var environmentFiles = map[string]string{
	".agentlab.yaml": "setup:\n  - greet > setup-was-in-container\nservices: compose.yaml\n",
	"compose.yaml": `services:
  db:
    image: local/debian
    user: redis
    command: ["redis-server", "--dir", "/var/lib/redis", "--appendonly", "yes", "--protected-mode", "no"]
    volumes: ["data:/var/lib/redis"]
    ports: ["6379:6379"]
    healthcheck:
      test: ["CMD", "redis-cli", "ping"]
      interval: 2s
      timeout: 30s
      retries: 150
volumes:
  data: {}
`,
	".devcontainer/devcontainer.json": `{
  // The first command runs in the VM.
  "initializeCommand": "docker image inspect local/debian >/dev/null 2>&1 || docker import /work/debian.tar local/debian",
  "image": "local/debian",
  "features": {"./greet": {"greeting": "good morning"}},
  "remoteUser": "dev",
  "remoteEnv": {"FROM_CONFIG": "yes"},
  "postCreateCommand": "echo created by $(id -un) > ~/created",
  "forwardPorts": [33796, "db:5432"],
}
`,
	".devcontainer/greet/devcontainer-feature.json": `{"id": "greet", "version": "1.0.0", "name": "Greet", "options": {"greeting": {"type": "string", "default": "hello"}}}`,
	".devcontainer/greet/install.sh": `#!/bin/sh
set -e
printf '#!/bin/sh\necho "%s"\n' "$GREETING" > /usr/local/bin/greet
printf '#!/bin/sh\n{ greet; id -un; pwd; echo "$@"; } > gemini-ran\nsleep 3600\n' > /usr/local/bin/gemini
chmod +x /usr/local/bin/greet /usr/local/bin/gemini
`,
}

// commitEnvironment adds the environmentFiles whose name has a prefix to a repository.
func commitEnvironment(t testing.TB, repo, prefix string) {
	t.Helper()
	for name, text := range environmentFiles {
		if !strings.HasPrefix(name, prefix) {
			continue
		}
		at := filepath.Join(repo, name)
		if err := os.MkdirAll(filepath.Dir(at), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(at, []byte(text), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	git(t, repo, "add", "-A")
	git(t, repo, "commit", "-qm", "An environment")
}

// The services and the dev container of a repository, in a session and in a job on its
// workspace.
func TestEnvironment(t *testing.T) {
	withDevImage(t)
	t.Parallel()
	base := debian(t)
	l := newLab(t)
	l.workProfile("dev", "dev")
	repo := filepath.Join(t.TempDir(), "app")
	if err := os.Rename(sampleRepo(t), repo); err != nil {
		t.Fatal(err)
	}
	start := []string{"start", "--profile", "dev", "--agent", "none", "--detach"}
	l.in(repo, start...)
	l.ok("cp", base, l.sandboxOf("app")+":/work/debian.tar")
	commitEnvironment(t, repo, "")
	r := l.run(repo, "start", "--agent", "gemini", "--detach")
	if r.code != 0 || !strings.Contains(r.stderr, "agents run in the dev container") {
		t.Fatalf("start: %v", r)
	}
	l.checkDatabase("4 21 30")
	l.checkContainedTerminal()
	l.in(repo, "stop")
	l.in(repo, "start", "--agent", "none", "--detach")
	l.checkDatabase("4 4 21 21 30 30") // the service runs again, with its volume
	l.ok("session", "stop", "app")
	l.checkContainedJob(repo)
}

// checkDatabase adds numbers to a list in the service, and sorts the list.
func (l *lab) checkDatabase(want string) {
	l.Helper()
	got := l.guest("app", "docker compose exec -T db redis-cli rpush numbers 30 4 21 >&2; docker compose exec -T db redis-cli sort numbers")
	if got = strings.Join(strings.Fields(got), " "); got != want {
		l.Errorf("the query returned %q, want %q", got, want)
	}
}

// checkContainedTerminal checks that the agent of a terminal runs in the container, and
// that a port of it is served.
func (l *lab) checkContainedTerminal() {
	l.Helper()
	l.eventually("the agent runs in the container", func() bool {
		return l.guest("app", "cat gemini-ran 2>/dev/null || true") == "good morning\ndev\n/workspaces/repo\n--approval-mode=yolo"
	})
	if got := l.guest("app", "docker exec --user dev $(docker ps -q --filter label=devcontainer.local_folder=/work/repo) bash -c 'cat ~/created'"); got != "created by dev" {
		l.Errorf("postCreateCommand: %q", got)
	}
	// Another test can have the port of this machine.
	if p := l.served(33796); p.URL != fmt.Sprintf("http://app.sandbox.localhost:%d/", p.HostPort) {
		l.Errorf("%+v", p)
	}
}

// checkContainedJob runs a job on the workspace of the session, in a new VM.
func (l *lab) checkContainedJob(repo string) {
	l.Helper()
	job, r := l.job("--repo", repo, "--session", "app", "--agent", "shell", "--devcontainer", "on", "--task", `
greet
id -un
cat ~/created setup-was-in-container
echo "config: $FROM_CONFIG"
[ -e /.dockerenv ] && echo contained
claude --version
echo work > from-the-container`)
	if job.Status != "COMPLETED" {
		l.Fatalf("%+v\n%v", job, r)
	}
	log := l.ok("job", "logs", job.ID)
	for _, want := range []string{"\ngood morning\ndev\ncreated by dev\ngood morning\nconfig: yes\ncontained\n", "(Claude Code)"} {
		if !strings.Contains(log, want) {
			l.Errorf("no %q in the log:\n%s", want, log)
		}
	}
	if job.Result.Uncommitted == 0 {
		l.Errorf("no work: %+v", job.Result)
	}
}

// An image with the dev container of a repository: sandboxes with it make the container
// from what Docker has built, and have no other trace of the sandbox that built it.
func TestDevcontainerImage(t *testing.T) {
	withDevImage(t)
	t.Parallel()
	l := newLab(t)
	l.workProfile("dev", "dev")
	// An image with the container image that the repository names, in place of a registry.
	l.ok("sandbox", "new", "--name", "base", "--image", "dev", "--profile", "no-secrets")
	l.ok("cp", debian(t), "base:/tmp/debian.tar")
	l.ok("exec", "base", "--", "bash", "-c", "timeout 300 bash -c 'until docker version >/dev/null 2>&1; do :; done'; docker import /tmp/debian.tar local/debian && rm /tmp/debian.tar")
	if _, err := l.client().BuildImage(t.Context(), api.ImageBuild{Name: "registry", Sandbox: "base"}, func(string) {}); agentlab.CodeOf(err) != agentlab.CodeConflict {
		t.Errorf("an image of a running sandbox: %v", err)
	}
	l.ok("sandbox", "stop", "base")
	if _, err := l.client().BuildImage(t.Context(), api.ImageBuild{Name: "registry", Sandbox: "base"}, func(string) {}); err != nil {
		t.Fatal(err)
	}
	hostKey := func(sandbox string) string {
		return l.ok("exec", sandbox, "--", "sh", "-c", "cat /etc/ssh/ssh_host_ed25519_key.pub /etc/machine-id")
	}
	l.ok("sandbox", "start", "base")
	built := hostKey("base")
	l.ok("sandbox", "destroy", "base")

	repo := filepath.Join(t.TempDir(), "app")
	if err := os.Rename(sampleRepo(t), repo); err != nil {
		t.Fatal(err)
	}
	commitEnvironment(t, repo, ".devcontainer/")
	if r := l.run(repo, "image", "from-devcontainer", "--image", "registry", "--profile", "dev"); r.code == 0 || !strings.Contains(r.stderr, "receive secrets") {
		t.Errorf("with a profile that has secrets: %v", r)
	}
	ref := strings.TrimSpace(l.in(repo, "image", "from-devcontainer", "--image", "registry"))
	if !strings.HasPrefix(ref, "app@") {
		t.Fatalf("image %q", ref)
	}
	l.noSandboxes()
	l.workProfile("app", "app")
	l.in(repo, "start", "--profile", "app", "--agent", "gemini", "--detach")
	l.checkContainedTerminal()
	// The image of the container is older than the boot of this VM.
	if got := l.guest("app", `image=$(docker inspect --format '{{.Image}}' $(docker ps -q --filter label=devcontainer.local_folder=/work/repo))
made=$(date +%s -d "$(docker image inspect --format '{{.Created}}' $image)") booted=$(date +%s -d "$(uptime -s)")
[ $made -lt $booted ] && echo built before`); got != "built before" {
		t.Errorf("the dev container was built again: %q", got)
	}
	if now := hostKey(l.sandboxOf("app")); now == built {
		t.Error("the sandbox has the identity of the one that the image was made of")
	}
}
