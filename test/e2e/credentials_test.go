package e2e

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// hostCredential is in the files of newCredentials, and sentValue in the environment file
// of newWorkLab, which is sent.
const (
	hostCredential = "credential-of-the-host-5c1e"
	sentValue      = "sent-on-purpose-77d0"
)

// newCredentials makes a home with the credentials of a user, and returns variables that
// name it and have others.
func newCredentials(t testing.TB) []string {
	t.Helper()
	home := t.TempDir()
	for _, name := range []string{
		".ssh/id_ed25519", ".ssh/config", ".netrc", ".git-credentials", ".aws/credentials", ".docker/config.json", ".npmrc",
		".config/gh/hosts.yml", ".config/op/config", ".claude/.credentials.json", ".claude.json", ".codex/auth.json", ".gemini/oauth_creds.json",
	} {
		name = filepath.Join(home, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(name), 0o700), os.WriteFile(name, []byte(hostCredential+"\n"), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	env := []string{"HOME=" + home, "SSH_AUTH_SOCK=" + filepath.Join(home, hostCredential)}
	for _, name := range []string{"GITHUB_TOKEN", "GH_TOKEN", "ANTHROPIC_API_KEY", "CLAUDE_CODE_OAUTH_TOKEN", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY"} {
		env = append(env, name+"="+hostCredential)
	}
	return env
}

// newWorkLab has a session "app" with the repository that is returned.
func newWorkLab(t testing.TB) (l *lab, repo string) {
	t.Helper()
	l = newLab(t, newCredentials(t)...)
	l.workProfile("work", "base")
	repo = filepath.Join(t.TempDir(), "app")
	err := errors.Join(os.Rename(sampleRepo(t), repo),
		os.WriteFile(filepath.Join(repo, ".git", "info", "exclude"), []byte(".env\n"), 0o600),
		os.WriteFile(filepath.Join(repo, ".env"), []byte("FROM_FILE="+sentValue+"\n"), 0o600))
	if err != nil {
		t.Fatal(err)
	}
	git(t, repo, "config", "agentlab.identity", "agent") // as terminalTo does, so that it changes nothing
	git(t, repo, "config", "remote.origin.url", "https://user:"+hostCredential+"@git.example/app")
	git(t, repo, "config", "http.extraHeader", "Authorization: Bearer "+hostCredential)
	l.in(repo, "start", "--profile", "work", "--agent", "none", "--detach")
	l.guest("app", "git config user.name Agent; git config user.email agent@localhost")
	return l, repo
}

// Root in the VM of a session finds no credential of the host (seed 004, SC-005). It finds
// what was sent, so it would find more.
func TestNoCredentialsInASession(t *testing.T) {
	t.Parallel()
	l, _ := newWorkLab(t)
	const script = `cat >/run/patterns
find $(awk '$3 ~ /^(tmpfs|ext4|overlay)$/ { print $2 }' /proc/mounts) -xdev \( -path /usr -o -path /run/patterns \) -prune -o -type f -print0 >/run/files
xargs -0 grep -slF -f /run/patterns </run/files
grep -slF -f /run/patterns /proc/cmdline /proc/[0-9]*/environ /proc/[0-9]*/cmdline
echo "agent: $SSH_AUTH_SOCK"
awk '$3 ~ /9p|virtiofs|nfs|cifs|fuse/ { print "mount: " $0 }' /proc/mounts
find /root/.ssh /home/agent/.ssh -type f ! -name authorized_keys 2>/dev/null`
	r := l.runInput("", strings.NewReader(hostCredential+"\n"+sentValue+"\n"), "exec", "-i", "--user", "root", l.sandboxOf("app"), "--", "bash", "-c", script)
	got := strings.Fields(r.stdout)
	slices.Sort(got)
	if got = slices.Compact(got); !slices.Equal(got, []string{"/work/repo/.env", "agent:"}) {
		l.Errorf("in the VM: %v", r)
	}
}
