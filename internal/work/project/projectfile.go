package project

import (
	"context"
	"strconv"
	"strings"

	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
)

// treeEntry is a file of a commit.
type treeEntry struct {
	mode, kind, id, name string
	size                 int64
}

// treeOf lists the files of a commit: all, or those at paths.
func treeOf(ctx context.Context, path, commit string, paths ...string) ([]treeEntry, error) {
	args := append([]string{"ls-tree", "-r", "-l", "-z", "--full-tree", commit, "--"}, paths...)
	out, err := gitsafe.Command{Raw: true}.Run(ctx, path, args...)
	if err != nil {
		return nil, err
	}
	var list []treeEntry
	for line := range strings.SplitSeq(strings.TrimSuffix(out, "\x00"), "\x00") {
		info, name, _ := strings.Cut(line, "\t")
		f := strings.Fields(info)
		if len(f) != 4 {
			continue
		}
		size, _ := strconv.ParseInt(f[3], 10, 64) // "-" for a submodule
		list = append(list, treeEntry{mode: f[0], kind: f[1], id: f[2], size: size, name: name})
	}
	return list, nil
}
