package session

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"path"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/lfs"
	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
	"github.com/agentlab-vm/agentlab/internal/work/transfer"
)

// askChanges asks whether a new session gets the uncommitted changes, before anything is
// created.
func askChanges(ctx context.Context, ui work.UI, l Link, o *StartOptions) error {
	if l.Session != "" && !o.Fresh || o.WithChanges {
		return nil
	}
	env, err := gitsafe.DisableFilters(ctx, l.Path)
	if err != nil {
		return err
	}
	changed, err := changedNames(ctx, l.Path, env)
	if err == nil && len(changed.names) > 0 {
		o.WithChanges = ui.Confirm("Carry " + UncommittedFiles(len(changed.names)) + " into the sandbox?")
	}
	return err
}

// UncommittedFiles returns the phrase for n files with uncommitted changes.
func UncommittedFiles(n int) string { return agentlab.Plural(n, "file") + " with uncommitted changes" }

// carriedChanges returns a commit of the uncommitted changes that the user wants in
// the sandbox.
func carriedChanges(ctx context.Context, ui work.UI, l *Link, o StartOptions) (commit string, err error) {
	env, err := gitsafe.DisableFilters(ctx, l.Path)
	if err != nil {
		return "", err
	}
	changed, err := changedNames(ctx, l.Path, env)
	if err != nil {
		return "", err
	}
	names := changed.names
	if len(changed.filtered) > 0 {
		ui.Progressf("note: not in the sandbox, because their content depends on a filter of git: %s", work.JoinNames(changed.filtered))
	}
	if len(changed.nested) > 0 && o.WithChanges {
		ui.Progressf("note: not in the sandbox, because they are repositories of their own: %s", work.JoinNames(changed.nested))
	}
	if len(names) == 0 {
		if o.WithChanges {
			ui.Progressf("note: there are no uncommitted changes to carry")
		}
		return "", nil
	}
	commit, err = commitChanges(ctx, l.Path, env, names)
	if err != nil {
		return "", err
	}
	if o.WithChanges {
		ui.Progressf("carrying %s into the sandbox; they also stay here", UncommittedFiles(len(names)))
		return commit, nil
	}
	tree, err := gitsafe.Git(ctx, l.Path, "rev-parse", "--verify", commit+"^{tree}")
	if err == nil && l.Key(ctx, carriedKey) != tree {
		ui.Progressf("note: the sandbox does not have %s\n  → commit them, or carry them: agentlab start --with-changes", UncommittedFiles(len(names)))
	}
	return "", err
}

// changedFiles are the files of a work tree with uncommitted changes.
type changedFiles struct {
	names []string
	// filtered have a filter that is configured: without the filter, which is not run, git
	// would take the file of the work tree for the content, such as a secret that the
	// filter encrypts.
	filtered []string
	// nested are untracked directories with repositories of their own. Git would store
	// them as submodules that cannot be fetched.
	nested []string
}

// changedNames returns the files with uncommitted changes, without those that are not sent
// as changes: untracked environment files, which transfer.SendEnvFiles sends, and what
// .agentlabignore names. env disables the filters.
func changedNames(ctx context.Context, path string, env []string) (got changedFiles, err error) {
	in := gitsafe.Command{Env: env, Raw: true}
	status, err := in.Run(ctx, path, "status", "--porcelain", "-z", "--no-renames", "--untracked-files=all", "--ignore-submodules=all")
	if err != nil {
		return got, err
	}
	var all, untracked []string
	for line := range strings.SplitSeq(status, "\x00") {
		switch {
		case len(line) <= 3:
		case strings.HasPrefix(line, "??") && !strings.HasSuffix(line, "/"):
			untracked = append(untracked, line[3:])
		case strings.HasSuffix(line, "/"):
			got.nested = append(got.nested, line[3:])
		default:
			all = append(all, line[3:])
		}
	}
	if len(untracked) > 0 {
		if untracked, err = withoutUnsent(ctx, path, untracked); err != nil {
			return got, err
		}
		all = append(all, untracked...)
	}
	if len(all) == 0 {
		return got, nil
	}
	in.Stdin = strings.NewReader(strings.Join(all, "\x00") + "\x00")
	attrs, err := in.Run(ctx, path, "check-attr", "-z", "--stdin", "filter")
	if err != nil {
		return got, err
	}
	fields := strings.Split(attrs, "\x00") // name, "filter" and the value, of each file
	for i := 0; i+2 < len(fields); i += 3 {
		clean := "filter." + fields[i+2] + ".clean"
		has := false
		for _, kv := range env {
			has = has || strings.HasSuffix(kv, "="+clean)
		}
		if has {
			got.filtered = append(got.filtered, fields[i])
		} else {
			got.names = append(got.names, fields[i])
		}
	}
	if len(got.filtered) > 0 {
		got.filtered, err = lfs.WithoutObjects(gitsafe.LFSGit(ctx, path), path, got.filtered)
	}
	return got, err
}

