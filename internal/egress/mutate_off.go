//go:build !mutation

package egress

// Dropped tells whether a test build has taken the rule of that name out of
// force, to see that a probe notices. In every other build none ever is.
func Dropped(string) bool { return false }

func readDropped() {}
