package bounded_test

import (
	"bytes"
	"errors"
	"testing"

	"pgregory.net/rapid"

	"github.com/agentlab-vm/agentlab/internal/bounded"
)

// However a text is split into writes, Tail has its last bytes and Head its
// first.
func TestTailAndHead(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		most := rapid.IntRange(0, 20).Draw(t, "max")
		tail, head, failing := bounded.Tail{Max: most}, bounded.Head{Max: most}, bounded.Head{Max: most, Fail: errors.ErrUnsupported}
		var all []byte
		for _, p := range rapid.SliceOf(rapid.SliceOfN(rapid.Byte(), 0, 30)).Draw(t, "writes") {
			all = append(all, p...)
			for _, w := range []interface{ Write([]byte) (int, error) }{&tail, &head} {
				if n, err := w.Write(p); n != len(p) || err != nil {
					t.Fatalf("%T: %d, %v", w, n, err)
				}
			}
			if n, err := failing.Write(p); (err == nil) != (len(all) <= most || len(p) == 0) || err == nil && n != len(p) {
				t.Fatalf("%d bytes: %d, %v", len(all), n, err)
			}
		}
		first, last := all[:min(len(all), most)], all[max(0, len(all)-most):]
		if tail.String() != string(last) || head.String() != string(first) || failing.String() != string(first) {
			t.Fatalf("%q: tail %q, head %q and %q", all, tail.String(), head.String(), failing.String())
		}
		if over := len(all) > most; head.Over != over || failing.Over != over {
			t.Fatalf("over %v and %v, of %d bytes", head.Over, failing.Over, len(all))
		}
	})
}

// A tail does not grow with what is written to it.
func TestTailMemory(t *testing.T) {
	tail, piece := bounded.Tail{Max: 500}, bytes.Repeat([]byte("x"), 1001)
	for range 10 {
		_, _ = tail.Write(piece)
	}
	if n := testing.AllocsPerRun(1000, func() { _, _ = tail.Write(piece) }); n > 0 {
		t.Errorf("%v allocations for each write", n)
	}
}

func TestWriter(t *testing.T) {
	var b bytes.Buffer
	fail := errors.New("full")
	w := &bounded.Writer{W: &b, Left: 3, Fail: fail}
	if n, err := w.Write([]byte("ab")); n != 2 || err != nil {
		t.Error(n, err)
	}
	if n, err := w.Write([]byte("cd")); n != 0 || !errors.Is(err, fail) {
		t.Error(n, err)
	}
	if n, err := w.Write([]byte("c")); n != 1 || err != nil || b.String() != "abc" {
		t.Error(n, err, b.String())
	}
}
