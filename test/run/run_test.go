package main

import (
	"bytes"
	"context"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/txtar"
)

var coreTest = name{module + "/vm", "TestCore"}

// fixture returns a suite of the module in testdata, and what it prints.
func fixture(t *testing.T, asked string) (*suite, *bytes.Buffer) {
	t.Helper()
	archive, err := txtar.ParseFile("testdata/module.txtar")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := txtar.Write(archive, dir); err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	return &suite{
		dir: dir, packages: []string{"./..."}, units: plainUnits, machines: true, core: []name{coreTest},
		budget: time.Hour, workers: 2, seed: 7, logs: filepath.Join(dir, "logs"), out: &out,
		env: []string{"FIXTURE=" + asked, "FIXTURE_STATE=" + t.TempDir()},
	}, &out
}

// runs runs a suite that is expected to pass or to fail.
func runs(t *testing.T, s *suite, out *bytes.Buffer, want bool) string {
	t.Helper()
	ok, err := s.run(t.Context())
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if ok != want {
		t.Fatalf("passed: %t, want %t\n%s", ok, want, out)
	}
	if _, err := os.Stat(envOf(s, envShared)); s.machines && err == nil {
		t.Errorf("%s is left", envOf(s, envShared))
	}
	return out.String()
}

func envOf(s *suite, key string) string {
	for _, e := range s.env {
		if v, ok := strings.CutPrefix(e, key+"="); ok {
			return v
		}
	}
	return "/nonexistent"
}

func contains(t *testing.T, text string, want ...string) {
	t.Helper()
	for _, w := range want {
		if !regexp.MustCompile("(?m)" + w).MatchString(text) {
			t.Errorf("no %q in:\n%s", w, text)
		}
	}
}

func TestAllPass(t *testing.T) {
	t.Parallel()
	s, out := fixture(t, "")
	text := runs(t, s, out, true)
	contains(t, text, `^22 passed, 0 failed, 5 skipped$`, `^ok +vm\.TestCore `, `^ok +vm\.TestD `)
	if strings.Contains(text, "FLAKY") || strings.Contains(text, "budget is used") {
		t.Error(text)
	}
	if _, err := os.Stat(s.logs); err == nil {
		t.Error("there are logs of failed tests")
	}
}

// A test that fails, and then passes twice alone, is reported last, and the run passes.
func TestFlaky(t *testing.T) {
	t.Parallel()
	for asked, test := range map[string]string{
		"once": "unit.TestOnce", "sub": "unit.TestSub", "panic": "unit", "leak": "unit", "core": "vm.TestCore",
	} {
		t.Run(asked, func(t *testing.T) {
			t.Parallel()
			s, out := fixture(t, asked)
			text := runs(t, s, out, true)
			contains(t, text, `^\d+ passed, 0 failed, \d+ skipped$`, `^--- FLAKY: \S*/`+test+` failed, then passed 2 times alone`,
				`Flaky tests of this run:\n  \S*/`+test+`\nok: seed 7,`)
			if asked != "leak" { // the log of the first failure stays
				if logs, _ := fs.Glob(os.DirFS(s.logs), "*.1.log"); len(logs) == 0 {
					t.Error("no log")
				}
			}
		})
	}
}

// These fail the run: a test that fails always, one that fails once more, a data race, more
// failed tests than can be flaky.
func TestFails(t *testing.T) {
	t.Parallel()
	for asked, want := range map[string]string{
		"always": `^--- FAILED: \S*/unit.TestAlways$`,
		"twice":  `^--- FAILED: \S*/unit.TestTwice$`,
		"race":   `unit.TestRace has a data race; it does not run again`,
		"six":    `6 tests failed; none runs again`,
	} {
		t.Run(asked, func(t *testing.T) {
			t.Parallel()
			s, out := fixture(t, asked)
			text := runs(t, s, out, false)
			contains(t, text, want, `^\d+ passed, [1-9]\d* failed, \d+ skipped$`, `^FAILED: seed 7,`)
		})
	}
}

