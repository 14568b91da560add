package cli

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/projectfile"
	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/attach"
	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
	"github.com/agentlab-vm/agentlab/internal/work/guestrun"
	"github.com/agentlab-vm/agentlab/internal/work/session"
	"github.com/agentlab-vm/agentlab/internal/work/transfer"
)

// interactiveAgents are the agents with a terminal interface. Each is a command.
var interactiveAgents = []string{"claude", "codex", "opencode", "gemini"}

// startOptions has the flags of 'agentlab start' and of the agents' commands.
type startOptions struct {
	path, agent, profile, backend string
	image                         string // of a new session; "" means that of the repository, or else the profile's
	noSetup                       bool
	terminal, run                 string // name and first command of the terminal
	multiplexer                   string // "" means the one of the session or the profile
	branch, worktree              string
	fresh, detach, resume, yes    bool
	shell                         bool // show a shell, whatever the terminal shows
	main                          bool // the session of the repository, whatever branch is checked out
	withChanges                   bool
	noEnv                         bool
	ttl                           time.Duration
	args                          []string // of the agent
	sync                          string
	userName, userEmail           string // of commits; "" means the agent's
	devcontainer                  string
}

// shellOnly is the value of --agent for a shell instead of an agent.
const shellOnly = "none"

func (o *startOptions) add(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&o.profile, "profile", "", "profile of a new session (default: git config agentlab.profile, or session_profile in config.yaml; with --fresh that of the old session; see 'agentlab profile list')")
	f.StringVar(&o.image, "image", "", "image of a new session (default: image in .agentlab.yaml of the repository, or else the profile's)")
	f.BoolVar(&o.noSetup, "no-setup", false, "do not run the commands under setup in .agentlab.yaml of the repository")
	backendFlag(f, &o.backend, "a new session (default: the profile's, or the configured default)")
	f.StringVar(&o.branch, "branch", "", "use the session of this branch, with its own VM, and check the branch out in it")
	f.StringVar(&o.worktree, "worktree", "", "work in the work tree of this branch, in the VM of the session; it is created if it is missing")
	f.BoolVar(&o.fresh, "fresh", false, "delete the session with its sandbox first, and start a new one")
	f.BoolVar(&o.yes, "yes", false, "with --fresh: delete without confirmation")
	f.BoolVar(&o.detach, "detach", false, "do not attach to the terminal")
	f.BoolVar(&o.resume, "resume", false, "continue the last conversation of the agent")
	f.BoolVar(&o.noEnv, "no-env", false, "do not send the files .env, .env.* and .envrc that git does not track (see 'agentlab sync-env')")
	f.BoolVar(&o.withChanges, "with-changes", false, "carry uncommitted changes into the sandbox; they also stay here")
	f.Var(durationFlag{&o.ttl, agentlab.MaxTTL}, "ttl", "duration of the lease of a new sandbox, e.g. 4h (default: the profile's)")
	multiplexerFlag(cmd, &o.multiplexer)
	devcontainerFlag(f, &o.devcontainer)
	f.StringVar(&o.sync, "sync", "", "when to fetch commits while attached: manual, on-commit or on-idle (default: git config agentlab.sync, or manual)")
}

func (a *App) startCmd() *cobra.Command {
	var o startOptions
	cmd := &cobra.Command{
		Use:   "start [PATH] [-- AGENT-ARG...]",
		Short: "Start or continue the session of a repository, and attach to its agent",
		Long: `Start or continue the session of a Git repository: a persistent VM with a copy of
the repository at /workspace, in which an agent works with every permission. The
commits of the current branch are pushed into the VM; its work comes back with
'agentlab sync'. Nothing in the VM can access this machine.

The terminal keeps running when you detach (Ctrl-], or Ctrl-B D). The state of the
session persists until 'agentlab rm'.`,
		Example: `  agentlab start
  agentlab start ~/src/app --agent codex
  agentlab start --worktree fix-12
  agentlab start --detach --json`,
	}
	o.add(cmd)
	cmd.Flags().StringVar(&o.agent, "agent", "", "agent to run: claude, codex, opencode, gemini, or none for a shell (default: git config agentlab.agent, or claude)")
	cmd.RunE = a.run(func(ctx context.Context, c *client.Client, args []string) error {
		n := cmd.ArgsLenAtDash()
		if n < 0 {
			n = len(args)
		}
		if n > 1 {
			return work.UsageErrorf("unexpected argument %q", args[1]).WithHint("arguments of the agent follow --")
		}
		o.path = "."
		if n == 1 {
			o.path = args[0]
		}
		o.args = args[n:]
		return a.start(ctx, c, o)
	})
	return cmd
}

