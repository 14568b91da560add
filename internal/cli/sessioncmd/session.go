package sessioncmd

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/internal/cli"
	"github.com/agentlab-vm/agentlab/internal/cli/sandboxcmd"
	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
	"github.com/agentlab-vm/agentlab/internal/work/project"
	"github.com/agentlab-vm/agentlab/internal/work/session"
)

func sessionCmd(a *cli.App) *cobra.Command {
	cmd := &cobra.Command{
		Use: "session", Short: "Manage sessions: workspaces with a sandbox that comes and goes",
		Long: `Manage sessions. A session is a name for a workspace and the sandbox that currently
uses it. Its sandbox can be destroyed at any time: 'agentlab session resume' creates
another one, with the same workspace at /work. A session is named by its ID or name.`,
		Example: `  agentlab session create fix-12 --size 40
  agentlab session resume fix-12 && agentlab ssh fix-12
  agentlab job run --repo . --task "Fix issue 12" --session fix-12`,
	}
	cmd.AddCommand(sessionCreateCmd(a), sessionListCmd(a), sessionShowCmd(a), sessionResumeCmd(a), sessionStopCmd(a),
		sessionForkCmd(a), sessionBranchCmd(a), sessionRenameCmd(a), sessionDeleteCmd(a), a.DoctorOf("session", (*client.Client).SessionDoctor))
	return cmd
}

func sessionCreateCmd(a *cli.App) *cobra.Command {
	var r api.SessionCreate
	var w cli.WorkspaceChoice
	cmd := &cobra.Command{
		Use: "create NAME", Short: "Create a session and its workspace",
		Long: `Create a session. Its workspace is a new one with the same name, unless --workspace
names another one.`,
		Example: "  agentlab session create fix-12 --profile interactive-dev --size 80",
	}
	setName := cli.NameOrFlag(cmd, &r.Name, "session")
	flags := cmd.Flags()
	flags.StringVar(&r.Profile, "profile", "", "profile of its sandboxes and jobs (see 'agentlab profile list')")
	cli.BackendFlag(flags, &r.Backend, "its workspace and sandboxes (default: the one of the workspace, or the profile's, or the configured default)")
	flags.StringVar(&r.Branch, "branch", "", "Git branch that its jobs work on")
	flags.StringVar(&w.Name, "workspace", "", "workspace: ID, name, or new:NAME (default: a new one with the name of the session)")
	flags.Func("size", "size of a new workspace in GiB (default: 20)", cli.GibFlag(&w.SizeGB))
	flags.StringVar(&w.Storage, "storage", "", "storage of a new workspace, one of the backend's (default: the configured one)")
	cmd.RunE = a.RunE(func(ctx context.Context, c *client.Client, args []string) (err error) {
		setName(args)
		if w.Name == "" {
			r.WorkspaceCreate = &api.WorkspaceNew{SizeGB: w.SizeGB, Storage: w.Storage}
		} else if (w.SizeGB != 0 || w.Storage != "") && !strings.HasPrefix(w.Name, "new:") {
			return work.UsageErrorf("--size and --storage are for a new workspace").WithHint("use --workspace new:%s, or remove them", w.Name)
		} else if r.WorkspaceSelection, err = w.Selection("", ""); err != nil {
			return err
		}
		s, err := c.CreateSession(ctx, r)
		if err == nil {
			err = sessionWorkspace(ctx, a, c, s)
		}
		if err != nil {
			return err
		}
		return a.Done(s, "session %s has workspace %s\n  → agentlab session resume %s", s.Name, s.WorkspaceID, s.Name)
	})
	return cmd
}

// sessionWorkspace waits until the workspace of a new session has been created.
func sessionWorkspace(ctx context.Context, a *cli.App, c *client.Client, s api.Session) error {
	after, err := work.LastEvent(ctx, c, "")
	if err != nil {
		return err
	}
	w, err := c.Workspace(ctx, s.WorkspaceID)
	if err == nil && w.State == string(agentlab.WorkspaceCreating) {
		w, err = work.WaitWorkspace(ctx, a, c, w, after, []agentlab.WorkspaceState{agentlab.WorkspaceReady})
	}
	if err == nil && w.State == string(agentlab.WorkspaceFailed) {
		err = agentlab.Errorf(agentlab.CodeUnavailable, "workspace %s is %s: %s", w.Name, w.State, agentlab.WithoutControls(w.Reason))
	}
	if err != nil {
		return agentlab.Errorf(agentlab.CodeOf(err), "session %s has no usable workspace: %w", s.Name, err).
			WithHint("remove the cause, delete the session, and create it again: agentlab session delete %s", s.Name)
	}
	return nil
}

