package lazyre

import (
	"slices"
	"testing"
)

func TestRegexp(t *testing.T) {
	r := New(`^(a+)b`)
	if !r.MatchString("aab") || r.MatchString("b") {
		t.Error("a match")
	}
	if m := r.FindStringSubmatch("aab"); !slices.Equal(m, []string{"aab", "aa"}) {
		t.Errorf("groups: %q", m)
	}
}

// A test finds a bad expression that is not used.
func TestBadExpression(t *testing.T) {
	defer func() {
		if recover() == nil {
			t.Error("no panic")
		}
	}()
	New("(")
}

// Outside tests, an expression that is not used is not compiled.
func TestUnusedExpression(t *testing.T) {
	defer func(was bool) { inTest = was }(inTest)
	inTest = false
	New("(")
}
