package project

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"os"
	"path"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/internal/projectfile"
	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
)

// source describes what the commands under setup of a commit depend on. why is the
// reason if no snapshot after them can be used.
func source(ctx context.Context, src gitsafe.LocalCommit, p projectfile.File, devcontainer string) (s *api.SetupSource, why string, err error) {
	switch {
	case len(p.Setup.Run) == 0:
		return nil, "", nil
	case p.Network != nil:
		return nil, "the repository has a network policy of its own", nil
	case len(src.Modules)+len(src.Unsent) > 0:
		return nil, "the repository has submodules", nil
	}
	files, err := treeOf(ctx, src.Path, src.Commit)
	if err != nil {
		return nil, "", err
	}
	read := [][]string{p.Setup.Run}
	for _, f := range files {
		if isContainerConfig(f.name) && devcontainer != agentlab.DevcontainerOff {
			return nil, "the repository has a dev container (--devcontainer off does not use it)", nil
		}
		if p.Setup.IsInput(f.name) || p.Services != "" && f.name == path.Clean(p.Services) {
			read = append(read, []string{f.name, f.mode, f.id})
		}
	}
	text, err := json.Marshal(read)
	if err != nil {
		return nil, "", err
	}
	sum := sha256.Sum256(text)
	s = &api.SetupSource{Ref: src.Branch, Sum: hex.EncodeToString(sum[:])}
	if src.Branch == gitsafe.DetachedBranch {
		s.Ref = src.Commit
	}
	// Only a commit that the remote's default branch has: a branch here can have its name.
	_, err = gitsafe.Git(ctx, src.Path, "merge-base", "--is-ancestor", src.Commit, "refs/remotes/origin/HEAD")
	s.Default = err == nil
	s.Repo, err = copyOf(ctx, src.Path)
	return s, "", err
}

// isContainerConfig reports whether a file can be the configuration of a dev container:
// whose user can own files of the checkout, which then cannot be updated.
func isContainerConfig(name string) bool {
	return name == ".devcontainer.json" || strings.HasPrefix(name, ".devcontainer/") && path.Base(name) == "devcontainer.json"
}

// copyOf identifies this copy of a repository. It does not contain anything that comes
// with a repository, such as the address of a remote, which another copy can have.
func copyOf(ctx context.Context, path string) (string, error) {
	of, err := gitsafe.Identify(ctx, path)
	if err != nil {
		return "", err
	}
	host, err := os.Hostname()
	return host + ":" + of.ID, err
}

// UseSetup asks for a snapshot after setup for a job. A repository for which there is
// none runs the commands in each job, with a note.
func UseSetup(ctx context.Context, ui work.UI, src gitsafe.LocalCommit, p projectfile.File, r *api.JobCreate) error {
	s, why, err := source(ctx, src, p, r.Devcontainer)
	if why != "" {
		ui.Progressf("note: the commands under setup run in each job: %s", why)
	}
	r.Setup = s
	return err
}
