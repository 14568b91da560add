package cli

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/guestapi"
)

// A link that seems to stay in the work tree, because another link of the
// agent is counted as a folder, leads out of it.
func TestApplyLinkThroughLink(t *testing.T) {
	for name, target := range map[string]string{
		"up through a link": "x/y/top/../../../outside",
		"to the top":        "x/y/top/../../..",
		"up from a file":    "./lines.txt/../../outside",
	} {
		user, bundle := agentLeft(t, map[string]string{"a-new": "x\n", "x/y/top": "-> ../..", "zlink": "-> " + target})
		if _, err := apply(t, user, bundle, true); agentlab.CodeOf(err) != agentlab.CodeDenied {
			to, _ := filepath.EvalSymlinks(filepath.Join(user, "zlink"))
			t.Errorf("%s: got %v; the link leads to %q from %s", name, err, to, user)
		}
		if _, there := tree(t, user)["a-new"]; there {
			t.Errorf("%s: a part was applied", name)
		}
	}
	user, bundle := agentLeft(t, map[string]string{"x/y/top": "-> ../..", "x/up": "-> ./../dir//bin"})
	if _, err := apply(t, user, bundle, true); err != nil {
		t.Errorf("links that stay inside: %v", err)
	}
}

// Changes that git was told not to look for are the user's work like others.
func TestApplyToHiddenChanges(t *testing.T) {
	for _, flag := range []string{"--assume-unchanged", "--skip-worktree"} {
		t.Run(flag, func(t *testing.T) {
			user, bundle := agentLeft(t, map[string]string{"lines.txt": "one\n" + tenLines[2:], "run.sh": "false\n"})
			userGit(t, user, "update-index", flag, "lines.txt", "run.sh")
			if _, err := apply(t, user, bundle, false, filepath.Join(user, "run.sh")); err != nil {
				t.Errorf("a file that is as in the index: %v", err)
			}
			put(t, user, map[string]string{"lines.txt": tenLines + "mine\n"})
			if _, err := apply(t, user, bundle, false); agentlab.CodeOf(err) != agentlab.CodeConflict {
				t.Errorf("got %v, want a conflict", err)
			}
			if got := tree(t, user)["lines.txt"]; got != tenLines+"mine\n" {
				t.Errorf("without --force the file became %q", got)
			}
			if _, err := apply(t, user, bundle, true); err != nil {
				t.Error(err)
			}
			if got := tree(t, user)["lines.txt"]; got != "one\n"+tenLines[2:]+"mine\n" {
				t.Errorf("with --force the file became %q", got)
			}
		})
	}
}

// A small pack must not fill the disk with what it unpacks to.
func TestApplyBounded(t *testing.T) {
	user, bundle := agentLeft(t, map[string]string{"big": strings.Repeat("x", 4<<20)})
	dir := t.TempDir()
	b, err := openBundle(t.Context(), dir, bundle, user, "refs/heads/agentlab/j", guestapi.RefChanges)
	if err != nil {
		t.Fatal(err)
	}
	defer b.close()
	ch, err := openChanges(t.Context(), b, jobSource(api.Job{ID: "j"}, b))
	if err != nil {
		t.Fatal(err)
	}
	list, err := ch.list(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	w, err := openWorkTree(t.Context(), user)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = w.root.Close() }()
	p := &applyPlan{ch: ch, w: w, dir: dir, room: 4<<20 - 1}
	if err := p.make(t.Context(), list); agentlab.CodeOf(err) != agentlab.CodeLimit || agentlab.HintOf(err) == "" {
		t.Errorf("got %v, want the code limit", err)
	}
	if left, _ := filepath.Glob(filepath.Join(dir, "blob-*")); len(left) != 0 {
		t.Errorf("it was unpacked to %v", left)
	}
}
