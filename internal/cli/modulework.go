package cli

import (
	"maps"
	"path"
	"slices"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/session"
)

// maxModuleNotes limits the submodules that one command names.
const maxModuleNotes = 5

// noteModules names the submodules with commits of the agent, which come in no bundle of the
// repository, and the commands that bring them to the submodules here. A branch has them
// there: 'git submodule update' uses no commit that is on none.
func (a *App) noteModules(w *openedSession) {
	for i, dir := range slices.Sorted(maps.Keys(w.state.ModuleWork)) {
		if i == maxModuleNotes {
			a.Progressf("note: %d other submodules have commits, too", len(w.state.ModuleWork)-i)
			return
		}
		n := agentlab.Plural(w.state.ModuleWork[dir], "commit")
		if !agentlab.IsPrintable(dir) { // no command would be right
			a.Progressf("note: a sync does not bring %s in the submodule %s", n, agentlab.WithoutControls(session.ShownGuest(dir)))
			continue
		}
		here := dir
		for _, t := range w.state.Worktrees {
			if rest, ok := strings.CutPrefix(dir, t.Dir+"/"); ok && t.Dir != "" {
				here = rest
			}
		}
		up := strings.Repeat("../", strings.Count(path.Clean(here), "/")+1)
		a.Progressf("note: a sync does not bring %s in the submodule %s; at the top of the repository:\n  → agentlab exec %s -- git -C %s bundle create - HEAD >agentlab.bundle\n  → git -C %s -c fetch.fsckObjects=true fetch %sagentlab.bundle HEAD:%s",
			n, session.ShownGuest(dir), w.session.Name, work.ShellQuote(guestapi.ProjectDir+"/"+dir), work.ShellQuote(here), up, moduleBranch)
	}
}

// moduleBranch is the branch for the commits of a session in a submodule.
const moduleBranch = "agentlab"
