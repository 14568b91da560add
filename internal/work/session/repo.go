// Package session connects a repository of the user with its session: the link in the
// configuration of git, and the repository in the sandbox, with which bundles are exchanged.
package session

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/bounded"
	"github.com/agentlab-vm/agentlab/internal/returncheck"
	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
	"github.com/agentlab-vm/agentlab/internal/work/guestrun"
)

const (
	maxGuestBundle = 4 << 30 // bytes of commits that a guest sends at once
	maxHave        = 5000    // commits that are offered as known
)

// Repo is the repository of a session, in its running sandbox. Git on this
// machine never talks to the guest: bundles are exchanged, and those of the guest are
// checked before anything of them is used.
type Repo struct {
	C       *client.Client
	Sandbox string
	Path    string           // the user's repository
	Silence guestrun.Silence // zero means guestrun.RepoSilence
	// slow, unless it is nil, is called when a command begins and says what the user waits
	// for if the command takes long; stop ends that.
	Slow func(what string) (stop func())
	Left *int64 // bytes that fetches may get in total; nil means that only each is limited
}

// Call runs a command of 'agentlab-agent repo'.
func (r Repo) Call(ctx context.Context, in io.Reader, out io.Writer, args ...string) error {
	if args[len(args)-1] != "receive" { // which shows what is sent
		defer r.saySlow(args[0])()
	}
	req := guestapi.ExecRequest{Command: append([]string{"agentlab-agent", "repo"}, args...)}
	return guestrun.RunShown(ctx, r.C, r.Sandbox, req, cmp.Or(r.Silence, guestrun.RepoSilence), in, out, io.Discard)
}

// slowWork is what the user waits for, by the command of 'agentlab-agent repo'.
var slowWork = map[string]string{
	"lfs":      "waiting for the objects of Git LFS",
	"pack":     "waiting for the sandbox to pack its work",
	"programs": "looking for programs that run in the sandbox",
	"init":     "preparing the repository in the sandbox",
	"prepare":  "preparing the repository in the sandbox",
	"receive":  "waiting for the sandbox to check out the commits",
	"state":    "reading the state of the repository in the sandbox",
	"worktree": "waiting for the sandbox to change its work trees",
}

// saySlow is slow for a command.
func (r Repo) saySlow(verb string) (stop func()) {
	if r.Slow == nil {
		return func() {}
	}
	return r.Slow(slowWork[verb])
}

// slowAfterSent is a reader after whose end the user waits for the command that has read it:
// then its meter shows nothing more, and stop ends the wait. stop may be called while the
// reader is read.
func (r Repo) slowAfterSent(in io.Reader, m *work.Meter, verb string) (reader io.Reader, stop func()) {
	var mu sync.Mutex // also for the meter, which in uses
	stopSlow, stopped := func() {}, false
	read := readerFunc(func(p []byte) (int, error) {
		mu.Lock()
		defer mu.Unlock()
		n, err := in.Read(p)
		if errors.Is(err, io.EOF) && !stopped {
			m.Done()
			stopSlow, stopped = r.saySlow(verb), true
		}
		return n, err
	})
	return read, func() {
		mu.Lock()
		defer mu.Unlock()
		m.Done()
		stopped = true
		stopSlow()
		stopSlow = func() {}
	}
}

type readerFunc func(p []byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }

// CallJSON is call with documents as input and output.
func (r Repo) CallJSON(ctx context.Context, in, out any, args ...string) error {
	var stdin bytes.Buffer
	if in != nil {
		if err := json.NewEncoder(&stdin).Encode(in); err != nil {
			return err
		}
	}
	return r.callFor(ctx, &stdin, out, args...)
}

// callFor is call with a document as output, unless that is nil.
func (r Repo) callFor(ctx context.Context, in io.Reader, out any, args ...string) error {
	got := bounded.Head{Max: guestapi.MaxRepoState, Fail: gitsafe.ErrOutputTooLarge}
	if err := r.Call(ctx, in, &got, args...); err != nil || out == nil {
		return err
	}
	if err := json.Unmarshal([]byte(got.String()), out); err != nil {
		return guestrun.Invalid("the answer is not valid JSON")
	}
	return nil
}

// State returns the checked state of the repository.
func (r Repo) State(ctx context.Context) (st guestapi.RepoState, err error) {
	if err := r.callFor(ctx, nil, &st, "state"); err != nil {
		return st, err
	}
	return st, checkState(st)
}

