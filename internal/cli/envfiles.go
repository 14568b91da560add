package cli

import (
	"context"
	"os"
	"path"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
)

// ignoreFile names files of a repository that are not sent, in the syntax of
// .gitignore.
const ignoreFile = ".agentlabignore"

// envPatterns are git's patterns of environment files.
var envPatterns = []string{":(glob)**/.env", ":(glob)**/.env.*", ":(glob)**/.envrc"}

// The limits of environment files.
const (
	maxEnvFiles = 1000
	maxEnvFile  = 1 << 20 // bytes
)

// SentEnvFiles are the environment files that were sent to a sandbox.
type SentEnvFiles struct {
	Sandbox   string   `json:"sandbox"`
	Directory string   `json:"directory"`
	Files     []string `json:"files"` // sorted, relative to the top of the repository
}

// sendEnvFiles copies the environment files of the work tree that contains the directory
// repo to the directory dir of a sandbox, which must exist, and replaces those that are
// there. They are .env, .env.* and .envrc in any directory, if git does not track them,
// except in directories that git ignores as a whole, in other repositories, and what
// .agentlabignore names. It sends nothing but these files, and nothing at all if there
// are none.
func (a *App) sendEnvFiles(ctx context.Context, c *client.Client, sandbox, repo, dir string) (SentEnvFiles, error) {
	sent := SentEnvFiles{Sandbox: sandbox, Directory: dir, Files: []string{}}
	top, names, err := findEnvFiles(ctx, repo)
	if err != nil || len(names) == 0 {
		return sent, err
	}
	root, err := os.OpenRoot(top)
	if err != nil {
		return sent, work.LocalFault(top, err)
	}
	p := &packer{kind: "content", name: top, root: root, names: names, show: func() {}}
	defer func() { _ = p.Close() }()
	for _, name := range names {
		switch st, err := root.Lstat(name); {
		case err != nil:
			return sent, work.LocalFault(name, err)
		case st.Size() > maxEnvFile:
			return sent, agentlab.Errorf(agentlab.CodeLimit, "%s has %s, more than the %s of an environment file", name, work.ByteSize(st.Size()), work.ByteSize(maxEnvFile)).
				WithHint("name it in %s, or copy it with 'agentlab cp'", ignoreFile)
		}
	}
	// The dot at the end requires that the directory exists.
	to := copyPath{sandbox, strings.TrimRight(dir, "/") + "/."}
	if err := sendArchive(ctx, c, to, "", []string{to.path, p.kind, "", "", "force"}, p.pack); err != nil {
		return sent, err
	}
	sent.Files = names
	return sent, nil
}

// excludeSent has git in a session ignore the environment files that were sent to its
// repository. Other sandboxes have none.
func excludeSent(ctx context.Context, c *client.Client, sent SentEnvFiles) error {
	if in := path.Clean(sent.Directory); in != guestapi.RepoDir && in != guestapi.ProjectDir {
		return nil
	}
	r := sessionRepo{c: c, sandbox: sent.Sandbox}
	st, err := r.state(ctx)
	if err != nil || len(st.Worktrees) == 0 {
		return nil //nolint:nilerr // it has no repository of a session
	}
	return r.callJSON(ctx, guestapi.RepoInit{Branch: st.Worktrees[0].Branch, Exclude: sent.Files}, nil, "init")
}

// findEnvFiles returns the top of a work tree and its environment files.
func findEnvFiles(ctx context.Context, repo string) (top string, names []string, err error) {
	if top, err = gitsafe.Git(ctx, repo, "rev-parse", "--show-toplevel"); err != nil {
		return "", nil, agentlab.Errorf(agentlab.CodeInvalid, "%s is not in the work tree of a git repository: %v", repo, err).WithField("repo")
	}
	var found []string
	for _, args := range [][]string{{"--exclude-standard"}, {"--exclude-standard", "--ignored", "--directory"}} {
		some, err := listFiles(ctx, top, args, envPatterns)
		if err != nil {
			return "", nil, err
		}
		found = append(found, some...)
	}
	slices.Sort(found)
	found = slices.Compact(found)
	if len(found) > maxEnvFiles {
		return "", nil, agentlab.Errorf(agentlab.CodeLimit, "%s has %d environment files, more than %d", top, len(found), maxEnvFiles).WithHint("name directories in %s", ignoreFile)
	}
	if len(found) == 0 {
		return top, nil, nil
	}
	without, err := ignoredNames(ctx, top, found)
	if err != nil {
		return "", nil, err
	}
	return top, slices.DeleteFunc(found, func(name string) bool { return without[name] }), nil
}

// listFiles returns files that git does not track, without directories.
func listFiles(ctx context.Context, top string, args, patterns []string) ([]string, error) {
	args = slices.Concat([]string{"ls-files", "-z", "--others"}, args, []string{"--"}, patterns)
	out, err := gitsafe.Command{Raw: true}.Run(ctx, top, args...)
	if err != nil {
		return nil, agentlab.Errorf(agentlab.CodeInvalid, "git cannot list the files of %s: %w", top, err)
	}
	var names []string
	for name := range strings.SplitSeq(out, "\x00") {
		if name != "" && !strings.HasSuffix(name, "/") {
			names = append(names, name)
		}
	}
	return names, nil
}

func (a *App) syncEnvCmd() *cobra.Command {
	var repo, dir string
	cmd := &cobra.Command{
		Use: "sync-env SANDBOX|SESSION", Short: "Send the .env files of a repository to a sandbox", Args: exactArgs("SANDBOX|SESSION"),
		Long: `Send the files .env, .env.* and .envrc of a repository to the same places below a
directory of a sandbox. Files that git tracks are not sent: they arrive with the
commits. Directories that git ignores as a whole, other repositories, and what the file
.agentlabignore names are left out; it has the syntax of .gitignore.

Files in the sandbox are replaced, and none is removed. In /workspace of a session, git
ignores them: they do not count as work of the agent. The agent can read them, and
AgentLab does not know their values: it does not redact them in logs.`,
		Example: `  agentlab sync-env play
  agentlab sync-env play --repo ~/src/project --dir /workspace`,
	}
	cmd.Flags().StringVar(&repo, "repo", ".", "path of the repository")
	cmd.Flags().StringVar(&dir, "dir", "/workspace", "directory in the sandbox")
	cmd.RunE = a.run(func(ctx context.Context, c *client.Client, args []string) error {
		sandbox := args[0]
		sent, err := a.sendEnvFiles(ctx, c, sandbox, repo, dir)
		if err != nil {
			return err
		}
		if len(sent.Files) == 0 { // nothing else has checked the sandbox
			if _, err := c.Sandbox(ctx, sandbox); agentlab.CodeOf(err) == agentlab.CodeNotFound {
				return err
			}
		}
		if err := excludeSent(ctx, c, sent); err != nil {
			return err
		}
		if len(sent.Files) == 0 {
			return a.done(sent, "no .env files to send")
		}
		return a.done(sent, "sent %s to %s: %s", agentlab.Plural(len(sent.Files), "file"), args[0], agentlab.WithoutControls(strings.Join(sent.Files, " ")))
	})
	return cmd
}
