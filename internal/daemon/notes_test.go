package daemon

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
)

func TestNotesOfAnOlderVersion(t *testing.T) {
	n := destroyIntents{t.TempDir()}
	if err := os.WriteFile(filepath.Join(n.dir, "1003-4f9d"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, uid := range []string{"4f9d", "77aa", "77aa"} { // a note may be put again
		if err := n.Put(uid); err != nil {
			t.Fatal(err)
		}
	}
	left := func(want ...string) {
		t.Helper()
		uids, err := n.List()
		if slices.Sort(uids); err != nil || !slices.Equal(slices.Compact(uids), want) {
			t.Errorf("noted: %q, %v; want %q", uids, err, want)
		}
	}
	left("4f9d", "77aa")
	for range 2 { // there need not be a note
		if err := n.Remove("4f9d"); err != nil {
			t.Fatal(err)
		}
	}
	left("77aa")
}