// agentCmd returns the command that starts a session with an agent.
func (a *App) agentCmd(name string) *cobra.Command {
	o := startOptions{path: ".", agent: name}
	cmd := &cobra.Command{
		Use:   name + " [flags] [-- ARG...]",
		Short: "Run " + name + " in the session of this repository",
		Long: fmt.Sprintf(`Run %[1]s in the session of the repository in the current directory, with every
permission, in its VM. It is 'agentlab start --agent %[1]s'. Words after -- are
arguments of %[1]s. If it is running already, attach to it.`, name),
		Example: fmt.Sprintf("  agentlab %[1]s\n  agentlab %[1]s --resume\n  agentlab %[1]s --worktree fix-12", name),
	}
	o.add(cmd)
	cmd.RunE = a.run(func(ctx context.Context, c *client.Client, args []string) error {
		if n := cmd.ArgsLenAtDash(); n != 0 && len(args) > 0 {
			return work.UsageErrorf("unexpected argument %q", args[0]).WithHint("arguments of %s follow --, e.g. agentlab %s -- %q", name, name, args[0])
		}
		o.args = args
		return a.start(ctx, c, o)
	})
	return cmd
}

// check checks options that do not depend on the daemon, and completes the agent.
func (o *startOptions) check(ctx context.Context, top string) error {
	if o.agent == "" {
		o.agent = "claude"
		if configured, err := gitsafe.Git(ctx, top, "config", "--get", "agentlab.agent"); err == nil && configured != "" {
			o.agent = configured
		}
	}
	if o.agent != shellOnly && !slices.Contains(interactiveAgents, o.agent) {
		return work.UsageErrorf("unknown agent %q", o.agent).WithHint("choose one of %s, or %s for a shell", strings.Join(interactiveAgents, ", "), shellOnly)
	}
	if o.agent == shellOnly && (o.resume || len(o.args) > 0) {
		return work.UsageErrorf("a shell has no --resume and no arguments").WithHint("remove them, or set --agent")
	}
	o.shell = o.agent == shellOnly
	if err := session.CheckBranch(o.worktree, "worktree"); err != nil {
		return err
	}
	if err := attach.CheckMultiplexer(o.multiplexer); err != nil {
		return err
	}
	var err error
	o.sync, err = syncMode(ctx, top, o.sync)
	return err
}

// started is the output of 'agentlab start' under --json.
type started struct {
	Session  api.Session `json:"session"`
	Sandbox  api.Sandbox `json:"sandbox"`
	Created  bool        `json:"created"` // the session
	Worktree string      `json:"worktree,omitempty"`
	Dir      string      `json:"dir"`             // in the guest
	Setup    string      `json:"setup,omitempty"` // why the commands under setup failed
}

func (a *App) start(ctx context.Context, c *client.Client, o startOptions) error {
	l, err := a.startLink(ctx, &o)
	if err == nil {
		err = o.check(ctx, l.Path)
	}
	if err != nil {
		return err
	}
	src, err := a.sourceHead(ctx, l.Path, o.branch)
	if err != nil {
		return err
	}
	head := startHead{LocalCommit: src}
	if err := a.askIdentity(ctx, l, &o); err != nil {
		return err
	}
	if err := a.askChanges(ctx, l, &o); err != nil {
		return err
	}
	if l.Session == "" || o.fresh {
		done, err := a.packFirst(ctx, l, &head)
		if err != nil {
			return err
		}
		defer done()
	}
	if o.fresh && l.Session != "" {
		if err := a.removeForFresh(ctx, c, &l, o); err != nil {
			return err
		}
	}
	if err := a.warnBeforeStart(ctx, c, l, o); err != nil {
		return err
	}
	p := a.projectOf(ctx, l.Path, head.Commit)
	s, created, err := a.ensureSession(ctx, c, &l, o.branch, o.newSession(l.Path, p))
	err = projectImage(err, o.image == "" && p.Image != "")
	if err == nil && created && cmp.Or(o.image, p.Image) == "" {
		a.noteQuick(ctx, c, s)
	}
	if err == nil && !created {
		err = a.sameImage(s, o.image, p.Image)
	}
	if err != nil {
		return err
	}
	got, open, err := a.prepareWork(ctx, c, l, head, s, p, o)
	if err != nil {
		a.noteUnfinished(s, err)
		return err
	}
	got.Created = created
	if _, tty := work.TerminalOf(a.Stdin); !tty || o.detach || a.json {
		if !tty && !o.detach && !a.json {
			a.Progressf("note: standard input is not a terminal, so nothing is attached")
		}
		return a.startDetached(ctx, c, got, open, o)
	}
	return a.work(ctx, c, l, got, open, o.sync)
}

