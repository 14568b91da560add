package session

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/projectfile"
	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/attach"
	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
	"github.com/agentlab-vm/agentlab/internal/work/guestrun"
	"github.com/agentlab-vm/agentlab/internal/work/project"
	"github.com/agentlab-vm/agentlab/internal/work/transfer"
)

// Agents are the agents with a terminal interface. Each is a command.
var Agents = []string{"claude", "codex", "opencode", "gemini"}

// StartOptions has the flags of 'agentlab start' and of the agents' commands.
type StartOptions struct {
	Path, Agent, Profile, Backend string
	Image                         string // of a new session; "" means that of the repository, or else the profile's
	NoSetup                       bool
	Terminal, Run                 string // name and first command of the terminal
	Multiplexer                   string // "" means the one of the session or the profile
	Branch, Worktree              string
	Fresh, Detach, Resume, Yes    bool
	shell                         bool // show a shell, whatever the terminal shows
	Main                          bool // the session of the repository, whatever branch is checked out
	WithChanges                   bool
	NoEnv                         bool
	TTL                           time.Duration
	Args                          []string // of the agent
	Sync                          string
	userName, userEmail           string // of commits; "" means the agent's
	Devcontainer                  string
}

// ShellOnly is the value of --agent for a shell instead of an agent.
const ShellOnly = "none"

// check checks options that do not depend on the daemon, and completes the agent.
func (o *StartOptions) check(ctx context.Context, top string) error {
	if o.Agent == "" {
		o.Agent = "claude"
		if configured, err := gitsafe.Git(ctx, top, "config", "--get", "agentlab.agent"); err == nil && configured != "" {
			o.Agent = configured
		}
	}
	if o.Agent != ShellOnly && !slices.Contains(Agents, o.Agent) {
		return work.UsageErrorf("unknown agent %q", o.Agent).WithHint("choose one of %s, or %s for a shell", strings.Join(Agents, ", "), ShellOnly)
	}
	if o.Agent == ShellOnly && (o.Resume || len(o.Args) > 0) {
		return work.UsageErrorf("a shell has no --resume and no arguments").WithHint("remove them, or set --agent")
	}
	o.shell = o.Agent == ShellOnly
	if err := checkBranch(o.Worktree, "worktree"); err != nil {
		return err
	}
	if err := attach.CheckMultiplexer(o.Multiplexer); err != nil {
		return err
	}
	var err error
	o.Sync, err = syncMode(ctx, top, o.Sync)
	return err
}

// Started is the output of 'agentlab start' under --json.
type Started struct {
	Session  api.Session `json:"session"`
	Sandbox  api.Sandbox `json:"sandbox"`
	Created  bool        `json:"created"` // the session
	Worktree string      `json:"worktree,omitempty"`
	Dir      string      `json:"dir"`             // in the guest
	Setup    string      `json:"setup,omitempty"` // why the commands under setup failed
}

// Prepared is a started session, and how its terminal is opened.
type Prepared struct {
	Started

	link Link
	open guestapi.ExecRequest
	sync string // mode of synchronization while the terminal is attached
}

// Start starts or continues the session of a repository. An agent starts when its
// terminal is opened.
func Start(ctx context.Context, ui work.UI, c *client.Client, o StartOptions) (Prepared, error) {
	var none Prepared
	l, err := startLink(ctx, ui, &o)
	if err == nil {
		err = o.check(ctx, l.Path)
	}
	if err != nil {
		return none, err
	}
	src, err := SourceHead(ctx, ui, l.Path, o.Branch)
	if err != nil {
		return none, err
	}
	head := startHead{LocalCommit: src}
	if err := askIdentity(ctx, ui, l, &o); err != nil {
		return none, err
	}
	if err := askChanges(ctx, ui, l, &o); err != nil {
		return none, err
	}
	if l.Session == "" || o.Fresh {
		done, err := packFirst(ctx, ui, l, &head)
		if err != nil {
			return none, err
		}
		defer done()
	}
	if o.Fresh && l.Session != "" {
		if err := removeForFresh(ctx, ui, c, &l, o); err != nil {
			return none, err
		}
	}
	if err := warnBeforeStart(ctx, ui, c, l, o); err != nil {
		return none, err
	}
	p := project.Of(ctx, ui, l.Path, head.Commit)
	s, created, err := ensureSession(ctx, ui, c, &l, o.Branch, o.newSession(l.Path, p))
	err = project.ImageError(err, o.Image == "" && p.Image != "")
	if err == nil && created && cmp.Or(o.Image, p.Image) == "" {
		noteQuick(ctx, ui, c, s)
	}
	if err == nil && !created {
		err = sameImage(ui, s, o.Image, p.Image)
	}
	if err != nil {
		return none, err
	}
	got, open, err := prepareWork(ctx, ui, c, l, head, s, p, o)
	if err != nil {
		noteUnfinished(ui, s, err)
		return none, err
	}
	got.Created = created
	return Prepared{Started: got, link: l, open: open, sync: o.Sync}, nil
}