// checkState returns an error for a state that no AgentLab reports.
func checkState(st guestapi.RepoState) error {
	if len(st.Branches) > guestapi.MaxRepoBranches || len(st.Worktrees) > guestapi.MaxWorktrees || len(st.Worktrees) == 0 && len(st.Branches) > 0 || st.Elsewhere < 0 || st.Stashes != nil && (*st.Stashes < 0 || *st.Stashes > st.Elsewhere) {
		return guestrun.Invalid("%d branches and %d work trees", len(st.Branches), len(st.Worktrees))
	}
	if len(st.Modules) > guestapi.MaxSentModules || slices.ContainsFunc(st.Modules, func(id string) bool { return !gitsafe.IsCommit(id) }) {
		return guestrun.Invalid("%d submodules", len(st.Modules))
	}
	modules := st.Elsewhere
	for dir, n := range st.ModuleWork {
		if modules -= n; n <= 0 || modules < 0 || !filepath.IsLocal(dir) {
			return guestrun.Invalid("%d commits in submodule %.100q", n, dir)
		}
	}
	for name, commit := range st.Branches {
		if name == "" || agentlab.ValidateRef(name) != nil || !gitsafe.IsCommit(commit) {
			return guestrun.Invalid("branch %.100q is at %.50q", name, commit)
		}
	}
	for i, w := range st.Worktrees {
		inside, isBelow := strings.CutPrefix(w.Dir, guestapi.WorktreesDir+"/")
		badDir := i == 0 && w.Dir != "" || i > 0 && (!isBelow || returncheck.BadPath(inside) != "" || !agentlab.IsPrintable(inside))
		if badDir || agentlab.ValidateRef(w.Branch) != nil || w.Head != "" && !gitsafe.IsCommit(w.Head) || w.Uncommitted < 0 {
			return guestrun.Invalid("work tree %.100q", w.Dir)
		}
	}
	return nil
}

// Fetch gets the commits of branches, and with changes the uncommitted changes of the
// work tree in dir. It calls fn with the checked bundle, or with nil if the user's
// repository has everything.
func (r Repo) Fetch(ctx context.Context, branches []string, changes bool, dir string, fn func(*gitsafe.Bundle) error) error {
	have, err := knownCommits(ctx, r.Path)
	if err != nil {
		return err
	}
	tmp, remove, err := gitsafe.TempDir("agentlab-sync-*")
	if err != nil {
		return err
	}
	defer remove()
	name := filepath.Join(tmp, "guest.bundle")
	file, err := os.Create(name)
	if err != nil {
		return err
	}
	var in bytes.Buffer
	if err := json.NewEncoder(&in).Encode(guestapi.RepoPack{Branches: branches, Have: have, Changes: changes, Dir: dir}); err != nil {
		return err
	}
	limit := &bounded.Writer{W: file, Left: maxGuestBundle, Fail: gitsafe.ErrOutputTooLarge}
	if r.Left != nil {
		limit.Left, limit.Fail = *r.Left, errSyncTotal
	}
	most := limit.Left
	err = r.Call(ctx, &in, limit, "pack")
	if r.Left != nil {
		*r.Left = limit.Left
		if errors.Is(err, errSyncTotal) {
			*r.Left = 0
			err = errTooMuchToSync()
		}
	}
	if closeErr := file.Close(); err == nil {
		err = closeErr
	}
	if err != nil {
		return err
	}
	if limit.Left == most {
		return fn(nil)
	}
	refs := []string{guestapi.RefChanges}
	for _, branch := range branches {
		refs = append(refs, "refs/heads/"+branch)
	}
	b, err := gitsafe.OpenBundle(ctx, tmp, name, r.Path, refs...)
	if err != nil {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		return agentlab.Errorf(agentlab.CodeDenied, "git rejects the commits of the sandbox: %s", agentlab.WithoutControls(err.Error())).
			WithHint("nothing was fetched")
	}
	defer b.Close()
	return fn(b)
}

// errTooMuchToSync is the error of a fetch that exceeds the total of a terminal.
func errTooMuchToSync() error {
	return agentlab.Errorf(agentlab.CodeLimit, "%w", errSyncTotal).WithHint("look at what it commits: agentlab attach; fetch all of it: agentlab sync")
}