// startLink returns the link of the session that is started: with --branch that of the
// branch, and without it the one that the other commands use in this repository, too.
func (a *App) startLink(ctx context.Context, o *startOptions) (session.Link, error) {
	if o.branch != "" || o.main {
		return session.FindLink(ctx, o.path, o.branch)
	}
	l, err := session.CurrentLink(ctx, o.path)
	if o.branch = l.Branch; l.Branch != "" {
		a.Progressf("branch %s has a session of its own", l.Branch)
	}
	return l, err
}

// removeForFresh deletes a session that a new one replaces. The link stays: with it the
// profile survives an interrupt before the new session exists.
func (a *App) removeForFresh(ctx context.Context, c *client.Client, l *session.Link, o startOptions) error {
	if o.profile != "" {
		if _, err := c.Profile(ctx, o.profile); err != nil {
			return err
		}
	}
	if err := l.KeepProfile(ctx, c); err != nil {
		return err
	}
	return a.removeSession(ctx, c, l, removal{yes: o.yes, keepLink: true})
}

// prepareWork starts the sandbox of a session and sends it the repository. It returns
// the command of its terminal.
func (a *App) prepareWork(ctx context.Context, c *client.Client, l session.Link, head startHead, s api.Session, p projectfile.File, o startOptions) (got started, open guestapi.ExecRequest, err error) {
	sb, err := a.resumeForWork(ctx, c, s, o.ttl)
	if err != nil {
		return got, open, err
	}
	r := session.Repo{C: c, Sandbox: fmt.Sprint(sb.VMID), Path: l.Path, Slow: a.slow}
	choice, err := attach.MultiplexerChoice(ctx, c, s, o.multiplexer)
	if err != nil {
		return got, open, err
	}
	if err := attach.ChooseMultiplexer(ctx, c, s, r.Sandbox, choice); err != nil {
		return got, open, err
	}
	if err := a.sendCode(ctx, r, l, head, o); err != nil {
		return got, open, err
	}
	dir, err := a.worktreeDir(ctx, r, o.worktree, head.LocalCommit)
	if err != nil {
		return got, open, err
	}
	if err := transfer.SendDotfiles(ctx, a, c, r.Sandbox, l.Path); err != nil {
		return got, open, err
	}
	if !o.noEnv {
		sent, err := transfer.SendEnvFiles(ctx, a, c, r.Sandbox, l.Path, dir)
		if err != nil {
			return got, open, err
		}
		if n := len(sent.Files); n > 0 {
			a.Progressf("sent %s: %s", agentlab.Plural(n, "environment file"), work.JoinNames(sent.Files))
		}
	}
	if err := a.startEnvironment(ctx, c, s, r.Sandbox, l, p.Services != "", o.devcontainer); err != nil {
		return got, open, err
	}
	got = started{Session: s, Sandbox: sb, Worktree: o.worktree, Dir: dir}
	if !o.noSetup {
		if got.Setup, err = a.setUpSession(ctx, c, r.Sandbox, p.Setup); err != nil {
			return got, open, err
		}
	}
	return got, guestapi.ExecRequest{Command: openCommand(o, dir), TTY: true, Dir: guestapi.WorkspaceDir}, nil
}

