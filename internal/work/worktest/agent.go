package worktest

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab/guestapi"
)

// TenLines is the content of lines.txt in the repository of NewAgent.
const TenLines = "1\n2\n3\n4\n5\n6\n7\n8\n9\n10\n"

// AgentLeft gives a repository of the user, and a bundle in which an agent
// committed work.txt and left the given changes uncommitted.
func AgentLeft(t *testing.T, changed map[string]string) (user, bundle string) {
	t.Helper()
	user, guest := NewAgent(t)
	return user, Leave(t, guest, changed)
}

// NewAgent gives a repository of the user, and the agent's, with one commit more.
func NewAgent(t *testing.T) (user, guest string) {
	t.Helper()
	user = Repo(t)
	Put(t, user, map[string]string{"lines.txt": TenLines, "gone.txt": "gone\n", "dir/bin": "\x00\x01", "run.sh": "true\n"})
	Git(t, user, "add", ".")
	Git(t, user, "commit", "-q", "-m", "files")
	guest = filepath.Join(t.TempDir(), "guest")
	Git(t, user, "clone", "-q", user, guest)
	Put(t, guest, map[string]string{"work.txt": "work\n"})
	Git(t, guest, "add", ".")
	Git(t, guest, "commit", "-q", "-m", "work")
	Git(t, guest, "update-ref", "refs/heads/agentlab/j", "HEAD")
	return user, guest
}

// Leave makes uncommitted changes of an agent, and the bundle with them.
func Leave(t *testing.T, guest string, changed map[string]string) (bundle string) {
	t.Helper()
	Put(t, guest, changed)
	Git(t, guest, "add", "-A")
	commit := Git(t, guest, "commit-tree", "-p", "HEAD", "-m", "changes", Git(t, guest, "write-tree"))
	Git(t, guest, "update-ref", guestapi.RefChanges, commit)
	bundle = filepath.Join(t.TempDir(), "b")
	Git(t, guest, "bundle", "create", "-q", bundle, "agentlab/j", guestapi.RefChanges, "^origin/trunk")
	return bundle
}

// Tree reads the files of a work tree.
func Tree(t *testing.T, dir string) map[string]string {
	t.Helper()
	out := map[string]string{}
	for name, text := range Files(t, dir) {
		if rel, _ := filepath.Rel(dir, name); !strings.HasPrefix(rel, ".git/") {
			out[rel] = text
		}
	}
	return out
}
