package cli

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"os"
	"path"
	"strings"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/internal/projectfile"
	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
)

func (a *App) setupCmd() *cobra.Command {
	cmd := &cobra.Command{
		Use: "setup", Short: "Manage snapshots after the commands under setup of repositories",
		Long: `Manage the snapshots that jobs make after the commands under setup in the
.agentlab.yaml of a repository, so that later jobs do not run them. They are a
cache of limited size; docs/project.md describes them.`,
	}
	cmd.AddCommand(a.setupListCmd(), a.setupRmCmd())
	return cmd
}

func (a *App) setupListCmd() *cobra.Command {
	return query(a, "list", "List snapshots after setup, the last used first", exactArgs(), all((*client.Client).Setups), func(list api.List[api.Setup]) error {
		t := newTable(a.Stdout, "ID", "REPOSITORY", "BRANCH", "PROFILE", "IMAGE", "STATE", "DISK", "AGE", "USED")
		for _, s := range list.Items {
			t.row(s.ID[:min(len(s.ID), setupIDShown)], s.Repo, cmp.Or(s.Ref, "(all)"), s.Profile, shortImage(s.Image), s.State, work.ByteSize(s.Bytes), a.age(s.CreatedAt), a.age(s.UsedAt))
		}
		return t.flush()
	})
}

// setupIDShown is the number of characters of an ID in a list: all begin alike.
const setupIDShown = 20

func (a *App) setupRmCmd() *cobra.Command {
	var every bool
	cmd := &cobra.Command{
		Use: "rm [SETUP]", Short: "Remove a snapshot after setup, or all", Args: cobra.MaximumNArgs(1),
		Long: `Remove a snapshot after setup, by its ID or a unique prefix of it, or all. The
next job runs the commands again. Running jobs do not change.`,
	}
	cmd.Flags().BoolVar(&every, "all", false, "remove all snapshots after setup")
	cmd.RunE = a.run(func(ctx context.Context, c *client.Client, args []string) error {
		if every == (len(args) == 1) {
			return work.UsageErrorf("give an ID or --all").WithHint("list snapshots after setup with 'agentlab setup list'")
		}
		var list api.List[api.Setup]
		var err error
		if every {
			list, err = c.RemoveSetups(ctx)
		} else {
			list, err = c.RemoveSetup(ctx, args[0])
		}
		if err != nil {
			return err
		}
		return a.done(list, "%s removed", agentlab.Plural(len(list.Items), "snapshot"))
	})
	return cmd
}

// setupSource describes what the commands under setup of a commit depend on. why is the
// reason if no snapshot after them can be used.
func setupSource(ctx context.Context, src gitsafe.LocalCommit, p projectfile.File, devcontainer string) (s *api.SetupSource, why string, err error) {
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

// preparationLog copies the log of the job that runs the commands under setup for a job,
// until it has ended.
func (a *App) preparationLog(ctx context.Context, c *client.Client, id string, copyLog func(id string) error) error {
	j, err := c.Job(ctx, id)
	if err != nil || j.Setup == nil || j.Setup.PreparationID == "" {
		return err
	}
	return copyLog(j.Setup.PreparationID)
}

// useSetup asks for a snapshot after setup for a job. A repository for which there is
// none runs the commands in each job, with a note.
func (a *App) useSetup(ctx context.Context, src gitsafe.LocalCommit, p projectfile.File, r *api.JobCreate) error {
	s, why, err := setupSource(ctx, src, p, r.Devcontainer)
	if why != "" {
		a.Progressf("note: the commands under setup run in each job: %s", why)
	}
	r.Setup = s
	return err
}