// startDetached starts the agent in the background.
func (a *App) startDetached(ctx context.Context, c *client.Client, got started, open guestapi.ExecRequest, o startOptions) error {
	open.TTY = false
	open.Command = slices.Insert(open.Command, 2, "--detach")
	if err := guestrun.Run(ctx, c, fmt.Sprint(got.Sandbox.VMID), open, nil, io.Discard); err != nil {
		return err
	}
	terminal := got.Session.Name
	if got.Worktree != "" {
		terminal += "/" + got.Worktree
	}
	return a.done(got, "session %s is running (sandbox %s, %s)\n  → agentlab attach %s", got.Session.Name, got.Sandbox.Name, session.ShownPath(got.Dir), terminal)
}

// openCommand returns the command that attaches to the terminal of a work tree.
func openCommand(o startOptions, dir string) []string {
	name := "main"
	switch {
	case o.terminal != "" && o.terminal != name:
		name = tmuxName(o.terminal)
	case o.worktree != "":
		name = terminalName(o.worktree)
	}
	cmd := []string{"agentlab-agent", "open", "--session", name, "--dir", dir}
	if o.run != "" {
		cmd = append(cmd, "--run", o.run)
	}
	switch {
	case o.shell:
		return append(cmd, "--shell")
	case o.agent == shellOnly:
		return cmd
	}
	cmd = append(cmd, "--agent", o.agent)
	if o.resume {
		cmd = append(cmd, "--resume")
	}
	return append(append(cmd, "--"), o.args...)
}

// terminalName is the name of the terminal of a work tree.
func terminalName(branch string) string { return tmuxName("worktree/" + branch) }

// tmuxName returns a name without the characters that tmux reserves.
func tmuxName(name string) string {
	return strings.Map(func(r rune) rune {
		if strings.ContainsRune(":. \\", r) {
			return '_'
		}
		return r
	}, name)
}

// lossNoticed limits the time until the daemon finds out that a VM has ended.
const lossNoticed = time.Minute

// resumeForWork continues the sandbox of a session and waits until commands run in it.
// After a crash of the host the daemon may not have found out yet that a VM has ended:
// then the session is resumed again.
func (a *App) resumeForWork(ctx context.Context, c *client.Client, s api.Session, ttl time.Duration) (api.Sandbox, error) {
	return a.resumeFor(ctx, c, s, ttl, func(sandbox string) error {
		defer work.SaySlow(a, "waiting for the sandbox to run a command")()
		return guestrun.Run(ctx, c, sandbox, guestapi.ExecRequest{Command: []string{"true"}}, nil, io.Discard)
	})
}

// resumeFor is resumeForWork with the caller's first use of the sandbox. try returns an
// error if the VM has ended; then it runs again.
func (a *App) resumeFor(ctx context.Context, c *client.Client, s api.Session, ttl time.Duration, try func(sandbox string) error) (api.Sandbox, error) {
	defer func(was bool) { a.brief = was }(a.brief)
	a.brief = true
	for began := time.Now(); ; {
		after := work.LastSandboxEvent(ctx, c, s)
		sb, err := c.ResumeSession(ctx, s.ID, api.SessionResume{TTLMinutes: int(ttl / time.Minute)})
		if err == nil && !work.IsUp(sb) {
			switch {
			case work.IsStopped(sb) && sb.Reason != "":
				a.Progressf("the VM of session %s had ended (%s); its disk is started again", s.Name, agentlab.WithoutControls(sb.Reason))
			case work.IsStopped(sb) || sb.State == string(agentlab.SandboxSuspended):
				a.Progressf("starting the VM of session %s", s.Name)
			}
			sb, err = work.WaitSandbox(ctx, a, c, sb, after, work.IsUp)
		}
		if err != nil && sb.Unbootable && s.SandboxVMID != 0 {
			a.noteUnbootable(s, sb)
			s.SandboxVMID = 0
			continue
		}
		if err != nil {
			return sb, err
		}
		err = try(fmt.Sprint(sb.VMID))
		if err == nil || ctx.Err() != nil || time.Since(began) > lossNoticed {
			return sb, err
		}
		s.SandboxVMID = sb.VMID
		if err := work.SleepOr(ctx, time.Second); err != nil {
			return sb, err
		}
	}
}
