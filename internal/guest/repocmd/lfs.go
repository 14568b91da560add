package repocmd

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"io"
	"math"
	"path/filepath"
	"strings"

	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/lfs"
)

// LFSConfig is the configuration with which git reads and writes the files of Git LFS.
// Without an object and without its server, a checkout leaves the pointer instead of
// failing.
var LFSConfig = [][2]string{
	{"filter.lfs.clean", lfsClean}, {"filter.lfs.smudge", "git-lfs smudge -- %f"},
	{"filter.lfs.required", "true"}, {"lfs.skipdownloaderrors", "true"},
}

// lfsGit runs git for package lfs in a directory of the repository.
func (r repo) lfsGit(dir string) lfs.Git {
	return func(in io.Reader, out io.Writer, args ...string) error {
		_, err := r.runGit(command{dir: filepath.Join(r.dir, dir), in: in, out: out}, args...)
		return err
	}
}

// lfsInput reads the first line of the input.
func lfsInput(in *bufio.Reader) (list []lfs.Pointer, err error) {
	line, err := in.ReadBytes('\n')
	if err != nil || len(line) > guestapi.MaxRepoState {
		return nil, errors.New("the input is not valid: its first line is incomplete")
	}
	var p guestapi.RepoLFS
	if err := json.Unmarshal(line, &p); err != nil {
		return nil, err
	}
	for _, o := range p.Objects {
		if !lfs.IsOID(o.OID) || o.Size < 0 {
			return nil, errors.New("the input is not valid: an object has no name")
		}
		list = append(list, lfs.Pointer(o))
	}
	return list, nil
}

// lfsPack writes objects that the repository has.
func (r repo) lfsPack(in io.Reader, out io.Writer) error {
	list, err := lfsInput(bufio.NewReader(in))
	if err != nil {
		return err
	}
	store, err := lfs.StoreOf(r.lfsGit(""))
	if err != nil {
		return err
	}
	return store.Send(out, list)
}

// lfsReceive stores objects, and puts them into the work trees if Git LFS is installed:
// without it, git would take the files for changed ones.
func (r repo) lfsReceive(in io.Reader) (guestapi.RepoLFSReceived, error) {
	got := guestapi.RepoLFSReceived{Missing: []string{}, Installed: hasLFS()}
	input := bufio.NewReader(in)
	list, err := lfsInput(input)
	if err != nil {
		return got, err
	}
	store, err := lfs.StoreOf(r.lfsGit(""))
	if err != nil {
		return got, err
	}
	if _, err := store.Receive(input, list); err != nil {
		return got, err
	}
	for _, p := range list {
		if !store.Has(p) {
			got.Missing = append(got.Missing, p.OID)
		}
	}
	if !got.Installed {
		return got, r.sync()
	}
	if err := r.configureLFS(); err != nil {
		return got, err
	}
	st, err := r.state()
	if err != nil {
		return got, err
	}
	for _, w := range st.Worktrees {
		if err := r.lfsCheckout(store, w); err != nil {
			return got, err
		}
	}
	return got, r.sync()
}

// configureLFS sets what the configuration lacks, for the git of the agent.
func (r repo) configureLFS() error {
	_, err := r.exec(command{}, "config", "--get", LFSConfig[0][0])
	for _, kv := range LFSConfig {
		if err == nil && strings.HasPrefix(kv[0], "filter.") { // the image has the filter
			continue
		}
		if _, err := r.exec(command{}, "config", kv[0], kv[1]); err != nil {
			return err
		}
	}
	return nil
}

// lfsCheckout puts objects into a work tree.
func (r repo) lfsCheckout(store lfs.Store, w guestapi.RepoWorktree) error {
	done, err := store.Checkout(context.Background(), r.lfsGit(w.Dir), filepath.Join(r.dir, w.Dir), nil, math.MaxInt64)
	if err != nil || len(done) == 0 {
		return err
	}
	// It saves the agent's git from reading the files. It fails while that git runs.
	_, _ = r.runGit(command{dir: filepath.Join(r.dir, w.Dir)}, "update-index", "-q", "--refresh", "--unmerged", "--ignore-submodules")
	return nil
}
