package session

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/bounded"
	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/attach"
	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
	"github.com/agentlab-vm/agentlab/internal/work/guestrun"
	"github.com/agentlab-vm/agentlab/internal/work/project"
	"github.com/agentlab-vm/agentlab/internal/work/transfer"
)

// prepare makes the repository of a session unless it exists, and returns what the guest
// has. ran reports that the guest has answered, so that a further call has the same error.
func (r Repo) prepare(ctx context.Context, p guestapi.SessionPrepare) (got guestapi.SessionPrepared, ran bool, err error) {
	defer r.saySlow("prepare")()
	in, err := json.Marshal(p)
	if err != nil {
		return got, false, err
	}
	req := guestapi.ExecRequest{Command: []string{"agentlab-agent", "session", "prepare"}}
	out := &bounded.Head{Max: guestapi.MaxRepoState, Fail: gitsafe.ErrOutputTooLarge}
	said := &bounded.Tail{Max: 4 << 10}
	status, _, err := guestrun.Capture(ctx, r.C, r.Sandbox, req, cmp.Or(r.Silence, guestrun.RepoSilence), bytes.NewReader(in), out, said)
	switch {
	case err != nil:
		return got, errors.Is(err, gitsafe.ErrOutputTooLarge), err
	case status.Code != 0:
		return got, true, guestrun.Failed(req, status, said.String())
	case json.Unmarshal([]byte(out.String()), &got) != nil:
		return got, true, guestrun.Invalid("the answer is not valid JSON")
	}
	return got, true, checkState(got.State)
}

// outgoing is what a start brings to a session in one call. The zero value brings nothing.
type outgoing struct {
	push        Pushed
	known       []string // commits that the session has
	worktree    string   // branch that gets a work tree
	added       string   // worktree, if the session gets the branch only for it
	treeCommit  string   // commit of worktree, if this machine has it
	dotfiles    *transfer.Dotfiles
	envNames    []string // environment files
	env         []byte   // their archive
	envDir      string   // the work tree that gets them, relative to the repository
	environment *guestapi.SessionEnvironment
	setup       *guestapi.SetupRun
}

func (o *outgoing) empty() bool { return len(o.steps()) == 0 }

// steps returns the steps that are asked for.
func (o *outgoing) steps() (list []string) {
	is := map[string]bool{
		guestapi.ApplyReceive: !o.push.empty(), guestapi.ApplyWorktree: o.worktree != "", guestapi.ApplyDotfiles: o.dotfiles != nil,
		guestapi.ApplyEnv: len(o.envNames) > 0, guestapi.ApplyEnvironment: o.environment != nil, guestapi.ApplySetup: o.setup != nil,
	}
	for _, step := range guestapi.ApplySteps {
		if is[step] {
			list = append(list, step)
		}
	}
	return list
}

// applied is what a session has done with an outgoing.
type applied struct {
	state       *guestapi.RepoState // nil if neither commits nor a work tree were sent
	faults      map[string]string   // as of Repo.Push
	setupFailed string              // why the commands under setup failed
}

// apply brings something to a session, and shows the user each step.
func (r Repo) apply(ctx context.Context, ui work.UI, o *outgoing) (got applied, err error) {
	m := ui.Meter()
	defer m.Done()
	tmp, remove, err := gitsafe.TempDir("agentlab-push-*")
	if err != nil {
		return got, err
	}
	defer remove()
	doc := guestapi.SessionApply{Worktree: o.worktree, Environment: o.environment, Setup: o.setup}
	var parts []io.Reader
	if !o.push.empty() {
		doc.Receive = o.push.receive()
		bundle := o.push.Bundle
		if bundle == nil {
			if bundle, err = r.Pack(ctx, tmp, o.push, o.known, m); err != nil {
				return got, err
			}
		}
		if bundle != nil {
			defer func() { _ = bundle.Close() }()
			if doc.BundleBytes, err = sizeOf(bundle); err != nil {
				return got, err
			}
			parts = append(parts, &work.MeterReader{R: bundle, M: m, What: "sending", Total: doc.BundleBytes})
		}
	}
	if d := o.dotfiles; d != nil {
		archive, err := d.Pack()
		if err != nil {
			return got, err
		}
		doc.Dotfiles = &guestapi.SessionDotfiles{Bytes: int64(len(archive)), Sum: d.Sum, Install: d.Install}
		parts = append(parts, bytes.NewReader(archive))
	}
	if len(o.envNames) > 0 {
		doc.Env = &guestapi.SessionEnv{Bytes: int64(len(o.env)), Dir: o.envDir}
		parts = append(parts, bytes.NewReader(o.env))
	}
	line, err := json.Marshal(doc)
	if err != nil {
		return got, err
	}
	m.Start()
	in, stop := r.slowAfterSent(io.MultiReader(append([]io.Reader{bytes.NewReader(append(line, '\n'))}, parts...)...), m, guestapi.ApplyReceive)
	defer stop()
	e := events{repo: r, ui: ui, out: o, got: &got, stop: stop, steps: o.steps()}
	defer e.endSlow()
	limits, shown := cmp.Or(r.Silence, guestrun.RepoSilence), io.Discard
	switch { // which can be silent for longer, and have output
	case o.environment != nil:
		limits, shown = guestrun.AnySilence, attach.FilteredWriter(ui.Stream())
	case o.setup != nil:
		limits, shown = guestrun.AnySilence, project.SetupOutput(ui)
	}
	req := guestapi.ExecRequest{Command: []string{"agentlab-agent", "session", "apply"}}
	err = guestrun.RunShown(ctx, r.C, r.Sandbox, req, limits, in, &e, shown)
	switch {
	case e.bad != nil:
		err = e.bad
	case err != nil && o.worktree != "" && got.faults[o.worktree] != "":
		err = agentlab.Errorf(agentlab.CodeConflict, "branch %s cannot be pushed to the session: %s", o.worktree, got.faults[o.worktree])
	case err == nil && !e.done:
		err = guestrun.Invalid("the answer is incomplete")
	case e.step == guestapi.ApplyReceive:
		err = o.push.pushError(err)
	}
	return got, err
}

