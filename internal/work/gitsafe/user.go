package gitsafe

import (
	"context"
	"os/exec"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/work"
)

// UsersGit runs git as the user does: with the user's credentials and configuration. It
// is not for anything that a guest has sent.
func UsersGit(ctx context.Context, ui work.UI, args ...string) error {
	path, err := NeedProgram("git", "clones repositories")
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, path, args...)
	ui.Attach(cmd)
	return cmd.Run()
}

// NeedProgram returns the path of a program, or how to install it.
func NeedProgram(name, why string) (string, error) {
	path, err := exec.LookPath(name)
	if err != nil {
		return "", agentlab.Errorf(agentlab.CodeUnavailable, "%s is not installed; it %s", name, why).
			WithHint("install it, e.g. with: sudo apt install %[1]s, or: brew install %[1]s", name)
	}
	return path, nil
}