// withoutUnsent returns the untracked files without environment files and what
// .agentlabignore names.
func withoutUnsent(ctx context.Context, path string, untracked []string) ([]string, error) {
	env, err := transfer.ListFiles(ctx, path, []string{"--exclude-standard"}, transfer.EnvPatterns)
	if err != nil {
		return nil, err
	}
	ignored, err := transfer.IgnoredNames(ctx, path, untracked)
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(untracked, func(name string) bool { return ignored[name] || slices.Contains(env, name) }), nil
}

// commitChanges makes a commit of changed files on top of HEAD, with a copy of the index:
// the index, branches and files do not change. The copy has what git knows about all
// other files, so that it does not take them for changed ones, such as those of which the
// user hides the local version (skip-worktree).
func commitChanges(ctx context.Context, path string, env, names []string) (commit string, err error) {
	dir, remove, err := gitsafe.TempDir("agentlab-changes-*")
	if err != nil {
		return "", err
	}
	defer remove()
	index, err := gitsafe.CopyIndex(ctx, path, filepath.Join(dir, "index"))
	if err != nil {
		return "", err
	}
	in := gitsafe.Command{Env: slices.Concat(env, gitsafe.OwnIdentity(), index, []string{"GIT_LITERAL_PATHSPECS=1"})}
	known, err := gitsafe.Command{Env: in.Env, Raw: true}.Run(ctx, path, "ls-files", "-z", "--cached")
	if err != nil {
		return "", err
	}
	indexed := map[string]bool{}
	for name := range strings.SplitSeq(known, "\x00") {
		indexed[name] = true
	}
	var list strings.Builder
	for _, name := range names {
		// A file whose removal is staged is unknown to git add.
		if _, err := os.Lstat(filepath.Join(path, name)); err == nil || indexed[name] {
			list.WriteString(name + "\x00")
		}
	}
	if list.Len() > 0 {
		add := in
		add.Stdin = strings.NewReader(list.String())
		if _, err := add.Run(ctx, path, "update-index", "--add", "--remove", "--replace", "-z", "--stdin"); err != nil {
			return "", err
		}
	}
	tree, err := in.Run(ctx, path, "write-tree")
	if err != nil {
		return "", err
	}
	return in.Run(ctx, path, "commit-tree", tree, "-p", "HEAD", "-m", "Uncommitted changes")
}

// ExcludeSent has git in a session ignore the environment files that were sent to its
// repository. Other sandboxes have none.
func ExcludeSent(ctx context.Context, c *client.Client, sent transfer.SentEnvFiles) error {
	if in := path.Clean(sent.Directory); in != guestapi.RepoDir && in != guestapi.ProjectDir {
		return nil
	}
	r := Repo{C: c, Sandbox: sent.Sandbox}
	st, err := r.State(ctx)
	if err != nil || len(st.Worktrees) == 0 {
		return nil //nolint:nilerr // it has no repository of a session
	}
	return r.CallJSON(ctx, guestapi.RepoInit{Branch: st.Worktrees[0].Branch, Exclude: sent.Files}, nil, "init")
}
