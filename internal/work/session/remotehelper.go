package session

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/returncheck"
	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
)

// remoteHelper serves one run of git fetch, push or clone.
type remoteHelper struct {
	ui   work.UI
	repo Repo
	in   *bufio.Scanner
	out  *bufio.Writer
	// state is that of the last list.
	state guestapi.RepoState
}

// ServeRemote answers git's commands about the remote of a session until it ends; path is
// the directory of the user's repository.
func ServeRemote(ctx context.Context, ui work.UI, c *client.Client, name, path string, in io.Reader, out io.Writer) error {
	s, err := c.Session(ctx, name)
	if err != nil {
		return err
	}
	sb, err := Resume(ctx, ui, c, s, 0)
	if err != nil {
		return err
	}
	h := &remoteHelper{ui: ui, repo: Repo{C: c, Sandbox: fmt.Sprint(sb.VMID), Path: path}, in: bufio.NewScanner(in), out: bufio.NewWriter(out)}
	for h.in.Scan() {
		more, err := h.command(ctx, h.in.Text())
		if err != nil {
			return err
		}
		if err := h.out.Flush(); err != nil || !more {
			return err
		}
	}
	return h.in.Err()
}

// command answers a command. more is false after the last one.
func (h *remoteHelper) command(ctx context.Context, line string) (more bool, err error) {
	verb, rest, _ := strings.Cut(line, " ")
	switch verb {
	case "":
		return false, nil
	case "capabilities":
		fmt.Fprint(h.out, "fetch\npush\noption\n\n")
		return true, nil
	case "option":
		fmt.Fprintln(h.out, "unsupported")
		return true, nil
	case "list":
		return true, h.list(ctx)
	case "fetch":
		return true, h.fetch(ctx, h.batch(rest, "fetch "))
	case "push":
		return true, h.push(ctx, h.batch(rest, "push "))
	}
	return false, work.UsageErrorf("git sent the unknown command %q", verb).WithHint("use git 2.30 or later")
}

// batch returns the arguments of consecutive commands, which an empty line ends.
func (h *remoteHelper) batch(first, prefix string) []string {
	list := []string{first}
	for h.in.Scan() && h.in.Text() != "" {
		list = append(list, strings.TrimPrefix(h.in.Text(), prefix))
	}
	return list
}

func (h *remoteHelper) list(ctx context.Context) (err error) {
	if h.state, err = h.repo.State(ctx); err != nil {
		return err
	}
	if len(h.state.Worktrees) == 0 {
		return agentlab.Errorf(agentlab.CodeNotFound, "the session has no repository yet").WithHint("push one: agentlab start")
	}
	for name, commit := range h.state.Branches {
		fmt.Fprintf(h.out, "%s refs/heads/%s\n", commit, name)
	}
	if main := h.state.Worktrees[0]; h.state.Branches[main.Branch] != "" {
		fmt.Fprintf(h.out, "@refs/heads/%s HEAD\n", main.Branch)
	}
	fmt.Fprintln(h.out)
	return nil
}

// fetch gets the objects of branches. Git sets its refs afterwards.
func (h *remoteHelper) fetch(ctx context.Context, wanted []string) error {
	var branches []string
	for _, line := range wanted {
		_, ref, _ := strings.Cut(line, " ")
		branch, ok := strings.CutPrefix(ref, "refs/heads/")
		if ref == "HEAD" {
			branch, ok = h.state.Worktrees[0].Branch, true
		}
		if !ok || h.state.Branches[branch] == "" {
			return agentlab.Errorf(agentlab.CodeNotFound, "the session has no %q", ref)
		}
		if !slices.Contains(branches, branch) {
			branches = append(branches, branch)
		}
	}
	err := h.repo.Fetch(ctx, branches, false, "", func(b *gitsafe.Bundle) error {
		if b == nil {
			return nil
		}
		missing, err := h.repo.FetchLFS(ctx, b)
		if err != nil {
			return err
		}
		gitsafe.NoteLFS(h.ui, missing)
		return b.Keep(ctx, nil)
	})
	if err != nil {
		return err
	}
	for i, branch := range branches { // it may have been reset since the list
		if _, err := gitsafe.Git(ctx, h.repo.Path, "cat-file", "-e", h.state.Branches[branch]+"^{commit}"); err != nil {
			return agentlab.Errorf(agentlab.CodeConflict, "branch %s of the session has changed", branch).WithHint("run the command again")
		}
		if i == maxJudged {
			h.ui.Progressf("note: only %d branches are checked for files that programs of this machine execute or obey", maxJudged)
		}
		if i >= maxJudged {
			continue
		}
		if err := h.judge(ctx, h.state.Branches[branch]); err != nil {
			return err
		}
	}
	fmt.Fprintln(h.out)
	return nil
}

// judge is the return check of a commit. Git merges it next if the user has run git pull,
// so files that are refused end the fetch; others are named.
func (h *remoteHelper) judge(ctx context.Context, commit string) error {
	found, err := gitsafe.JudgeFetched(ctx, h.repo.Path, commit)
	if err != nil {
		return err
	}
	if bad := gitsafe.OfLevel(found, returncheck.Refused); len(bad) > 0 {
		return gitsafe.Admit(ctx, h.ui, bad, gitsafe.Admission{Dir: h.repo.Path, Verb: "fetched", Show: "agentlab sync --fetch-only"})
	}
	gitsafe.NoteFetched(h.ui, found, "")
	return nil
}

// push sets branches of the session.
func (h *remoteHelper) push(ctx context.Context, specs []string) error {
	var p Pushed
	faults := map[string]string{}
	for _, spec := range specs {
		var u guestapi.RepoUpdate
		spec, u.Force = strings.CutPrefix(spec, "+")
		from, to, _ := strings.Cut(spec, ":")
		branch, ok := strings.CutPrefix(to, "refs/heads/")
		if !ok || branch == "" || agentlab.ValidateRef(branch) != nil {
			faults[to] = "only branches can be pushed to a session"
			continue
		}
		u.Branch = branch
		if from != "" {
			commit, err := gitsafe.Git(ctx, h.repo.Path, "rev-parse", "--verify", "--quiet", "--end-of-options", from+"^{commit}")
			if err != nil || !gitsafe.IsCommit(gitsafe.LastLine(commit)) {
				faults[to] = "not a commit"
				continue
			}
			u.Commit = gitsafe.LastLine(commit)
		}
		p.Updates = append(p.Updates, u)
	}
	m := h.ui.Meter()
	defer m.Done()
	got, err := h.repo.Push(ctx, p, knownTo(h.state), m)
	if err != nil {
		return err
	}
	for _, u := range p.Updates {
		faults["refs/heads/"+u.Branch] = got[u.Branch]
	}
	for ref, fault := range faults {
		if fault == "" {
			fmt.Fprintf(h.out, "ok %s\n", ref)
		} else {
			fmt.Fprintf(h.out, "error %s %s\n", ref, strings.ReplaceAll(fault, "\n", " "))
		}
	}
	fmt.Fprintln(h.out)
	return nil
}