func sessionListCmd(a *cli.App) *cobra.Command {
	var linked map[string]string
	fetch := func(ctx context.Context, c *client.Client, _ []string) (api.List[api.Session], error) {
		linked = session.LinkedBranches(ctx)
		return c.Sessions(ctx)
	}
	return cli.Query(a, "list", "List sessions", cli.ExactArgs(), fetch, func(list api.List[api.Session]) error {
		// Most sessions are for no branch: their agents work on the one that they like.
		branch := func(s api.Session) string { return cmp.Or(s.Branch, linked[s.ID]) }
		head := []any{"NAME", "ID", "SANDBOX", "STATE", "PROFILE", "WORKSPACE", "AGE"}
		some := slices.ContainsFunc(list.Items, func(s api.Session) bool { return branch(s) != "" })
		if some {
			head = slices.Insert(head, 4, "BRANCH")
		}
		t := cli.NewTable(a.Stdout, head...)
		for _, s := range list.Items {
			row := []any{s.Name, s.ID, cli.OrDash(s.Sandbox), cli.OrDash(s.State), s.Profile, s.WorkspaceID, a.Age(s.CreatedAt)}
			if some {
				row = slices.Insert(row, 4, any(cli.OrDash(branch(s))))
			}
			t.Row(row...)
		}
		return t.Flush()
	})
}

func sessionShowCmd(a *cli.App) *cobra.Command {
	return cli.Query(a, "show SESSION", "Show a session and its history", cli.ExactArgs("SESSION"), cli.One((*client.Client).Session), func(s api.Session) error {
		t := cli.NewTable(a.Stdout, "Session:", s.Name)
		for _, r := range [][2]string{
			{"ID:", s.ID}, {"Profile:", s.Profile}, {"Image:", s.Image}, {"Workspace:", s.WorkspaceID}, {"Branch:", s.Branch}, {"Sandbox:", s.Sandbox},
			{"State:", s.State}, {"Created:", work.LocalTime(s.CreatedAt)},
		} {
			t.Optional(r[0], r[1])
		}
		if err := t.Flush(); err != nil || len(s.History) == 0 {
			return err
		}
		fmt.Fprintln(a.Stdout)
		t = cli.NewTable(a.Stdout, "SANDBOX", "VMID", "JOB", "CREATED")
		for _, h := range s.History {
			t.Row(h.Sandbox, strconv.Itoa(h.SandboxVMID), cli.OrDash(h.JobID), work.LocalTime(h.CreatedAt))
		}
		return t.Flush()
	})
}

// resumeFlags has the flags of the commands that resume a session.
type resumeFlags struct {
	ttl             time.Duration
	keepalive, wait bool
}

func (f *resumeFlags) add(cmd *cobra.Command) {
	cmd.Flags().Var(cli.DurationFlag(&f.ttl, agentlab.MaxTTL), "ttl", "duration of the lease of a new sandbox, e.g. 4h (default: the profile's)")
	cmd.Flags().BoolVar(&f.keepalive, "keepalive", false, "stop a new sandbox at the end of its lease, instead of destroying it (default: the profile's)")
	cli.WaitFlag(cmd, &f.wait, "wait until the sandbox is ready")
}

// resumeSession continues a session and prints its sandbox.
func resumeSession(ctx context.Context, a *cli.App, c *client.Client, cmd *cobra.Command, name string, f resumeFlags) error {
	r := api.SessionResume{TTLMinutes: int(f.ttl / time.Minute)}
	if cmd.Flags().Changed("keepalive") {
		r.Keepalive = &f.keepalive
	}
	after := work.LastSessionEvent(ctx, c, name)
	sb, err := c.ResumeSession(ctx, name, r)
	if err == nil && f.wait && !work.IsUp(sb) {
		sb, err = work.WaitSandbox(ctx, a, c, sb, after, work.IsUp)
	}
	if err != nil {
		return err
	}
	return sandboxcmd.PrintSandbox(a, sb)
}

