package gitsafe

import (
	"context"
	"os"
	"time"

	"github.com/agentlab-vm/agentlab/internal/lock"
	"github.com/agentlab-vm/agentlab/internal/work"
)

// LockRepo waits until no other command creates the session of a repository or changes its
// work tree, with a note if that takes a while and quiet is not set.
func LockRepo(ctx context.Context, ui work.UI, path string, quiet bool) (unlock func(), err error) {
	dir, err := Git(ctx, path, "rev-parse", "--path-format=absolute", "--git-common-dir")
	if err != nil {
		return nil, err
	}
	f, err := os.Open(dir)
	if err != nil {
		return nil, work.LocalFault(dir, err)
	}
	for tries := 0; ; tries++ {
		held, err := lock.TryFile(f)
		if err == nil && !held {
			if tries == 0 && !quiet {
				ui.Progressf("waiting for another command in this repository")
			}
			err = work.SleepOr(ctx, 100*time.Millisecond)
		}
		if err != nil {
			_ = f.Close()
			return nil, err
		}
		if held {
			return func() { _ = f.Close() }, nil
		}
	}
}
