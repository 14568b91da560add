package cli

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
	"github.com/agentlab-vm/agentlab/internal/work/session"
)

// linkedBranches returns the branches of the sessions of the repository in the current
// directory that are for one, by the IDs of the sessions.
func linkedBranches(ctx context.Context) map[string]string {
	out, _ := gitsafe.Git(ctx, ".", "config", "--local", "--get-regexp", `^remote\.agentlab-.*\.(url|agentlabbranch)$`) // "" outside of a repository
	ids, branches := map[string]string{}, map[string]string{}
	for line := range strings.Lines(out) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		if remote, ok := strings.CutSuffix(key, ".url"); ok {
			ids[remote] = strings.TrimPrefix(value, session.RemoteScheme)
		} else if remote, ok := strings.CutSuffix(key, ".agentlabbranch"); ok {
			branches[remote] = value
		}
	}
	of := map[string]string{}
	for remote, branch := range branches {
		of[ids[remote]] = branch
	}
	return of
}

// clearWay deletes refs of branches that the session no longer has and that are in the way
// of one of branches: git cannot have both a and a/b. A ref of their commits is kept.
func (a *App) clearWay(ctx context.Context, w *openedSession, have map[string]string, branches []string) error {
	var update strings.Builder
	for _, old := range slices.Sorted(maps.Keys(have)) {
		inWay := func(branch string) bool {
			return strings.HasPrefix(branch, old+"/") || strings.HasPrefix(old, branch+"/")
		}
		if i := slices.IndexFunc(branches, inWay); i >= 0 && w.state.Branches[old] == "" {
			kept := "refs/agentlab/stale/" + w.link.Remote + "/" + have[old]
			fmt.Fprintf(&update, "update %s %s\ndelete %s %s\n", kept, have[old], w.link.Ref(old), have[old])
			a.Progressf("note: branch %s of the session is gone, and %s has taken its place\n  → its last commit: git log %s", old, branches[i], kept)
		}
	}
	if update.Len() == 0 {
		return nil
	}
	_, err := (gitsafe.Command{Stdin: strings.NewReader(update.String())}).Run(ctx, w.Path, "update-ref", "--no-deref", "--stdin")
	return err
}
