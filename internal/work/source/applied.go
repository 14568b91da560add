package source

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/agentlab-vm/agentlab/internal/returncheck"
	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
)

// appliedRefs begins the refs for what commands have applied to a work tree. It is the base
// of the next merge: the agent continues from its own version, which is the user's now.
// Each source and work tree has a ref, to a commit with the versions.
const appliedRefs = "refs/agentlab/applied/"

// appliedRef returns the ref for what a source has applied to a work tree.
func (s Source) appliedRef(top string) string {
	sum := sha256.Sum256([]byte(top + "\x00" + s.Dir))
	return appliedRefs + s.ID + "/" + hex.EncodeToString(sum[:4])
}

// ForgetApplied deletes the refs for what was applied from a source with an ID.
func ForgetApplied(ctx context.Context, path, id string) error {
	return gitsafe.DeleteRefs(ctx, path, appliedRefs+id)
}

// appliedFile is a version of a file that was applied.
type appliedFile struct {
	indexEntry            // gitsafe.ModeNone: it was deleted
	base       indexEntry // what the agent had changed: its commit's version
}

// The commit at an appliedRef has a directory with the versions, and a file with the bases
// of all files, as git ls-tree -z prints entries. The objects of bases need not be here. A
// file that has only a base was deleted.
const (
	appliedNew   = "new/"
	appliedBases = "bases"
)

// readApplied returns what was applied before, by path.
func readApplied(ctx context.Context, repo, ref string) (map[string]appliedFile, error) {
	if _, err := gitsafe.Git(ctx, repo, "rev-parse", "--verify", "--quiet", ref); err != nil {
		return nil, ctx.Err() // nothing was
	}
	bases, err := gitsafe.Command{Raw: true}.Run(ctx, repo, "cat-file", "blob", ref+":"+appliedBases)
	if err != nil {
		return nil, err
	}
	applied := map[string]appliedFile{}
	for line := range strings.SplitSeq(bases, "\x00") {
		info, name, _ := strings.Cut(line, "\t")
		if mode, blob, ok := strings.Cut(info, " "); ok && returncheck.BadPath(name) == "" {
			applied[name] = appliedFile{indexEntry{gitsafe.ModeNone, gitsafe.NoBlob}, indexEntry{mode, blob}}
		}
	}
	out, err := gitsafe.Command{Raw: true}.Run(ctx, repo, "ls-tree", "-r", "-z", "--full-tree", ref)
	if err != nil {
		return nil, err
	}
	for line := range strings.SplitSeq(out, "\x00") {
		info, full, _ := strings.Cut(line, "\t")
		f := strings.Fields(info)
		name, isNew := strings.CutPrefix(full, appliedNew)
		if v, is := applied[name]; isNew && is && len(f) == 3 {
			v.indexEntry = indexEntry{f[0], f[2]}
			applied[name] = v
		}
	}
	return applied, nil
}

// rebase replaces the base of a change by what was applied before, if the agent's commit
// is still the same and the file is not as there. own reports that the file has no changes
// of the user.
func (p *applyPlan) rebase(c gitsafe.Change, ours fileVersion) (_ gitsafe.Change, own bool) {
	before, is := p.applied[c.Path]
	if !is || ours.Blob == c.OldBlob || before.base != (indexEntry{c.OldMode, c.OldBlob}) {
		return c, false
	}
	c.OldMode, c.OldBlob = before.mode, before.blob
	return c, ours.Blob == before.blob && ours.Mode == before.mode
}

// record stores the versions that are in the work tree now.
func (p *applyPlan) record(ctx context.Context) error {
	ref := p.ch.Of.appliedRef(p.w.top)
	in := gitsafe.Command{Env: append(gitsafe.OwnIdentity(), "GIT_INDEX_FILE="+filepath.Join(p.Dir, "applied-index"))}
	if p.applied != nil {
		if _, err := in.Run(ctx, p.w.top, "read-tree", ref); err != nil {
			return err
		}
	} else {
		p.applied = map[string]appliedFile{}
	}
	var files, entries, bases strings.Builder
	stored := map[string]bool{}
	for _, c := range p.took {
		if _, err := os.Lstat(p.blobFile(c.NewBlob)); err == nil && !stored[c.NewBlob] {
			stored[c.NewBlob] = true
			fmt.Fprintln(&files, p.blobFile(c.NewBlob))
		}
		mode := c.NewMode
		switch {
		case mode == gitsafe.ModeNone:
			mode = "0"
		case !stored[c.NewBlob]:
			continue // the user had it already
		}
		fmt.Fprintf(&entries, "%s %s\t%s%s\x00", mode, c.NewBlob, appliedNew, c.Path)
		p.applied[c.Path] = appliedFile{indexEntry{c.NewMode, c.NewBlob}, indexEntry{c.OldMode, c.OldBlob}}
	}
	if entries.Len() == 0 {
		return nil
	}
	for _, name := range slices.Sorted(maps.Keys(p.applied)) {
		fmt.Fprintf(&bases, "%s %s\t%s\x00", p.applied[name].base.mode, p.applied[name].base.blob, name)
	}
	id, err := (gitsafe.Command{Stdin: strings.NewReader(bases.String())}).Run(ctx, p.w.top, "hash-object", "-w", "--no-filters", "--stdin")
	if err != nil {
		return err
	}
	fmt.Fprintf(&entries, "%s %s\t%s\x00", gitsafe.ModeFile, id, appliedBases)
	store, index := in, in
	store.Stdin, index.Stdin = strings.NewReader(files.String()), strings.NewReader(entries.String())
	if _, err := store.Run(ctx, p.w.top, "hash-object", "-w", "--no-filters", "--stdin-paths"); err != nil {
		return err
	}
	if _, err := index.Run(ctx, p.w.top, "update-index", "-z", "--index-info"); err != nil {
		return err
	}
	tree, err := in.Run(ctx, p.w.top, "write-tree")
	if err != nil {
		return err
	}
	commit, err := in.Run(ctx, p.w.top, "commit-tree", tree, "-m", "Applied changes of "+p.ch.Of.Kind+" "+p.ch.Of.ID)
	if err != nil {
		return err
	}
	_, err = gitsafe.Git(ctx, p.w.top, "update-ref", "--no-deref", ref, commit)
	return err
}
