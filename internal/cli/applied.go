package cli

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"path/filepath"
	"strings"

	"github.com/agentlab-vm/agentlab/internal/returncheck"
)

// appliedRefs begins the refs for what commands have applied to a work tree. It is the base
// of the next merge: the agent continues from its own version, which is the user's now.
// Each source and work tree has a ref, to a commit with the versions.
const appliedRefs = "refs/agentlab/applied/"

// appliedRef returns the ref for what a source has applied to a work tree.
func (s changeSource) appliedRef(top string) string {
	sum := sha256.Sum256([]byte(top + "\x00" + s.dir))
	return appliedRefs + s.id + "/" + hex.EncodeToString(sum[:4])
}

// readApplied returns what was applied before, by path.
func readApplied(ctx context.Context, repo, ref string) (map[string]indexEntry, error) {
	if _, err := git(ctx, repo, "rev-parse", "--verify", "--quiet", ref); err != nil {
		return nil, ctx.Err() // nothing was
	}
	out, err := gitInput{raw: true}.run(ctx, repo, "ls-tree", "-r", "-z", "--full-tree", ref)
	if err != nil {
		return nil, err
	}
	applied := map[string]indexEntry{}
	for line := range strings.SplitSeq(out, "\x00") {
		info, name, _ := strings.Cut(line, "\t")
		if f := strings.Fields(info); len(f) == 3 && returncheck.BadPath(name) == "" {
			applied[name] = indexEntry{f[0], f[2]}
		}
	}
	return applied, nil
}

// rebase replaces the base of a change by what was applied before, unless the file is as
// in the commit that the agent started from. own reports that the file has no changes of
// the user.
func (p *applyPlan) rebase(c change, ours fileVersion) (_ change, own bool) {
	before, is := p.applied[c.path]
	if !is || ours.blob == c.oldBlob {
		return c, false
	}
	c.oldMode, c.oldBlob = before.mode, before.blob
	return c, ours.blob == before.blob && ours.mode == before.mode
}

// record stores the versions that were applied.
func (p *applyPlan) record(ctx context.Context) error {
	if len(p.steps) == 0 {
		return nil
	}
	ref := p.ch.of.appliedRef(p.w.top)
	in := gitInput{env: append(identityOfAgentLab(), "GIT_INDEX_FILE="+filepath.Join(p.dir, "applied-index"))}
	if p.applied != nil {
		if _, err := in.run(ctx, p.w.top, "read-tree", ref); err != nil {
			return err
		}
	}
	var files, entries strings.Builder
	stored := map[string]bool{}
	for _, s := range p.steps {
		if s.newMode != modeNone && !stored[s.newBlob] {
			stored[s.newBlob] = true
			fmt.Fprintln(&files, p.blobFile(s.newBlob))
		}
		mode, blob := s.newMode, s.newBlob
		if mode == modeNone {
			mode = "0"
		}
		fmt.Fprintf(&entries, "%s %s\t%s\x00", mode, blob, s.path)
	}
	store, index := in, in
	store.stdin, index.stdin = strings.NewReader(files.String()), strings.NewReader(entries.String())
	if _, err := store.run(ctx, p.w.top, "hash-object", "-w", "--no-filters", "--stdin-paths"); err != nil {
		return err
	}
	if _, err := index.run(ctx, p.w.top, "update-index", "-z", "--index-info"); err != nil {
		return err
	}
	tree, err := in.run(ctx, p.w.top, "write-tree")
	if err != nil {
		return err
	}
	commit, err := in.run(ctx, p.w.top, "commit-tree", tree, "-m", "Applied changes of "+p.ch.of.kind+" "+p.ch.of.id)
	if err != nil {
		return err
	}
	_, err = git(ctx, p.w.top, "update-ref", "--no-deref", ref, commit)
	return err
}

// identityOfAgentLab is the environment for commits that no user sees.
func identityOfAgentLab() []string {
	return []string{
		"GIT_AUTHOR_NAME=AgentLab", "GIT_AUTHOR_EMAIL=agentlab@localhost", "GIT_COMMITTER_NAME=AgentLab", "GIT_COMMITTER_EMAIL=agentlab@localhost",
	}
}
