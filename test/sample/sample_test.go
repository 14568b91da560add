package sample

import (
	"os"
	"slices"
	"strconv"
	"testing"
)

type cell struct{ row, column string }

func table() (cells []cell) {
	for _, r := range []string{"a", "b", "c"} {
		for _, c := range []string{"1", "2", "3", "4"} {
			cells = append(cells, cell{r, c})
		}
	}
	return cells
}

func keys(c cell) []string { return []string{c.row, c.column} }

func TestCoverHasEachRowAndColumn(t *testing.T) {
	t.Setenv(envFull, "")
	for seed := range 50 {
		t.Setenv(envSeed, strconv.Itoa(seed))
		got := Cover(t, table(), keys)
		if len(got) < 4 || len(got) > 6 {
			t.Fatalf("%d cases: %v", len(got), got)
		}
		for _, want := range []string{"a", "b", "c", "1", "2", "3", "4"} {
			if !slices.ContainsFunc(got, func(c cell) bool { return slices.Contains(keys(c), want) }) {
				t.Fatalf("no %s in %v", want, got)
			}
		}
	}
}

func TestSeedRepeatsASample(t *testing.T) {
	t.Setenv(envFull, "")
	t.Setenv(envSeed, "42")
	if a, b := Cover(t, table(), keys), Cover(t, table(), keys); !slices.Equal(a, b) {
		t.Errorf("%v and %v", a, b)
	}
	if a, b := Of(t, 3, table()), Of(t, 3, table()); len(a) != 3 || !slices.Equal(a, b) {
		t.Errorf("%v and %v", a, b)
	}
}

// All samples of a process and of those that it starts have one seed.
func TestOneSeed(t *testing.T) {
	a := Rand(t).Uint64()
	if b := Rand(t).Uint64(); a != b || os.Getenv(envSeed) == "" {
		t.Errorf("%d and %d, the environment has %q", a, b, os.Getenv(envSeed))
	}
}

func TestFullRunsAll(t *testing.T) {
	t.Setenv(envFull, "1")
	if got := Cover(t, table(), keys); len(got) != len(table()) {
		t.Errorf("%v", got)
	}
	if got := Of(t, 1, table()); len(got) != len(table()) {
		t.Errorf("%v", got)
	}
}
