package repocmd

import (
	"bytes"
	"encoding/json"
	"io"

	"github.com/agentlab-vm/agentlab/guestapi"
)

// Repo is the repository of a session.
type Repo struct{ r repo }

// Open returns the repository in dir, which need not exist.
func Open(dir string) Repo { return Repo{newRepo(dir)} }

// Init is 'agentlab-agent repo init'.
func (r Repo) Init(p guestapi.RepoInit) error { return r.r.init(p) }

// State is 'agentlab-agent repo state'.
func (r Repo) State() (guestapi.RepoState, error) { return r.r.state() }

// Receive is 'agentlab-agent repo receive'. The bundle can be empty.
func (r Repo) Receive(p guestapi.RepoReceive, bundle io.Reader) (guestapi.RepoReceived, error) {
	line, err := json.Marshal(p)
	if err != nil {
		return guestapi.RepoReceived{}, err
	}
	return r.r.receive(io.MultiReader(bytes.NewReader(append(line, '\n')), bundle))
}

// AddWorktree is 'agentlab-agent repo worktree add'.
func (r Repo) AddWorktree(branch string) error { return r.r.worktree("add", []string{branch}) }

// ListUntracked writes the names of the files of a work tree that git does not track and
// that match pathspecs, each with a NUL byte at its end. The names are relative to dir.
func ListUntracked(dir string, pathspecs []string, out io.Writer) error {
	_, err := newRepo(dir).runGit(command{out: out}, append([]string{"ls-files", "-z", "--others", "--"}, pathspecs...)...)
	return err
}