func sessionResumeCmd(a *cli.App) *cobra.Command {
	var f resumeFlags
	cmd := &cobra.Command{
		Use: "resume SESSION", Short: "Continue a session", Args: cli.ExactArgs("SESSION"),
		Long: `Continue a session: start or resume its sandbox if that is stopped or suspended, and
create one if it has none. The sandbox mounts the workspace of the session at /work.`,
		Example: "  agentlab session resume fix-12 --ttl 8h && agentlab ssh fix-12",
	}
	f.add(cmd)
	cmd.RunE = a.RunE(func(ctx context.Context, c *client.Client, args []string) error {
		return resumeSession(ctx, a, c, cmd, args[0], f)
	})
	return cmd
}

func sessionStopCmd(a *cli.App) *cobra.Command {
	var suspend, wait bool
	cmd := &cobra.Command{
		Use: "stop SESSION", Short: "Destroy the sandbox of a session, or suspend it to disk", Args: cli.ExactArgs("SESSION"),
		Long: `Destroy the sandbox of a session. What is on the workspace stays. With --suspend the
sandbox is suspended to disk instead: resume continues its processes. If it is stopped
then, or its lease ends, its processes are lost and its files are not.`,
	}
	cmd.Flags().BoolVar(&suspend, "suspend", false, "suspend the sandbox to disk; not every backend can")
	cli.WaitFlag(cmd, &wait, "wait until the sandbox is destroyed or suspended")
	cmd.RunE = a.RunE(func(ctx context.Context, c *client.Client, args []string) error {
		done := work.IsDestroyed
		if suspend {
			done = work.IsOnDisk
		}
		after := work.LastSessionEvent(ctx, c, args[0])
		sb, err := c.StopSession(ctx, args[0], suspend)
		if err == nil && wait && !done(sb) {
			sb, err = work.WaitSandbox(ctx, a, c, sb, after, done)
		}
		if err != nil {
			return err
		}
		return a.Done(sb, "session %s is stopped: sandbox %s is %s", args[0], sb.Name, sb.State)
	})
	return cmd
}

func sessionForkCmd(a *cli.App) *cobra.Command {
	var r api.SessionFork
	cmd := &cobra.Command{
		Use: "fork SESSION --name NAME", Short: "Create a session with a copy of a workspace", Args: cli.ExactArgs("SESSION"),
		Long: `Create a session whose workspace is a copy of that of another session. The other one
must have no sandbox, unless a snapshot is copied: 'agentlab workspace snapshot create'
saves one while it runs, with --attached.`,
		Example: `  agentlab session fork fix-12 --name trial
  agentlab session fork fix-12 --name trial --from-snapshot clean`,
	}
	cmd.Flags().StringVar(&r.Name, "name", "", "name of the new session")
	cmd.Flags().StringVar(&r.FromSnapshot, "from-snapshot", "", "snapshot of the workspace to copy (default: the current content)")
	_ = cmd.MarkFlagRequired("name")
	cmd.RunE = a.RunE(func(ctx context.Context, c *client.Client, args []string) error {
		s, err := c.ForkSession(ctx, args[0], r)
		if err != nil {
			return forkHint(ctx, c, args[0], r, err)
		}
		return a.Done(s, "session %s has workspace %s, a copy", s.Name, s.WorkspaceID)
	})
	return cmd
}

// forkHint adds to the error of a fork how to copy the workspace of a session with a sandbox.
func forkHint(ctx context.Context, c *client.Client, session string, r api.SessionFork, err error) error {
	if agentlab.CodeOf(err) != agentlab.CodeConflict || r.FromSnapshot != "" {
		return err
	}
	s, serr := c.Session(ctx, session)
	if serr != nil || s.Sandbox == "" {
		return err
	}
	return agentlab.Errorf(agentlab.CodeConflict, "%w", err).
		WithHint("stop it first: agentlab session stop %[1]s; or copy a snapshot while it runs: agentlab workspace snapshot create %[2]s --name %[3]s --attached frozen, then agentlab session fork %[1]s --name %[3]s --from-snapshot %[3]s", s.Name, s.WorkspaceID, r.Name)
}

