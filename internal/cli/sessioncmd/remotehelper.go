package sessioncmd

import (
	"context"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/agentlab-vm/agentlab/internal/cli"
	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/session"
)

// RemoteHelper is the name of the program that git runs for URLs with the scheme
// agentlab; see gitremote-helpers(7).
const RemoteHelper = "git-remote-agentlab"

// MainRemoteHelper runs git-remote-agentlab and returns its exit code; args do not
// include the program's name.
func MainRemoteHelper(args []string) int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	a := &cli.App{Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr}
	if err := serveGit(ctx, a, args); err != nil {
		a.PrintError(err)
		return cli.ExitCode(err)
	}
	return 0
}

// serveGit serves git for the remote that the arguments name.
func serveGit(ctx context.Context, a *cli.App, args []string) error {
	if len(args) != 2 {
		return work.UsageErrorf("%s is run by git, for remotes with URLs like agentlab://SESSION", RemoteHelper).
			WithHint("in a repository: git fetch agentlab://SESSION; 'agentlab start' adds the remote agentlab")
	}
	name := strings.TrimSuffix(strings.TrimPrefix(args[1], session.RemoteScheme), "/")
	gitDir := os.Getenv("GIT_DIR")
	if gitDir == "" {
		return work.UsageErrorf("GIT_DIR is not set").WithHint("run 'git fetch' instead of %s", RemoteHelper)
	}
	path, err := filepath.Abs(gitDir)
	if err != nil {
		return err
	}
	c, err := a.Connect(ctx)
	if err != nil {
		return err
	}
	return session.ServeRemote(ctx, a, c, name, path, a.Stdin, a.Stdout)
}
