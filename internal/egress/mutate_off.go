//go:build !mutation

package egress

// Dropped reports whether a test build has disabled the rule of that name, to
// check that a probe detects it. In all other builds it returns false.
func Dropped(string) bool { return false }

func readDropped() {}