// startLink returns the link of the session that is started: with --branch that of the
// branch, and without it the one that the other commands use in this repository, too.
func startLink(ctx context.Context, ui work.UI, o *StartOptions) (Link, error) {
	if o.Branch != "" || o.Main {
		return FindLink(ctx, o.Path, o.Branch)
	}
	l, err := currentLink(ctx, o.Path)
	if o.Branch = l.Branch; l.Branch != "" {
		ui.Progressf("branch %s has a session of its own", l.Branch)
	}
	return l, err
}

// removeForFresh deletes a session that a new one replaces. The link stays: with it the
// profile survives an interrupt before the new session exists.
func removeForFresh(ctx context.Context, ui work.UI, c *client.Client, l *Link, o StartOptions) error {
	if o.Profile != "" {
		if _, err := c.Profile(ctx, o.Profile); err != nil {
			return err
		}
	}
	if err := l.KeepProfile(ctx, c); err != nil {
		return err
	}
	return Remove(ctx, ui, c, l, Removal{Yes: o.Yes, keepLink: true})
}

// prepareWork starts the sandbox of a session and sends it the repository and the user's
// files: one call asks what the guest has, and another brings what it lacks. It returns the
// command of the terminal.
func prepareWork(ctx context.Context, ui work.UI, c *client.Client, l Link, head startHead, s api.Session, p projectfile.File, o StartOptions) (got Started, open guestapi.ExecRequest, err error) {
	in := guestapi.SessionPrepare{}
	if in.Terminal, err = attach.MultiplexerChoice(ctx, c, s, o.Multiplexer); err != nil {
		return got, open, err
	}
	if in.Init, err = repoInit(ctx, l.Path, head.LocalCommit, o); err != nil {
		return got, open, err
	}
	r := Repo{C: c, Path: l.Path, Slow: slow(ui)}
	var has guestapi.SessionPrepared
	var fault error // of the guest, which another call would have, too
	sb, err := resumeFor(ctx, ui, c, s, o.TTL, func(sandbox string) error {
		r.Sandbox = sandbox
		answer, ran, err := r.prepare(ctx, in)
		if has = answer; ran {
			fault, err = err, nil
		}
		return err
	})
	if err = cmp.Or(err, fault); err == nil && has.Terminal != nil {
		err = attach.CheckMultiplexerOf(s, *has.Terminal)
	} else if err == nil && in.Terminal != nil {
		err = guestrun.Invalid("no multiplexer")
	}
	if err != nil {
		return got, open, err
	}
	if has.NoLink != "" {
		ui.Progressf("note: there is no link %s to %s in the sandbox: %s", guestapi.ProjectDir, guestapi.RepoDir, agentlab.WithoutControls(has.NoLink))
	}
	out, dir, err := outgoingFor(ctx, ui, c, r, s, has, head.LocalCommit, p, o)
	if err != nil {
		return got, open, err
	}
	did, err := sendCode(ctx, ui, r, l, head, has.State, o, out)
	if err != nil {
		return got, open, err
	}
	got = Started{Session: s, Sandbox: sb, Worktree: o.Worktree, Dir: dir, Setup: did.setupFailed}
	return got, guestapi.ExecRequest{Command: openCommand(o, dir), TTY: true, Dir: guestapi.WorkspaceDir}, nil
}

// outgoingFor returns what a start brings to a session besides its commits, and the
// directory in which the terminal opens.
func outgoingFor(ctx context.Context, ui work.UI, c *client.Client, r Repo, s api.Session, has guestapi.SessionPrepared, src gitsafe.LocalCommit, p projectfile.File, o StartOptions) (out *outgoing, dir string, err error) {
	out = &outgoing{}
	if out.envDir, err = out.addWorktree(ctx, r.Path, has.State, o.Worktree, src); err != nil {
		return nil, "", err
	}
	if out.dotfiles, err = transfer.FindDotfiles(ctx, ui, r.Path); err != nil {
		return nil, "", err
	}
	if out.dotfiles != nil && out.dotfiles.Sum == has.Dotfiles {
		out.dotfiles = nil
	}
	if !o.NoEnv {
		if out.envNames, out.env, err = transfer.PackEnvFiles(ctx, r.Path); err != nil {
			return nil, "", err
		}
	}
	if out.environment, err = project.EnvironmentOf(ctx, c, s, r.Path, p.Services != "", o.Devcontainer); err != nil {
		return nil, "", err
	}
	if !o.NoSetup {
		out.setup = project.SetupOf(p.Setup)
	}
	return out, JoinGuest(out.envDir), nil
}

// RunDetached starts the agent in the background.
func (p Prepared) RunDetached(ctx context.Context, c *client.Client) error {
	open := p.open
	open.TTY = false
	open.Command = slices.Insert(slices.Clone(open.Command), 2, "--detach")
	return guestrun.Run(ctx, c, fmt.Sprint(p.Sandbox.VMID), open, nil, io.Discard)
}
