package runner

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
)

// While git moves a branch to packed-refs, as it does in the background after a
// commit, the branch is never missing.
func TestHeadsWhileRefsArePacked(t *testing.T) {
	dir := t.TempDir()
	id := strings.Repeat("1", 40)
	writeFile(t, filepath.Join(dir, ".git", "refs", "heads", "main"), id+"\n")
	g, err := openGitDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer g.close()
	const branches = 2000
	var made atomic.Int64
	packed := make(chan error, 1)
	go func() {
		all := ""
		for n := range branches {
			loose := filepath.Join(dir, ".git", "refs", "heads", fmt.Sprintf("b%d", n))
			err := os.WriteFile(loose, []byte(id+"\n"), 0o600)
			if err == nil {
				made.Store(int64(n) + 1)
				all += id + " refs/heads/" + filepath.Base(loose) + "\n"
				err = g.write("packed-refs", all)
			}
			if err == nil {
				err = os.Remove(loose)
			}
			if err != nil {
				packed <- err
				return
			}
		}
		packed <- nil
	}()
	for {
		select {
		case err := <-packed:
			if err != nil {
				t.Error(err)
			}
			return
		default:
		}
		n := made.Load()
		heads, err := g.heads()
		if err != nil {
			t.Fatal(err)
		}
		if last := fmt.Sprintf("b%d", n-1); n > 0 && heads[last] == "" {
			t.Fatalf("%s is missing", last)
		}
	}
}