// knownCommits returns the commits of the refs of a repository.
func knownCommits(ctx context.Context, path string) ([]string, error) {
	out, err := gitsafe.Git(ctx, path, "for-each-ref", fmt.Sprintf("--count=%d", maxHave), "--sort=-creatordate",
		"--format=%(if)%(*objectname)%(then)%(*objectname)%(else)%(objectname)%(end)")
	if err != nil {
		return nil, err
	}
	ids := strings.Fields(out)
	if head, err := gitsafe.Git(ctx, path, "rev-parse", "--verify", "--quiet", "HEAD"); err == nil && gitsafe.IsCommit(head) {
		ids = append(ids, head)
	}
	slices.Sort(ids)
	return slices.Compact(ids), nil
}

// Pushed is what a push sends.
type Pushed struct {
	Updates  []guestapi.RepoUpdate
	Checkout string // branch to check out in the main work tree
	Changes  string // commit of uncommitted changes for the work tree in dir
	dir      string
	Modules  []gitsafe.Submodule // that the session does not have
	Bundle   *os.File            // of pack for a session without commits; nil means that push packs
}

// Push sends commits and sets branches. known are commits that the session has. It
// returns why branches were not updated; the name "" is for the submodules.
func (r Repo) Push(ctx context.Context, p Pushed, known []string, m *work.Meter) (map[string]string, error) {
	tmp, remove, err := gitsafe.TempDir("agentlab-push-*")
	if err != nil {
		return nil, err
	}
	defer remove()
	bundle := p.Bundle
	if bundle == nil {
		if bundle, err = r.Pack(ctx, tmp, p, known, m); err != nil {
			return nil, err
		}
		defer func() { _ = bundle.Close() }()
	}
	line, err := json.Marshal(p.receive())
	if err != nil {
		return nil, err
	}
	in := io.Reader(bytes.NewReader(append(line, '\n')))
	if bundle != nil {
		st, err := bundle.Stat()
		if err != nil {
			return nil, err
		}
		m.Start()
		in = io.MultiReader(in, &work.MeterReader{R: bundle, M: m, What: "sending", Total: st.Size()})
	}
	in, stop := r.slowAfterSent(in, m, "receive")
	defer stop()
	var got guestapi.RepoReceived
	if err := r.callFor(ctx, in, &got, "receive"); err != nil {
		return nil, p.pushError(err)
	}
	stop()
	m.Done()
	return p.faults(got), nil
}

// empty reports whether there is nothing to send or to check out.
func (p Pushed) empty() bool {
	return len(p.Updates) == 0 && p.Changes == "" && p.Checkout == "" && len(p.Modules) == 0
}

// receive returns the document for the guest.
func (p Pushed) receive() *guestapi.RepoReceive {
	return &guestapi.RepoReceive{Updates: p.Updates, Changes: p.Changes, Dir: p.dir, Checkout: p.Checkout}
}

// pushError adds what helps against an error of a push.
func (p Pushed) pushError(err error) error {
	if e, ok := errors.AsType[*agentlab.Error](err); ok && e.Code == agentlab.CodeConflict && p.Changes != "" {
		return e.WithHint("if the work tree in the sandbox has changes in the same files, see them with 'agentlab diff', and get them with 'agentlab apply' or discard them in the sandbox")
	}
	return err
}

// faults returns why branches were not updated, for the names that were sent; the name ""
// is for the submodules.
func (p Pushed) faults(got guestapi.RepoReceived) map[string]string {
	faults := map[string]string{}
	for _, u := range p.Updates { // only what was asked for
		if fault, failed := got.Errors[u.Branch]; failed {
			faults[u.Branch] = agentlab.Cut(agentlab.WithoutControls(fault), 300)
		}
	}
	if got.Modules != "" {
		faults[""] = agentlab.Cut(agentlab.WithoutControls(got.Modules), 300)
	}
	return faults
}

// knownTo are the commits that a session has.
func knownTo(st guestapi.RepoState) []string {
	return slices.AppendSeq(slices.Clone(st.Modules), maps.Values(st.Branches))
}

