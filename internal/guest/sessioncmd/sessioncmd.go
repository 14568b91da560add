// Package sessioncmd implements 'agentlab-agent session', with which the host starts the
// work in a session in two calls: prepare says what the guest has, and apply brings what it
// lacks. It runs in the guest as the agent. Therefore the host trusts nothing of its output.
package sessioncmd

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/bounded"
	"github.com/agentlab-vm/agentlab/internal/guest/filescmd"
	"github.com/agentlab-vm/agentlab/internal/guest/repocmd"
)

// Files in the home directory.
const (
	dotfilesMark = ".config/agentlab-dotfiles" // the sum of the dotfiles that were sent
	dotfilesDir  = ".dotfiles"                 // the dotfiles, if one of them installs the others
)

// maxLine limits the first line of the input, in bytes.
const maxLine = guestapi.MaxRepoState

// ErrUsage is the error for unknown arguments.
var ErrUsage = errors.New("usage: agentlab-agent session prepare|apply")

// Guest is where a session works, and what the guest does for it.
type Guest struct {
	Repo string // directory of the repository
	Home string // directory of the agent
	Link string // a link that is made to Repo; "" for none

	Terminal    func(guestapi.SessionTerminal) (guestapi.TerminalChoice, error)
	Environment func(guestapi.SessionEnvironment) (guestapi.Environment, error)
	SetUp       func(guestapi.SetupRun, io.Writer) error
}

// Run runs a command; args do not include "session". The output of programs goes to errOut.
func (g Guest) Run(args []string, in io.Reader, out, errOut io.Writer) error {
	if len(args) != 1 {
		return ErrUsage
	}
	input := bufio.NewReader(in)
	switch args[0] {
	case "prepare":
		var p guestapi.SessionPrepare
		if err := json.NewDecoder(input).Decode(&p); err != nil {
			return fmt.Errorf("the input is not valid: %w", err)
		}
		got, err := g.prepare(p)
		if err != nil {
			return err
		}
		return json.NewEncoder(out).Encode(got)
	case "apply":
		line, err := input.ReadBytes('\n')
		if err != nil || len(line) > maxLine {
			return errors.New("the input is not valid: its first line is incomplete")
		}
		a := apply{Guest: g, repo: repocmd.Open(g.Repo), in: input, out: json.NewEncoder(out), errOut: errOut}
		if err := json.Unmarshal(line, &a.SessionApply); err != nil {
			return fmt.Errorf("the input is not valid: %w", err)
		}
		return a.run()
	}
	return ErrUsage
}

func (g Guest) prepare(p guestapi.SessionPrepare) (got guestapi.SessionPrepared, err error) {
	if p.Terminal != nil {
		choice, err := g.Terminal(*p.Terminal)
		if got.Terminal = &choice; err != nil || choice.Missing || choice.Running != "" {
			return got, err
		}
	}
	repo := repocmd.Open(g.Repo)
	if err := repo.Init(p.Init); err != nil {
		return got, err
	}
	if err := g.link(); err != nil { // convenience: the session works without it
		got.NoLink = agentlab.OneLine(err.Error(), 300)
	}
	if mark, err := os.ReadFile(filepath.Join(g.Home, dotfilesMark)); err == nil {
		got.Dotfiles = agentlab.Cut(strings.TrimSpace(string(mark)), 128)
	}
	got.State, err = repo.State()
	return got, err
}

// link makes the link to the repository, which only root can make.
func (g Guest) link() error {
	if to, err := os.Readlink(g.Link); g.Link == "" || err == nil && to == g.Repo {
		return nil
	}
	out, err := exec.CommandContext(context.Background(), "sudo", "-n", "ln", "-sfn", g.Repo, g.Link).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	return nil
}

// apply is a run of 'agentlab-agent session apply'.
type apply struct {
	guestapi.SessionApply
	Guest

	repo   repocmd.Repo
	state  *guestapi.RepoState // nil until a step has read it
	in     *bufio.Reader
	out    *json.Encoder
	errOut io.Writer
}

