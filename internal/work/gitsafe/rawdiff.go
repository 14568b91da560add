package gitsafe

import (
	"context"
	"errors"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/bounded"
)

// MaxNames limits the names of the files that differ, in bytes.
const MaxNames = 16 << 20

// EmptyTree is the object name of a tree without entries.
const EmptyTree = "4b825dc642cb6eb9a060e54bf8d69288fbee4904"

// Change is one file that differs.
type Change struct {
	Path             string
	Status           byte // A, D, M or T, see git-diff-tree(1)
	OldMode, NewMode string
	OldBlob, NewBlob string
}

// RawDiff returns the files in which two trees differ, ordered by path. run runs git; the
// output is limited to that of about most files.
func RawDiff(ctx context.Context, run func(context.Context, Command, ...string) (string, error), from, to string, most int) ([]Change, error) {
	out := bounded.Head{Max: MaxNames + most*100, Fail: ErrOutputTooLarge}
	if _, err := run(ctx, Command{Stdout: &out}, "diff-tree", "-r", "-z", "--raw", "--no-renames", "--full-index", from, to); err != nil {
		switch {
		case ctx.Err() != nil:
			return nil, ctx.Err()
		case out.Over:
			return nil, agentlab.Errorf(agentlab.CodeLimit, "too many files have changed")
		}
		return nil, agentlab.Errorf(agentlab.CodeConflict, "git cannot list the changes: %s", agentlab.WithoutControls(err.Error()))
	}
	if out.String() == "" {
		return nil, nil
	}
	fields := strings.Split(strings.TrimSuffix(out.String(), "\x00"), "\x00")
	var list []Change
	for i := 0; i+1 < len(fields); i += 2 {
		f := strings.Fields(strings.TrimPrefix(fields[i], ":"))
		if len(f) != 5 || len(f[4]) != 1 {
			return nil, agentlab.Errorf(agentlab.CodeConflict, "git lists the changes in an unknown format")
		}
		list = append(list, Change{Path: fields[i+1], Status: f[4][0], OldMode: f[0], NewMode: f[1], OldBlob: f[2], NewBlob: f[3]})
	}
	return list, nil
}

// ErrOutputTooLarge means that git, or a guest, has sent more than a command may.
var ErrOutputTooLarge = errors.New("the output of git is too large")

// Modes of files in git's trees.
const (
	ModeNone    = "000000" // no file
	ModeFile    = "100644"
	ModeProgram = "100755"
	ModeLink    = "120000"
	ModeModule  = "160000"
)

// NoBlob is the object name of a file that does not exist.
const NoBlob = "0000000000000000000000000000000000000000"

// Regular reports whether a mode is of a regular file.
func Regular(mode string) bool { return mode == ModeFile || mode == ModeProgram }
