package source

import (
	"errors"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
	"github.com/agentlab-vm/agentlab/internal/work/worktest"
)

// A link that seems to stay in the work tree, because another link of the
// agent is counted as a folder, leads out of it.
func TestApplyLinkThroughLink(t *testing.T) {
	t.Parallel()
	for name, target := range map[string]string{
		"up through a link": "x/y/top/../../../outside",
		"to the top":        "x/y/top/../../..",
		"up from a file":    "./lines.txt/../../outside",
	} {
		user, bundle := worktest.AgentLeft(t, map[string]string{"a-new": "x\n", "x/y/top": "-> ../..", "zlink": "-> " + target})
		if out, err := apply(t, user, bundle, true); err != nil || out != "a-new\nx/y/top\n" {
			t.Errorf("%s: applied %q, %v", name, out, err)
		}
		if to, err := os.Readlink(filepath.Join(user, "zlink")); err == nil {
			t.Errorf("%s: there is a link to %q", name, to)
		}
	}
	user, bundle := worktest.AgentLeft(t, map[string]string{"x/y/top": "-> ../..", "x/up": "-> ./../dir//bin"})
	if _, err := apply(t, user, bundle, true); err != nil {
		t.Errorf("links that stay inside: %v", err)
	}
}

// Changes that git was told not to look for are the user's work like others.
func TestApplyToHiddenChanges(t *testing.T) {
	t.Parallel()
	for _, flag := range []string{"--assume-unchanged", "--skip-worktree"} {
		t.Run(flag, func(t *testing.T) {
			user, bundle := worktest.AgentLeft(t, map[string]string{"lines.txt": "one\n" + worktest.TenLines[2:], "run.sh": "false\n"})
			worktest.Git(t, user, "update-index", flag, "lines.txt", "run.sh")
			if _, err := apply(t, user, bundle, false, filepath.Join(user, "run.sh")); err != nil {
				t.Errorf("a file that is as in the index: %v", err)
			}
			worktest.Put(t, user, map[string]string{"lines.txt": worktest.TenLines + "mine\n"})
			if _, err := apply(t, user, bundle, false); agentlab.CodeOf(err) != agentlab.CodeConflict {
				t.Errorf("got %v, want a conflict", err)
			}
			if got := worktest.Tree(t, user)["lines.txt"]; got != worktest.TenLines+"mine\n" {
				t.Errorf("without --force the file became %q", got)
			}
			if _, err := apply(t, user, bundle, true); err != nil {
				t.Error(err)
			}
			if got := worktest.Tree(t, user)["lines.txt"]; got != "one\n"+worktest.TenLines[2:]+"mine\n" {
				t.Errorf("with --force the file became %q", got)
			}
		})
	}
}

// A file that the user changes while the command asks a question is not replaced, and
// nothing else is.
func TestApplyAfterAnEdit(t *testing.T) {
	t.Parallel()
	for name, edit := range map[string]func(user string){
		"changed": func(user string) { worktest.Put(t, user, map[string]string{"lines.txt": "mine\n"}) },
		"created": func(user string) { worktest.Put(t, user, map[string]string{"new": "mine\n"}) },
		"deleted": func(user string) { _ = os.Remove(filepath.Join(user, "lines.txt")) },
	} {
		t.Run(name, func(t *testing.T) {
			user, bundle := worktest.AgentLeft(t, map[string]string{"a": "agent\n", "lines.txt": "agent\n", "new": "agent\n"})
			p, list := newPlan(t, user, bundle, maxApplied)
			if err := errors.Join(p.make(t.Context(), list), p.merge(t.Context())); err != nil {
				t.Fatal(err)
			}
			edit(user)
			before := worktest.Tree(t, user)
			if err := p.apply(); agentlab.CodeOf(err) != agentlab.CodeConflict || !maps.Equal(worktest.Tree(t, user), before) {
				t.Errorf("got %v; the work tree is %q", err, worktest.Tree(t, user))
			}
			if _, err := apply(t, user, bundle, true, filepath.Join(user, "a")); err != nil {
				t.Error(err)
			}
		})
	}
}

// newPlan returns an empty plan and the changes in a bundle.
func newPlan(t *testing.T, user, bundle string, room int64) (*applyPlan, []gitsafe.Change) {
	t.Helper()
	dir := t.TempDir()
	b, err := gitsafe.OpenBundle(t.Context(), dir, bundle, user, "refs/heads/agentlab/j", guestapi.RefChanges)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.Close)
	ch, err := Open(t.Context(), b, OfJob(api.Job{ID: "j"}, b))
	if err != nil {
		t.Fatal(err)
	}
	list, err := ch.List(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	w, err := openWorkTree(t.Context(), user)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = w.root.Close() })
	return &applyPlan{ch: ch, w: w, Dir: dir, room: room}, list
}

// A small pack must not fill the disk with what it unpacks to.
func TestApplyBounded(t *testing.T) {
	t.Parallel()
	user, bundle := worktest.AgentLeft(t, map[string]string{"big": strings.Repeat("x", 4<<20)})
	p, list := newPlan(t, user, bundle, 4<<20-1)
	if err := p.make(t.Context(), list); agentlab.CodeOf(err) != agentlab.CodeLimit || agentlab.HintOf(err) == "" {
		t.Errorf("got %v, want the code limit", err)
	}
	if left, _ := filepath.Glob(filepath.Join(p.Dir, "blob-*")); len(left) != 0 {
		t.Errorf("it was unpacked to %v", left)
	}
}