// run does the steps in the order of guestapi.ApplySteps.
func (a *apply) run() error {
	for _, step := range []struct {
		name string
		is   bool
		do   func() error
	}{
		{guestapi.ApplyReceive, a.Receive != nil, a.receive},
		{guestapi.ApplyWorktree, a.Worktree != "", a.worktree},
		{guestapi.ApplyDotfiles, a.SessionApply.Dotfiles != nil, a.dotfiles},
		{guestapi.ApplyEnv, a.Env != nil, a.env},
		{guestapi.ApplyEnvironment, a.SessionApply.Environment != nil, a.environment},
		{guestapi.ApplySetup, a.Setup != nil, a.setup},
	} {
		if !step.is {
			continue
		}
		if err := a.say(guestapi.SessionEvent{Begin: step.name}); err != nil {
			return err
		}
		if err := step.do(); err != nil {
			return err
		}
	}
	return a.say(guestapi.SessionEvent{Done: true})
}

func (a *apply) say(e guestapi.SessionEvent) error { return a.out.Encode(e) }

func (a *apply) receive() error {
	got, err := a.repo.Receive(*a.Receive, io.LimitReader(a.in, a.BundleBytes))
	if err == nil {
		err = a.readState()
	}
	if err != nil {
		return err
	}
	if err := a.say(guestapi.SessionEvent{Received: &got, State: a.state}); err != nil {
		return err
	}
	if why := got.Errors[a.Worktree]; why != "" && a.Worktree != "" {
		return fmt.Errorf("branch %s cannot be pushed to the session: %s", a.Worktree, why)
	}
	return nil
}

// readState reads the state of the repository.
func (a *apply) readState() error {
	st, err := a.repo.State()
	a.state = &st
	return err
}

func (a *apply) worktree() error {
	if a.state == nil {
		if err := a.readState(); err != nil {
			return err
		}
	}
	for _, t := range a.state.Worktrees {
		if t.Branch == a.Worktree {
			return nil
		}
	}
	if err := a.repo.AddWorktree(a.Worktree); err != nil {
		return err
	}
	if err := a.readState(); err != nil {
		return err
	}
	return a.say(guestapi.SessionEvent{State: a.state})
}

// push extracts the next bytes of the input as an archive.
func (a *apply) push(bytes int64, dir string) error {
	c := filescmd.Command{In: io.LimitReader(a.in, bytes)}
	return c.Run([]string{"push", "--replace", "--", guestapi.FilesContent, dir + "/."})
}

func (a *apply) dotfiles() error {
	d, to := a.SessionApply.Dotfiles, a.Home
	if !agentlab.IsHex(d.Sum, 1) || d.Install != "" && !filepath.IsLocal(d.Install) {
		return errors.New("the dotfiles are not valid")
	}
	mark := filepath.Join(a.Home, dotfilesMark)
	if err := os.Remove(mark); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if d.Install != "" {
		to = filepath.Join(a.Home, dotfilesDir)
		if err := errors.Join(os.RemoveAll(to), os.Mkdir(to, 0o755)); err != nil {
			return err
		}
	}
	if err := a.push(d.Bytes, to); err != nil {
		return err
	}
	if d.Install != "" {
		cmd := exec.CommandContext(context.Background(), "./"+d.Install)
		said := &bounded.Tail{Max: 4 << 10}
		cmd.Dir, cmd.Stdout, cmd.Stderr = to, said, said
		if err := cmd.Run(); err != nil {
			return fmt.Errorf("%s of the dotfiles: %w: %s", d.Install, err, agentlab.OneLine(said.String(), 1000))
		}
	}
	return errors.Join(os.MkdirAll(filepath.Dir(mark), 0o755), os.WriteFile(mark, []byte(d.Sum+"\n"), 0o644))
}

func (a *apply) env() error {
	if a.Env.Dir != "" && !filepath.IsLocal(a.Env.Dir) {
		return fmt.Errorf("%q is not in the repository", a.Env.Dir)
	}
	return a.push(a.Env.Bytes, filepath.Join(a.Repo, a.Env.Dir))
}

func (a *apply) environment() error {
	got, err := a.Guest.Environment(*a.SessionApply.Environment)
	if err != nil {
		return err
	}
	return a.say(guestapi.SessionEvent{Environment: &got})
}

func (a *apply) setup() error {
	if err := a.SetUp(*a.Setup, a.errOut); err != nil {
		return a.say(guestapi.SessionEvent{SetupFailed: agentlab.OneLine(err.Error(), 1000)})
	}
	return nil
}
