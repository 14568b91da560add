package runner

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/guest/repocmd"
)

// bundleModules returns the commits of submodules in a bundle, by the names of
// its refs.
func bundleModules(refs map[string]string) map[string]bool {
	out := map[string]bool{}
	for name, commit := range refs {
		if at, ok := strings.CutPrefix(name, guestapi.RefModules); ok && at == commit {
			out[commit] = true
		}
	}
	return out
}

// checkoutModules checks out the submodules of the clone at top whose commits are in the
// bundle, and returns them by path. aside, if it is not nil, gets the path of each
// submodule that exists and moves it away.
func (r *Runner) checkoutModules(ctx context.Context, top string, sent map[string]bool, aside func(at string) error) (map[string]string, error) {
	m := repocmd.Modules{Top: top, Objects: filepath.Join(top, ".git", "objects"), Sent: sent}
	m.Git = func(dir string, in io.Reader, out io.Writer, args ...string) error {
		return r.git.exec(ctx, dir, r.git.environ(), in, out, args...)
	}
	if aside != nil {
		m.InUse = func(at, _ string) (bool, error) {
			return false, errors.Join(aside(at), os.Mkdir(filepath.Join(top, at), 0o755))
		}
	}
	return m.CheckOut()
}

// collectModules stores the agent's changes in submodules as diffs, because
// neither their commits nor their files are in the bundle.
func (r *Runner) collectModules(ctx context.Context, rp repo, tmp string, c *collected) {
	ctx, cancel := context.WithTimeout(ctx, r.cfg.Timing.GitTimeout)
	defer cancel()
	for i, at := range slices.Sorted(maps.Keys(rp.Modules)) {
		sub := repo{Path: filepath.Join(rp.Path, at), Base: rp.Modules[at], Branch: workBranch(r.job), Lender: rp.Path}
		name := filepath.Join(tmp, fmt.Sprintf("module-%d.diff", i))
		var (
			size int64
			cut  bool
			left []string
		)
		t, err := r.newScratchRepo(sub, filepath.Join(tmp, fmt.Sprintf("module-%d", i)))
		if err == nil {
			_, left, err = t.commitChanges(ctx, r.job.ID)
			c.warnLeft(left)
		}
		if err == nil {
			size, cut, err = t.writeDiff(ctx, name)
		}
		if err != nil {
			c.warn("what changed in the submodule %.100q is not known: %v", at, err)
			continue
		}
		artifact := "submodules/" + strings.TrimPrefix(outputPath(at), "outputs/") + ".diff"
		switch {
		case size == 0 && !cut:
		case cut || agentlab.ValidateArtifactPath(artifact) != nil:
			c.warn("the changes in the submodule %.100q are not kept whole", at)
		default:
			c.Files = append(c.Files, upload{Path: artifact, file: name, vital: true})
			c.warn("the changes in the submodule %.100q are kept as the artifact %s only", at, artifact)
		}
	}
}