func TestThatCannotBeBuilt(t *testing.T) {
	t.Parallel()
	s, out := fixture(t, "")
	if err := os.WriteFile(filepath.Join(s.dir, "six", "bad_test.go"), []byte("package six\n\nvar x = undefined\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	contains(t, runs(t, s, out, false), `^--- FAILED: \S*/six$`, `undefined: undefined`)
}

// After the budget no test begins; those that are left are listed with their command. The
// core tests run in any case.
func TestBudget(t *testing.T) {
	t.Parallel()
	s, out := fixture(t, "")
	s.budget = time.Nanosecond
	text := runs(t, s, out, true)
	contains(t, text, `^ok +vm\.TestCore `, `^Not run, because the budget is used \(5\)`, `^  go test -timeout 0 \./vm -run '\^\(TestA\|TestB\|TestC\|TestD\|TestHangs\)\$'$`)
	if regexp.MustCompile(`(?m)^ok +vm\.Test[A-D] `).MatchString(text) {
		t.Error(text)
	}
}

// A test of the sample that has not ended long after the budget is ended, and listed.
func TestSampleThatHangs(t *testing.T) {
	t.Parallel()
	s, out := fixture(t, "hang")
	s.budget = 5 * time.Second // a slow machine does not begin the test before
	text := runs(t, s, out, true)
	if !regexp.MustCompile(`(?m)^Not run, .*\n.*TestHangs`).MatchString(text) {
		contains(t, text, `^Ended without a result after the budget \(1\)`, `-run '\^\(TestHangs\)\$'$`)
	}
}

// The seed selects the order of the sample.
func TestOrder(t *testing.T) {
	t.Parallel()
	order := func(seed uint64) []name {
		s := &suite{seed: seed, core: []name{coreTest}, long: map[name]bool{coreTest: true}}
		for _, test := range strings.Fields("A B C D E F G H I J K L") {
			s.long[name{"p", test}] = true
		}
		return s.shuffled()
	}
	a, b, c := order(1), order(1), order(2)
	if len(a) != 12 || !slices.Equal(a, b) || slices.Equal(a, c) {
		t.Errorf("%v\n%v\n%v", a, b, c)
	}
}

// A run without a test in a virtual machine fails.
func TestNoMachine(t *testing.T) {
	t.Parallel()
	s, out := fixture(t, "nomachine")
	s.budget = time.Nanosecond
	contains(t, runs(t, s, out, false), `^--- FAILED: \S*/vm.TestCore\na core test may not be skipped`)

	s, out = fixture(t, "")
	s.core = []name{{module + "/vm", "TestRenamed"}}
	contains(t, runs(t, s, out, false), `has no test TestRenamed`)
}

// The core tests exist, and packages test/sample and test/run agree on the sign of long tests.
func TestCoreExists(t *testing.T) {
	t.Parallel()
	for _, n := range core {
		dir := filepath.Join("../..", strings.TrimPrefix(n.Package, module))
		out, err := exec.CommandContext(t.Context(), "grep", "-rl", "--include=*_test.go", "^func "+n.Test+"(t ", dir).CombinedOutput()
		if err != nil {
			t.Errorf("%s: %v %s", n, err, out)
		}
	}
}

// An interrupt ends the tests.
func TestInterrupt(t *testing.T) {
	t.Parallel()
	s, out := fixture(t, "hang")
	ctx, cancel := context.WithCancel(t.Context())
	s.core = []name{{module + "/vm", "TestHangs"}}
	s.workers = 1
	time.AfterFunc(2*time.Second, cancel)
	if ok, err := s.run(ctx); ok || err == nil {
		t.Errorf("%t, %v\n%s", ok, err, out)
	}
}

// Each run has one of the costly packages and some of the others under the race detector, and
// with other seeds each package is there.
func TestSampledUnits(t *testing.T) {
	all := []string{module + "/a", module + "/b", module + "/c", module + "/d"}
	for _, p := range costly {
		all = append(all, module+"/"+p)
	}
	seen := map[string]bool{}
	for seed := range uint64(50) {
		groups := sampledUnits(all, seed)
		plain, raced := groups[0].packages, groups[1].packages
		if n := len(plain) + len(raced); n != len(all) || groups[0].race || !groups[1].race {
			t.Fatalf("seed %d: %d packages", seed, n)
		}
		n := 0
		for _, p := range raced {
			seen[p] = true
			if slices.Contains(costly, strings.TrimPrefix(p, module+"/")) {
				n++
			}
		}
		if n != 1 {
			t.Errorf("seed %d: %d costly packages", seed, n)
		}
	}
	if len(seen) != len(all) {
		t.Errorf("only %d of %d packages were under the race detector", len(seen), len(all))
	}
}
