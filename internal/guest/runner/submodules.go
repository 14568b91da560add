package runner

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path"
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

// checkoutModules checks out the submodules of the clone at top whose commits
// are in the bundle, at the recorded commits, and returns them by path. Each
// becomes a separate repository that borrows the clone's objects. .gitmodules
// is not used: no URL, name or path in it has any effect. aside, if it is not nil,
// gets the path of each submodule that exists and moves it away.
func (r *Runner) checkoutModules(ctx context.Context, top string, sent map[string]bool, aside func(at string) error) (map[string]string, error) {
	if len(sent) == 0 {
		return nil, nil
	}
	root, err := os.OpenRoot(top)
	if err != nil {
		return nil, err
	}
	defer func() { _ = root.Close() }()
	m := &moduleCheckout{r: r, top: top, root: root, sent: sent, aside: aside, done: map[string]string{}}
	var refs strings.Builder
	for commit := range sent { // without the refs git may delete the objects
		refs.WriteString("create " + guestapi.RefModules + commit + " " + commit + "\n")
	}
	if _, err := r.git.runInput(ctx, top, r.git.environ(), strings.NewReader(refs.String()), "update-ref", "--stdin"); err != nil {
		return nil, err
	}
	if err := m.checkoutAll(ctx, ".", 0); err != nil {
		return nil, fmt.Errorf("the submodules cannot be checked out: %w", err)
	}
	return m.done, nil
}

type moduleCheckout struct {
	r    *Runner
	top  string
	root *os.Root
	sent map[string]bool
	done map[string]string

	aside func(at string) error
}

// checkoutAll checks out the submodules of the repository at the path in.
func (m *moduleCheckout) checkoutAll(ctx context.Context, in string, depth int) error {
	var links gitlinks
	if err := m.r.git.stream(ctx, filepath.Join(m.top, in), m.r.git.environ(), &links, "ls-tree", "-r", "-z", "--full-tree", "HEAD"); err != nil {
		return err
	}
	found := false
	for _, l := range links.found {
		if !m.sent[l.commit] || depth >= guestapi.MaxModuleDepth || len(m.done) >= guestapi.MaxModules {
			continue
		}
		if err := modulePath(l.path); err != nil {
			return err
		}
		at := path.Join(in, l.path)
		if err := m.checkoutOne(ctx, at, l.commit); err != nil {
			return fmt.Errorf("%.100q: %w", at, err)
		}
		m.done[at], found = l.commit, true
		if err := m.checkoutAll(ctx, at, depth+1); err != nil {
			return err
		}
	}
	if !found {
		return nil
	}
	_, err := m.r.git.run(ctx, filepath.Join(m.top, in), m.r.git.environ(), "config", "submodule.active", ".")
	return err
}

// modulePath rejects paths that lead out of a work tree or into .git.
func modulePath(p string) error {
	if p == "." || !filepath.IsLocal(p) || path.Clean(p) != p {
		return fmt.Errorf("%.100q leads elsewhere", p)
	}
	for part := range strings.SplitSeq(p, "/") {
		if strings.EqualFold(part, ".git") {
			return fmt.Errorf("%.100q leads into .git", p)
		}
	}
	return nil
}

// checkoutOne creates the repository of a submodule.
func (m *moduleCheckout) checkoutOne(ctx context.Context, at, commit string) error {
	dir := ""
	for part := range strings.SplitSeq(at, "/") {
		dir = path.Join(dir, part)
		if st, err := m.root.Lstat(dir); err != nil || !st.IsDir() {
			return errors.Join(err, errors.New("there is no folder for it"))
		}
	}
	env, full := m.r.git.environ(), filepath.Join(m.top, at)
	if used, err := inUse(full); err != nil {
		return err
	} else if used && m.aside != nil {
		if err := errors.Join(m.aside(at), m.root.Mkdir(at, 0o755)); err != nil {
			return err
		}
	}
	if _, err := m.r.git.run(ctx, full, env, "init", "--quiet", "--template="); err != nil {
		return err
	}
	for _, kv := range repocmd.DurableConfig {
		if _, err := m.r.git.run(ctx, full, env, "config", kv[0], kv[1]); err != nil {
			return err
		}
	}
	// Relative, because the clone is moved later.
	up := strings.Repeat("../", strings.Count(at, "/")+3) + ".git/objects\n"
	if err := m.root.MkdirAll(at+"/.git/objects/info", 0o755); err != nil {
		return err
	}
	if err := m.root.WriteFile(at+"/.git/objects/info/alternates", []byte(up), 0o644); err != nil {
		return err
	}
	return m.r.detach(ctx, full, commit)
}

// gitlinks collects the submodules from the output of git ls-tree -z.
type gitlinks struct {
	rest  []byte
	found []gitlink
}

type gitlink struct{ path, commit string }

func (g *gitlinks) Write(p []byte) (int, error) {
	g.rest = append(g.rest, p...)
	for {
		line, rest, ok := bytes.Cut(g.rest, []byte{0})
		if !ok {
			return len(p), nil
		}
		g.rest = rest
		info, name, _ := strings.Cut(string(line), "\t")
		if f := strings.Fields(info); len(f) == 3 && f[0] == "160000" && isCommit(f[2]) {
			g.found = append(g.found, gitlink{name, f[2]})
		}
	}
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
