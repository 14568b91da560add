package image

import (
	"context"
	"errors"
	"os"
	"testing"

	"github.com/agentlab-vm/agentlab"
)

// An image of a sandbox is an image like others, and each is another one. A failed copy
// of the disk leaves nothing.
func TestCommit(t *testing.T) {
	s := newStore(t, "1")
	base := mustEnsure(t, s, "base")
	disk := func(text string) func(context.Context, string) error {
		return func(_ context.Context, path string) error { return os.WriteFile(path, []byte(text), 0o600) }
	}
	first, err := s.Commit(t.Context(), "app", base, disk("first"), nil)
	if err != nil {
		t.Fatal(err)
	}
	second, err := s.Commit(t.Context(), "app", base, disk("second disk"), func(string) {})
	if err != nil {
		t.Fatal(err)
	}
	got, err := s.Resolve(t.Context(), "app")
	if err != nil || got.Digest != second.Digest || second.Digest == first.Digest || got.From != base.Ref() || got.SizeBytes != 11 {
		t.Errorf("%+v, %v", got, err)
	}
	if text, err := os.ReadFile(first.RootDisk()); err != nil || string(text) != "first" {
		t.Errorf("the first one has %q, %v", text, err)
	}
	for _, path := range []string{got.RootDisk(), got.Kernel(), got.Modules()} {
		if st, err := os.Stat(path); err != nil || st.Mode().Perm() != 0o444 {
			t.Errorf("%s: %v, %v", path, st.Mode(), err)
		}
	}
	full := errors.New("full")
	if _, err := s.Commit(t.Context(), "app", base, func(_ context.Context, path string) error {
		return errors.Join(os.WriteFile(path, []byte("a part"), 0o600), full)
	}, nil); !errors.Is(err, full) {
		t.Errorf("a disk that cannot be copied: %v", err)
	}
	if _, err := s.Commit(t.Context(), "base", base, disk("x"), nil); agentlab.CodeOf(err) != agentlab.CodeInvalid {
		t.Errorf("with the name of a shipped image: %v", err)
	}
	if _, err := s.Commit(t.Context(), "../app", base, disk("x"), nil); err == nil {
		t.Error("with a path as the name")
	}
	if left := buildDirs(t, s); len(left) != 0 {
		t.Errorf("left: %q", left)
	}
	if now, err := s.Resolve(t.Context(), "app"); err != nil || now.Digest != second.Digest {
		t.Errorf("after errors: %+v, %v", now, err)
	}
}
