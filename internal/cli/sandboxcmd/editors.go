package sandboxcmd

import (
	"context"
	"fmt"
	"net/url"
	"os/exec"
	"strings"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/cli"
	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
	"github.com/agentlab-vm/agentlab/internal/work/session"
)

// editor is a program of this machine that works on files of a sandbox over ssh.
type editor struct {
	name, title string
	programs    []string                      // the first that is installed; none means that of the desktop for the URL
	argument    func(host, dir string) string // its argument
	// runs means that the remote side can run programs on this machine, as the vendor says.
	runs bool
}

var editors = []editor{
	{name: "vscode", title: "VS Code", programs: []string{"code"}, argument: vscodeFolder, runs: true},
	{name: "cursor", title: "Cursor", programs: []string{"cursor"}, argument: vscodeFolder, runs: true},
	{name: "zed", title: "Zed", programs: []string{"zed", "zeditor"}, argument: func(host, dir string) string {
		return (&url.URL{Scheme: "ssh", User: url.User("agent"), Host: host, Path: dir}).String()
	}},
	{name: "jetbrains", title: "JetBrains Gateway", argument: func(host, dir string) string {
		q := url.Values{"type": {"ssh"}, "host": {host}, "port": {"22"}, "user": {"agent"}, "projectPath": {dir}}
		return "jetbrains-gateway://connect#" + q.Encode()
	}},
}

// vscodeFolder names a folder as such: VS Code cannot look at a path to find out.
func vscodeFolder(host, dir string) string {
	return "--folder-uri=" + (&url.URL{Scheme: "vscode-remote", Host: "ssh-remote+" + host, Path: dir}).String()
}

// command returns the command line that opens a directory.
func (e editor) command(host, dir string) ([]string, error) {
	if len(e.programs) == 0 {
		return []string{desktopOpener(), e.argument(host, dir)}, nil
	}
	for _, p := range e.programs {
		if _, err := exec.LookPath(p); err == nil {
			return []string{p, e.argument(host, dir)}, nil
		}
	}
	return nil, agentlab.Errorf(agentlab.CodeUnavailable, "%s is not installed: there is no program %s in PATH", e.title, strings.Join(e.programs, " or ")).
		WithHint("install it, or its command line from its menu; or connect another editor to %s", host)
}

func openEditorCmd(a *cli.App, e editor) *cobra.Command {
	var show, yes bool
	cmd := &cobra.Command{
		Use: e.name + " [SESSION[/WORKTREE]|BRANCH|SANDBOX]", Short: "Open a session or sandbox in " + e.title, Args: cobra.MaximumNArgs(1),
		Long: "Open the repository of a session, by default that of this repository, in " + e.title + `, over
ssh. The session is started if it does not run. The first time, the command asks whether
it may configure OpenSSH (see 'agentlab ssh-config').`,
	}
	if e.runs {
		cmd.Long += `

Warning: ` + e.title + ` trusts the machine that it connects to. Its vendor says that a compromised
one could run programs on yours. AgentLab cannot prevent that: do not open a sandbox in
` + e.title + ` whose agent you do not trust. See docs/editors.md.`
	}
	cmd.Flags().BoolVar(&show, "print", false, "print the command instead of running it")
	cmd.Flags().BoolVar(&yes, "yes", false, "do not ask for confirmation")
	cmd.RunE = a.RunE(func(ctx context.Context, c *client.Client, args []string) error {
		host, dir, err := editorTarget(ctx, a, c, cli.FirstOf(args))
		if err != nil {
			return err
		}
		if show {
			return printCommand(a, e, host, dir)
		}
		argv, err := e.command(host, dir)
		if err != nil {
			return err
		}
		f, err := newSSHFiles()
		if err != nil {
			return err
		}
		if e.runs && !f.installed() {
			a.Progressf("warning: %s trusts the machine that it connects to: a compromised one could run programs here (docs/editors.md)", e.title)
		}
		if err := installSSH(a, f, yes); err != nil {
			return err
		}
		if out, err := exec.CommandContext(ctx, argv[0], argv[1:]...).CombinedOutput(); err != nil {
			return agentlab.Errorf(agentlab.CodeUnavailable, "%s failed: %w: %s", strings.Join(argv, " "), err, agentlab.WithoutControls(gitsafe.LastLine(string(out))))
		}
		return a.Done(map[string]any{"command": argv, "host": host, "dir": dir}, "opened %s of %s in %s", dir, host, e.title)
	})
	return cmd
}

// printCommand prints the command of an editor that need not be installed.
func printCommand(a *cli.App, e editor, host, dir string) error {
	argv, err := e.command(host, dir)
	if err != nil {
		argv = []string{e.programs[0], e.argument(host, dir)}
	}
	return a.Emit(map[string]any{"command": argv, "host": host, "dir": dir}, func() error {
		_, err := fmt.Fprintln(a.Stdout, argv[0], work.ShellQuote(argv[1]))
		return err
	})
}

// editorTarget returns the host of a session or sandbox in the configuration of OpenSSH,
// and the directory to open.
func editorTarget(ctx context.Context, a *cli.App, c *client.Client, arg string) (host, dir string, err error) {
	t, err := session.ChooseTarget(ctx, a, c, arg)
	switch {
	case err != nil:
		return "", "", err
	case t.Sandbox != "":
		return t.Sandbox + sshSuffix, guestapi.AgentHome, nil
	}
	sb, err := session.Resume(ctx, a, c, t.Session, 0)
	if err != nil {
		return "", "", err
	}
	dir, err = session.WorkDir(ctx, c, t.Session, sb, t.Link, t.Worktree)
	return t.Session.Name + sshSuffix, dir, err
}
