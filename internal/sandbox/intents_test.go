package sandbox

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
)

func TestDestroyIntentsOfAnOlderVersion(t *testing.T) {
	n := destroyIntents{t.TempDir()}
	if err := os.WriteFile(filepath.Join(n.dir, "1003-4f9d"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, uid := range []string{"4f9d", "77aa", "77aa"} { // it may be stored again
		if err := n.put(uid); err != nil {
			t.Fatal(err)
		}
	}
	left := func(want ...string) {
		t.Helper()
		uids, err := n.list()
		if slices.Sort(uids); err != nil || !slices.Equal(slices.Compact(uids), want) {
			t.Errorf("stored: %q, %v; want %q", uids, err, want)
		}
	}
	left("4f9d", "77aa")
	for range 2 { // it need not be stored
		if err := n.remove("4f9d"); err != nil {
			t.Fatal(err)
		}
	}
	left("77aa")
}
