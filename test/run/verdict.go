package main

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
)

const (
	// mostFlaky is how many failed tests run again. More of them are no accident.
	mostFlaky = 5
	// passes is how often a failed test must pass, alone, to count as flaky.
	passes = 2
	// shownLines is how many lines of the output of a failed test are printed; its log has all.
	shownLines = 150
)

// verdict runs the failed tests again, alone, prints the result, and reports whether the
// run has passed. Flaky tests are printed last, so that no one overlooks them.
func (s *suite) verdict(ctx context.Context) (bool, error) {
	var flaky, failed []failure
	if len(s.fails) <= mostFlaky {
		for _, f := range s.fails {
			isFlaky, err := s.isFlaky(ctx, f)
			if err != nil {
				return false, err
			}
			if isFlaky {
				flaky = append(flaky, f)
			} else {
				failed = append(failed, f)
			}
		}
	} else {
		failed = s.fails
		s.say("=== %d tests failed; none runs again, because at most %d can be flaky", len(failed), mostFlaky)
	}
	for _, f := range failed {
		s.say("\n--- FAILED: %s\n%s", f.name, tail(f.Output))
	}
	ok := len(failed) == 0
	if s.machines && len(s.core) > 0 && s.ran == 0 {
		ok = false
		s.say("FAILED: no test ran in a virtual machine")
	}
	s.printLeft()
	s.say("\n%d passed, %d failed, %d skipped", s.passed+len(flaky), len(failed), s.skips)
	for _, f := range flaky {
		s.say("\n--- FLAKY: %s failed, then passed %d times alone. This is a defect: correct its cause.\n%s", f.name, passes, tail(f.Output))
	}
	if len(flaky) > 0 {
		s.say("\nFlaky tests of this run:")
		for _, f := range flaky {
			s.say("  %s", f.name)
		}
	}
	return ok, nil
}

// isFlaky runs a failed test again, alone, and reports whether it passes each time.
func (s *suite) isFlaky(ctx context.Context, f failure) (bool, error) {
	switch {
	case f.Build, f.Final:
		return false, nil
	case bytes.Contains(f.Output, []byte("WARNING: DATA RACE")):
		s.say("=== %s has a data race; it does not run again", f.name)
		return false, nil
	}
	for i := range passes {
		s.say("=== again, alone (%d of %d): %s", i+1, passes, f.name)
		o, err := f.again(ctx)
		if err != nil {
			return false, err
		}
		if o.Action != "pass" {
			s.say("FAIL    %s  %s", f.name, s.log(o, fmt.Sprint(i+2)))
			return false, nil
		}
	}
	return true, nil
}

// printLeft prints the long tests that have no result, and the commands that run them.
func (s *suite) printLeft() {
	list := func(title string, tests []name) {
		if len(tests) == 0 {
			return
		}
		byPackage := map[string][]string{}
		for _, n := range tests {
			byPackage[n.Package] = append(byPackage[n.Package], n.Test)
		}
		s.say("\n%s (%d). 'make test-full' runs all tests; these:", title, len(tests))
		for _, p := range slices.Sorted(maps.Keys(byPackage)) {
			slices.Sort(byPackage[p])
			s.say("  go test -timeout 0 %s -run '^(%s)$'", strings.Replace(p, module, ".", 1), strings.Join(byPackage[p], "|"))
		}
	}
	list("Not run, because the budget is used", s.left)
	list("Ended without a result after the budget", s.cut)
}

// tail returns the last lines of an output.
func tail(out []byte) string {
	lines := strings.SplitAfter(strings.TrimRight(string(out), "\n"), "\n")
	if left := len(lines) - shownLines; left > 0 {
		return fmt.Sprintf("(%d lines are in the log)\n", left) + strings.Join(lines[left:], "")
	}
	return strings.Join(lines, "")
}