func sizeOf(f *os.File) (int64, error) {
	st, err := f.Stat()
	if err != nil {
		return 0, err
	}
	return st.Size(), nil
}

// events reads the output of 'agentlab-agent session apply'.
type events struct {
	repo Repo
	ui   work.UI
	out  *outgoing
	got  *applied
	stop func() // ends what slowAfterSent says
	slow func() // ends what is said about the current step

	steps   []string // that were asked for and have not begun
	step    string
	results int // of the current step
	line    []byte
	done    bool
	bad     error // of the guest's answer
}

// Write implements io.Writer.
func (e *events) Write(p []byte) (int, error) {
	e.bad = e.read(p)
	return len(p), e.bad
}

func (e *events) read(p []byte) error {
	for rest := p; len(rest) > 0; {
		line, after, whole := bytes.Cut(rest, []byte{'\n'})
		if len(e.line)+len(line) > guestapi.MaxRepoState {
			return guestrun.Invalid("a line is too long")
		}
		e.line, rest = append(e.line, line...), after
		if !whole {
			break
		}
		var event guestapi.SessionEvent
		if err := json.Unmarshal(e.line, &event); err != nil {
			return guestrun.Invalid("the answer is not valid JSON")
		}
		if e.line = e.line[:0]; e.done {
			return guestrun.Invalid("there is more after the end")
		}
		if err := e.handle(event); err != nil {
			return err
		}
	}
	return nil
}

func (e *events) handle(event guestapi.SessionEvent) error {
	if err := e.check(event); err != nil {
		return err
	}
	if event.State != nil {
		e.got.state = event.State
	}
	if event.Received != nil {
		e.stop()
		e.got.faults = e.out.push.faults(*event.Received)
		notePushed(e.ui, e.out, *e.got)
	}
	if event.Environment != nil {
		project.NoteEnvironment(e.ui, *event.Environment)
	}
	if event.SetupFailed != "" {
		e.got.setupFailed = agentlab.Cut(agentlab.WithoutControls(event.SetupFailed), maxSetupReason)
		project.NoteSetupFailed(e.ui, e.got.setupFailed)
	}
	if event.Begin != "" || event.Done {
		e.end()
		e.begin(event.Begin)
		e.done = event.Done
	}
	return nil
}

// maxSetupReason limits the reason for which commands under setup failed, in bytes.
const maxSetupReason = 1000

// check returns an error for an event that no AgentLab sends: each step that was asked for
// begins once, in the order of the steps, and has its results once.
func (e *events) check(event guestapi.SessionEvent) error {
	unexpected := guestrun.Invalid("an event that was not expected")
	if event.Begin != "" {
		if len(e.steps) == 0 || event.Begin != e.steps[0] || e.lacks() {
			return unexpected
		}
		e.steps, e.results = e.steps[1:], 0
	}
	if event.Done && (len(e.steps) > 0 || e.lacks()) {
		return unexpected
	}
	results := 0
	for step, is := range map[string]bool{guestapi.ApplyReceive: event.Received != nil, guestapi.ApplyEnvironment: event.Environment != nil, guestapi.ApplySetup: event.SetupFailed != ""} {
		if !is {
			continue
		}
		if results++; e.step != step {
			return unexpected
		}
	}
	if event.State != nil {
		if e.step != guestapi.ApplyReceive && e.step != guestapi.ApplyWorktree {
			return unexpected
		}
		if results == 0 {
			results = 1
		}
		if err := checkState(*event.State); err != nil {
			return err
		}
	}
	if e.results += results; e.results > 1 {
		return unexpected
	}
	return nil
}

// lacks reports whether the current step has ended without what it must report.
func (e *events) lacks() bool { return e.step == guestapi.ApplyReceive && e.got.faults == nil }

// begin says what a step does.
func (e *events) begin(step string) {
	e.step = step
	switch d := e.out.dotfiles; {
	case step == guestapi.ApplyDotfiles && d != nil && d.Install != "":
		e.ui.Progressf("running %s in the sandbox", d.Install)
	case step == guestapi.ApplyEnvironment:
		e.ui.Progressf("starting the environment of the repository")
	case step == guestapi.ApplyWorktree:
		e.slow = e.repo.saySlow("worktree")
	}
}

// end says what a step has done.
func (e *events) end() {
	if e.step != "" {
		e.stop()
	}
	e.endSlow()
	switch n := len(e.out.envNames); {
	case e.step == guestapi.ApplyDotfiles && e.out.dotfiles != nil:
		e.out.dotfiles.NoteSent(e.ui)
	case e.step == guestapi.ApplyEnv && n > 0:
		e.ui.Progressf("sent %s: %s", agentlab.Plural(n, "environment file"), work.JoinNames(e.out.envNames))
	}
	e.step = ""
}

func (e *events) endSlow() {
	if e.slow != nil {
		e.slow()
		e.slow = nil
	}
}