func sessionBranchCmd(a *cli.App) *cobra.Command {
	var f resumeFlags
	var profile string
	cmd := &cobra.Command{
		Use: "branch BRANCH", Short: "Continue the session of a Git branch, or create it", Args: cli.ExactArgs("BRANCH"),
		Long: `Continue the session of a Git branch. If there is none, create it, with a new
workspace: both are named like the branch. Jobs of the session work on the branch. In
a Git repository it is the session of a branch of that repository, and its name has
the name of the directory and a hash, too.`,
		Example: "  agentlab session branch feature/login",
	}
	cmd.Flags().StringVar(&profile, "profile", "", "profile of a new session")
	f.add(cmd)
	cmd.RunE = a.RunE(func(ctx context.Context, c *client.Client, args []string) error {
		repo := ""
		if _, err := gitsafe.Git(ctx, ".", "rev-parse", "--git-dir"); err == nil {
			repo = "."
		}
		image := ""
		if commit, err := gitsafe.Git(ctx, ".", "rev-parse", "--verify", "--quiet", "HEAD^{commit}"); err == nil {
			image = project.Of(ctx, a, ".", commit).Image
		}
		s, err := session.OfBranch(ctx, a, c, repo, api.SessionCreate{Branch: args[0], Profile: profile, Image: image})
		if err != nil {
			return project.ImageError(err, image != "")
		}
		if profile != "" && s.Profile != profile {
			a.Progressf("note: session %s keeps its profile %s: --profile is for new sessions", s.Name, s.Profile)
		}
		return resumeSession(ctx, a, c, cmd, s.ID, f)
	})
	return cmd
}

func sessionRenameCmd(a *cli.App) *cobra.Command {
	cmd := &cobra.Command{Use: "rename SESSION NAME", Short: "Change the name of a session", Args: cli.ExactArgs("SESSION", "NAME")}
	cmd.RunE = a.RunE(func(ctx context.Context, c *client.Client, args []string) error {
		s, err := c.RenameSession(ctx, args[0], args[1])
		if err != nil {
			return err
		}
		return a.Done(s, "session %s has the name %s", s.ID, s.Name)
	})
	return cmd
}

func sessionDeleteCmd(a *cli.App) *cobra.Command {
	var keep, yes bool
	cmd := &cobra.Command{
		Use: "delete SESSION", Short: "Delete a session, and move its workspace to the trash", Args: cli.ExactArgs("SESSION"),
		Long: `Delete a session and move its workspace to the trash, from which 'agentlab workspace
undelete' returns it. A session with a sandbox must be stopped first. The command asks
for confirmation, unless it gets --yes.`,
	}
	cmd.Flags().BoolVar(&keep, "keep-workspace", false, "do not move the workspace to the trash")
	cmd.Flags().BoolVar(&yes, "yes", false, "do not ask for confirmation")
	cmd.RunE = a.RunE(func(ctx context.Context, c *client.Client, args []string) error {
		s, err := c.Session(ctx, args[0])
		if err != nil {
			return err
		}
		question := fmt.Sprintf("Delete session %s and move its workspace to the trash?", args[0])
		if keep {
			question = fmt.Sprintf("Delete session %s?", args[0])
		}
		if !yes && !a.Confirm(question) {
			return work.UsageErrorf("session %s not deleted: not confirmed", args[0]).WithHint("delete it without confirmation with --yes")
		}
		if err := c.DeleteSession(ctx, s.ID, keep); err != nil {
			return err
		}
		if keep {
			return a.Done(struct{}{}, "session %s is deleted; its workspace %s is kept", s.Name, s.WorkspaceID)
		}
		w, err := c.Workspace(ctx, s.WorkspaceID)
		if agentlab.CodeOf(err) == agentlab.CodeNotFound || err == nil && w.State == string(agentlab.WorkspaceDeleting) {
			return a.Done(struct{}{}, "session %s is deleted, and its workspace, which was never READY and had no content", s.Name)
		}
		return a.Done(struct{}{}, "session %s is deleted; its workspace is in the trash\n  → agentlab workspace undelete %s", s.Name, s.WorkspaceID)
	})
	return cmd
}