// Pack makes a bundle of what the sandbox lacks; nil if that is nothing.
func (r Repo) Pack(ctx context.Context, tmp string, p Pushed, known []string, m *work.Meter) (*os.File, error) {
	objects, err := gitsafe.Git(ctx, r.Path, "rev-parse", "--path-format=absolute", "--git-path", "objects")
	if err != nil {
		return nil, err
	}
	all := []string{objects}
	for _, module := range p.Modules {
		all = append(all, module.Objects)
	}
	bare, err := gitsafe.ScratchRepo(ctx, tmp, all...)
	if err != nil {
		return nil, err
	}
	var set, revs strings.Builder
	var refs []string
	add := func(ref, commit string) {
		refs = append(refs, ref)
		fmt.Fprintf(&set, "update %s %s\n", ref, commit)
		revs.WriteString(commit + "\n")
	}
	for _, u := range p.Updates {
		if u.Commit != "" {
			add("refs/heads/"+u.Branch, u.Commit)
		}
	}
	if p.Changes != "" {
		add(guestapi.RefChanges, p.Changes)
	}
	for _, module := range p.Modules {
		if ref := guestapi.RefModules + module.Commit; !slices.Contains(refs, ref) {
			add(ref, module.Commit)
		}
	}
	if len(refs) == 0 {
		return nil, nil
	}
	if _, err := (gitsafe.Command{Stdin: strings.NewReader(set.String())}).Run(ctx, bare, "--git-dir="+bare, "update-ref", "--stdin"); err != nil {
		return nil, err
	}
	not, err := notRevs(ctx, bare, known)
	if err != nil {
		return nil, err
	}
	in := gitsafe.Command{Stdin: strings.NewReader(revs.String() + not)}
	if n, err := in.Run(ctx, bare, "--git-dir="+bare, "rev-list", "--count", "--stdin"); err != nil || n == "0" {
		return nil, err
	}
	name := filepath.Join(tmp, "push.bundle")
	in = gitsafe.Command{Stdin: strings.NewReader(not), Stderr: &gitsafe.GitProgress{M: m, What: "packing " + r.Path}}
	args := append([]string{"--git-dir=" + bare, "bundle", "create", "--all-progress", name}, refs...)
	if _, err := in.Run(ctx, bare, append(args, "--stdin")...); err != nil {
		return nil, err
	}
	return os.Open(name)
}

// notRevs returns revisions that exclude the commits that exist.
func notRevs(ctx context.Context, bare string, commits []string) (string, error) {
	var ids strings.Builder
	ids.WriteString(strings.Join(commits, "\n") + "\n")
	out, err := gitsafe.Command{Stdin: strings.NewReader(ids.String())}.Run(ctx, bare, "--git-dir="+bare, "cat-file", "--batch-check=%(objectname) %(objecttype)")
	if err != nil {
		return "", err
	}
	var not strings.Builder
	for line := range strings.Lines(out) {
		if id, ok := strings.CutSuffix(strings.TrimSuffix(line, "\n"), " commit"); ok {
			not.WriteString("^" + id + "\n")
		}
	}
	return not.String(), nil
}

// checkBranch checks the name of a branch in an argument, or in a flag if that is not "".
// An empty name is valid.
func checkBranch(branch, flag string) error {
	e, ok := errors.AsType[*agentlab.Error](agentlab.ValidateRef(branch))
	if !ok {
		return nil
	}
	return work.UsageError{Err: e.WithField(""), Flag: flag}.WithHint("git check-ref-format has the rules for names of branches")
}

// RemoteScheme begins the URL of a session: agentlab://SESSION.
const RemoteScheme = "agentlab://"

// ForcePush returns the command that sets a branch of the session to the branch here.
func (l Link) ForcePush(branch string) string {
	return fmt.Sprintf("git push --force %s %s", l.Remote, branch)
}

// Programs returns what runs in a directory of the repository of a session, relative to
// its top.
func (r Repo) Programs(ctx context.Context, dir string) (p guestapi.RepoPrograms, err error) {
	if err := r.callFor(ctx, nil, &p, "programs", dir); err != nil {
		return p, err
	}
	if len(p.Names) > guestapi.MaxRepoPrograms || p.Shells < 0 {
		return p, guestrun.Invalid("%d programs and %d shells", len(p.Names), p.Shells)
	}
	for i, name := range p.Names {
		p.Names[i] = agentlab.Cut(agentlab.WithoutControls(name), 100)
	}
	return p, nil
}

// defaultProfile is the profile of a session that is created without one, if the daemon
// names none.
const defaultProfile = "interactive"

// errSyncTotal ends the fetch that exceeds syncTotal.
var errSyncTotal = errors.New("the session sent more than 1 GiB of commits")

// JoinGuest returns the absolute path of a checked directory of the repository.
func JoinGuest(dir string) string {
	return strings.TrimSuffix(guestapi.RepoDir+"/"+dir, "/")
}

// ShownGuest is JoinGuest with the name that users see.
func ShownGuest(dir string) string { return ShownPath(JoinGuest(dir)) }

// ShownPath returns a path in the repository of a session with the name that users see.
func ShownPath(dir string) string {
	if rest, ok := strings.CutPrefix(dir, guestapi.RepoDir); ok {
		return guestapi.ProjectDir + rest
	}
	return dir
}
