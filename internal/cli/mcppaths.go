package cli

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/config"
	"github.com/agentlab-vm/agentlab/internal/returncheck"
	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
	"github.com/agentlab-vm/agentlab/internal/work/transfer"
)

// mcpPlace is what tools may use of this machine.
type mcpPlace struct {
	root string   // without links
	own  []string // directories of AgentLab, without links
}

// newMCPPlace returns the place of --root. The current directory is only its default if
// it looks like the directory of a project: clients start servers anywhere.
func newMCPPlace(root string, paths config.Paths) (mcpPlace, error) {
	dir, err := filepath.Abs(root)
	if err == nil {
		dir, err = filepath.EvalSymlinks(dir)
	}
	if err != nil {
		return mcpPlace{}, work.UsageErrorf("--root: %v", err)
	}
	at := mcpPlace{root: dir}
	for _, own := range []string{paths.Config, paths.State, paths.Cache, paths.Run, paths.Log} {
		at.own = append(at.own, withoutLinks(own))
	}
	if home, err := os.UserHomeDir(); root == "" && (dir == "/" || err == nil && isBelow(withoutLinks(home), dir)) {
		return mcpPlace{}, work.UsageErrorf("tools could use every file in %s, the current directory", dir).
			WithHint("choose the directory with your repositories: agentlab mcp --root DIR")
	}
	return at, nil
}

// withoutLinks resolves the links of a path, as far as it exists.
func withoutLinks(path string) string {
	if at, err := filepath.EvalSymlinks(path); err == nil {
		return at
	}
	if dir := filepath.Dir(path); dir != path {
		return filepath.Join(withoutLinks(dir), filepath.Base(path))
	}
	return path
}

// isBelow reports whether a path without links is dir or in it.
func isBelow(path, dir string) bool {
	rel, err := filepath.Rel(dir, path)
	return err == nil && filepath.IsLocal(rel)
}

// check checks an argument of a tool. It returns the absolute path of one that names a
// file of this machine, and others as they are. Tools write no files here, so a path
// cannot become another one between the check and its use by another tool.
func (p mcpPlace) check(ctx context.Context, tool, name, value string) (string, error) {
	if value == "" {
		return "", work.UsageErrorf("%s must not be empty", paramName(name))
	}
	switch name {
	case "destination":
		if transfer.SplitCopy(value).Sandbox == "" {
			return "", work.UsageErrorf("destination must be SANDBOX:PATH")
		}
		return value, nil
	case "source":
		return p.file(value)
	case "repo":
		if tool == "job run" && strings.Contains(value, "://") {
			return value, work.Usage(agentlab.ValidateRepoURL(value))
		}
		return p.repo(ctx, value)
	}
	return value, nil
}

// file returns the absolute path of a file or directory below the root.
func (p mcpPlace) file(value string) (string, error) {
	path := value
	if !filepath.IsAbs(path) {
		path = filepath.Join(p.root, path)
	}
	at, err := filepath.EvalSymlinks(path)
	if err != nil {
		return "", agentlab.Errorf(agentlab.CodeInvalid, "%w", err)
	}
	if err := p.allows(at); err != nil {
		return "", err
	}
	if strings.HasSuffix(value, "/.") { // the content of a directory
		at += "/."
	}
	return at, nil
}

// allows returns an error for a path without links that tools must not use.
func (p mcpPlace) allows(at string) error {
	if !isBelow(at, p.root) {
		return p.outside(at, "")
	}
	rel, _ := filepath.Rel(p.root, at) // as in isBelow
	if slices.ContainsFunc(strings.Split(rel, string(filepath.Separator)), returncheck.GitDir) {
		return agentlab.Errorf(agentlab.CodeDenied, "%s is in a directory of git", at)
	}
	for _, own := range p.own {
		if isBelow(at, own) || isBelow(own, at) {
			return agentlab.Errorf(agentlab.CodeDenied, "%s has files of AgentLab, among them secrets", at)
		}
	}
	return nil
}

func (p mcpPlace) outside(at, why string) error {
	return agentlab.Errorf(agentlab.CodeDenied, "%s is not below %s%s", at, p.root, why).
		WithHint("the user can start the server with another directory: agentlab mcp --root DIR")
}

// repo returns the top directory of a work tree that is below the root with everything
// that git uses of it: git looks for a repository in the directories above too, and a
// repository can name others.
func (p mcpPlace) repo(ctx context.Context, value string) (string, error) {
	path, err := p.file(value)
	if err != nil {
		return "", err
	}
	out, err := gitsafe.Git(ctx, path, "rev-parse", "--path-format=absolute", "--show-toplevel", "--git-dir", "--git-common-dir", "--git-path", "objects")
	lines := strings.Split(strings.TrimSpace(out), "\n")
	if err != nil || len(lines) != 4 {
		return "", agentlab.Errorf(agentlab.CodeInvalid, "%s is not the work tree of a git repository", value).WithField("repo")
	}
	top, of := withoutLinks(lines[0]), "the repository "+value
	if err := p.allows(top); err != nil {
		return "", err
	}
	for _, dir := range []string{withoutLinks(lines[1]), withoutLinks(lines[2])} {
		if !isBelow(dir, p.root) {
			return "", p.outside(dir, ", and "+of+" uses it")
		}
	}
	return top, p.objects(lines[3], of)
}

// objects checks the directory with the objects of a repository.
func (p mcpPlace) objects(dir, of string) error {
	dir = withoutLinks(dir)
	if !isBelow(dir, p.root) {
		return p.outside(dir, ", and "+of+" uses it")
	}
	borrows, err := os.ReadFile(filepath.Join(dir, "info", "alternates"))
	switch {
	case os.IsNotExist(err):
		return nil
	case err == nil && strings.TrimSpace(string(borrows)) != "":
		return agentlab.Errorf(agentlab.CodeDenied, "%s borrows objects of another repository", of).
			WithHint("the user can copy them: git repack -a -d; rm .git/objects/info/alternates")
	}
	return err
}

// Sends checks a repository with the submodules that are sent with it. A file .git in a
// submodule can name any repository.
func (p mcpPlace) Sends(src gitsafe.LocalCommit) error {
	err := p.objects(src.Objects, "the repository "+src.Path)
	for _, m := range src.Modules {
		if err == nil {
			err = p.objects(m.Objects, "the submodule "+m.Path)
		}
	}
	return err
}
