package strictyaml

import (
	"slices"
	"strings"

	"github.com/agentlab-vm/agentlab"
)

// OneOf returns an error with code invalid for the key if its value is not one of
// known. The hint is the most similar one, or all of them.
func OneOf[T ~string](key string, value T, known []T) error {
	if slices.Contains(known, value) {
		return nil
	}
	names := make([]string, len(known))
	for i, k := range known {
		names[i] = string(k)
	}
	e := agentlab.Errorf(agentlab.CodeInvalid, "%q is not known", string(value)).WithField(key)
	if near := Nearest(string(value), names); near != "" {
		return e.WithHint("did you mean %q?", near)
	}
	return e.WithHint("choose one of %s", strings.Join(names, ", "))
}

// Nearest returns the candidate that is most similar to word, or "" if none is
// similar: with at most one edit for every three letters, where an edit
// inserts, deletes or replaces a letter or swaps two adjacent ones. Letter
// case and the difference between - and _ are ignored.
func Nearest(word string, candidates []string) string {
	best, dist := "", len(word)/3+1
	for _, c := range candidates {
		if d := distance(fold(word), fold(c), dist); d < dist || d == dist && best == "" {
			best, dist = c, d
		}
	}
	if dist > max(1, len(best)/3) {
		return ""
	}
	return best
}

func fold(s string) string { return strings.ReplaceAll(strings.ToLower(s), "-", "_") }

// distance is the optimal string alignment distance of a and b, or limit+1 if
// their lengths already differ by more than limit.
func distance(a, b string, limit int) int {
	if len(a)-len(b) > limit || len(b)-len(a) > limit {
		return limit + 1
	}
	prev2, prev, cur := make([]int, len(b)+1), make([]int, len(b)+1), make([]int, len(b)+1)
	for j := range prev {
		prev[j] = j
	}
	for i := 1; i <= len(a); i++ {
		cur[0] = i
		for j := 1; j <= len(b); j++ {
			cost := 1
			if a[i-1] == b[j-1] {
				cost = 0
			}
			cur[j] = min(prev[j]+1, cur[j-1]+1, prev[j-1]+cost)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				cur[j] = min(cur[j], prev2[j-2]+1)
			}
		}
		prev2, prev, cur = prev, cur, prev2
	}
	return prev[len(b)]
}
