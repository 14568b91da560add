package sandboxcmd

import (
	"context"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/internal/cli"
	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
	"github.com/agentlab-vm/agentlab/internal/work/transfer"
)

func cpCmd(a *cli.App) *cobra.Command {
	var opt transfer.Options
	cmd := &cobra.Command{
		Use: "cp SOURCE DESTINATION", Short: "Copy files between this machine and a sandbox", Args: cli.ExactArgs("SOURCE", "DESTINATION"),
		Long: `Copy a file or a directory between this machine and a sandbox. One of SOURCE and
DESTINATION is SANDBOX:PATH, or SESSION:PATH for the sandbox of a session, with a PATH
relative to the home of the user in the sandbox; write ./a:b for a local name with a
colon. The other is a local path, or - for standard input or output, with the content
of one file.

If DESTINATION is a directory, the source is copied into it. If SOURCE ends with /.,
the content of the directory is copied, and not the directory itself. Existing files
are replaced only with --force. Either everything is copied, or nothing: a copy that
is refused or interrupted changes nothing on this machine.

Files keep their permissions, except setuid, setgid and sticky bits; owners and times
are not copied. .git is not copied: it has configuration that runs programs, and
credentials. 'agentlab job fetch' and 'agentlab exec SANDBOX git' are for commits.

A guest is not trusted. Links that lead out of the directory that is copied, devices,
pipes, sockets and what makes a directory a git repository are left out and reported.
Files that programs of this machine execute or obey without a command, such as .envrc
and .vscode, must be confirmed; see 'git config agentlab.return' in 'agentlab sync
--help'. An archive with names outside of its
directory, or larger than --max-size, is refused.`,
		Example: `  agentlab cp play:report.html .
  agentlab cp play:/var/log/syslog - | less
  agentlab cp fixtures play:/tmp
  agentlab cp play:/tmp/out/. ./out --force
  pg_dump app | agentlab cp - play:app.sql`,
		ValidArgsFunction: func(cmd *cobra.Command, given []string, begin string) ([]cobra.Completion, cobra.ShellCompDirective) {
			return completeCopy(a, cmd, given, begin)
		},
	}
	flags := cmd.Flags()
	flags.StringVarP(&opt.User, "user", "u", "", "user in the sandbox (default agent)")
	flags.BoolVar(&opt.Force, "force", false, "replace existing files; with -, write binary data to a terminal")
	opt.Gib = 16
	cli.Between(flags, &opt.Gib, "max-size", 1, 1<<20, "limit of a copy from a sandbox, in GiB")
	cmd.RunE = a.RunE(func(ctx context.Context, c *client.Client, args []string) error {
		from, to := transfer.SplitCopy(args[0]), transfer.SplitCopy(args[1])
		switch {
		case from.Sandbox == "" && to.Sandbox == "":
			return work.UsageErrorf("neither %q nor %q is SANDBOX:PATH", args[0], args[1]).WithHint("name a sandbox: agentlab cp SANDBOX:PATH PATH")
		case from.Sandbox != "" && to.Sandbox != "":
			return work.UsageErrorf("both %q and %q are in a sandbox", args[0], args[1]).WithHint("copy to this machine first; or: agentlab cp %s - | agentlab cp - %s", args[0], args[1])
		case from.Path == "" || to.Path == "":
			return work.UsageErrorf("a path is empty").WithHint("write SANDBOX:. for the home directory")
		case strings.ContainsRune(from.Path+to.Path, 0):
			return work.UsageErrorf("a path contains a zero byte")
		}
		switch {
		case to.Sandbox != "":
			r, err := transfer.Push(ctx, a, c, a.Stdin, from.Path, to, opt)
			return finishCopy(a, r, err)
		case to.Path == "-" && a.JSON:
			return work.UsageErrorf("--json cannot be used with - as the destination")
		case to.Path == "-":
			return transfer.PullFile(ctx, c, from, opt, func(r io.Reader) error { return cli.CopyOut(a.Stdout, r, opt.Force) })
		}
		r, err := transfer.Pull(ctx, a, c, from, to.Path, opt)
		return finishCopy(a, r, err)
	})
	return cmd
}

// completeCopy completes the arguments of cp: names of sandboxes with a colon, and
// otherwise local files.
func completeCopy(a *cli.App, cmd *cobra.Command, given []string, begin string) ([]cobra.Completion, cobra.ShellCompDirective) {
	if len(given) > 1 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	names := a.Names(cmd.Context(), begin, cli.ListSandboxes, cli.ListSessions)
	for i, found := range names {
		name, about, _ := strings.Cut(found, "\t")
		names[i] = cobra.CompletionWithDesc(name+":", about)
	}
	return names, cobra.ShellCompDirectiveNoSpace
}

// finishCopy prints the result of a copy.
func finishCopy(a *cli.App, r transfer.Copied, err error) error {
	if err != nil {
		return err
	}
	if r.Skipped == nil {
		r.Skipped = []transfer.SkippedEntry{}
	}
	if !a.JSON {
		gitsafe.NoteNamed(a, r.Found)
		transfer.CopyNotes(a, r)
	}
	return a.Done(r, "copied %s to %s (%s, %s)", agentlab.WithoutControls(r.Source), agentlab.WithoutControls(r.Destination), agentlab.Plural(r.Files, "file"), work.ByteSize(r.Bytes))
}
