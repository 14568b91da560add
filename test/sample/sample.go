// Package sample shortens exhaustive test matrices. Without
// AGENTLAB_TEST_FULL=1 a test runs a random part of its cases, and logs the
// seed that selects the same part again. 'make test' prints the seed of all its
// tests.
package sample

import (
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"sync"
	"testing"
)

// ImageTests are the tests that build whole images, of internal/image and test/e2e, where
// every run builds one anyway.
var ImageTests = []string{"TestBuildEverything", "TestOrdinaryUser", "TestUnderTheUnit", "TestCACertificates"}

const (
	envFull = "AGENTLAB_TEST_FULL" // "1": run every case
	envSeed = "AGENTLAB_TEST_SEED" // select the cases of an earlier run
)

// Full reports whether exhaustive tests are to run every case.
func Full() bool { return os.Getenv(envFull) == "1" }

var drawing sync.Mutex

// draw chooses a seed if there is none, also for the processes that this one
// starts: a test that continues in another process selects the same cases there.
func draw() error {
	drawing.Lock()
	defer drawing.Unlock()
	if os.Getenv(envSeed) != "" {
		return nil
	}
	return os.Setenv(envSeed, strconv.FormatUint(rand.Uint64(), 10)) //nolint:gosec // not a secret
}

// Rand returns a source of random numbers for the selection of cases, and
// logs its seed.
func Rand(t testing.TB) *rand.Rand {
	t.Helper()
	err := draw()
	var seed uint64
	if err == nil {
		seed, err = strconv.ParseUint(os.Getenv(envSeed), 10, 64)
	}
	if err != nil {
		t.Fatalf("%s: %v", envSeed, err)
	}
	t.Logf("a sample of the cases: %s=%d runs the same ones, %s=1 all", envSeed, seed, envFull)
	return rand.New(rand.NewPCG(seed, 0)) //nolint:gosec // not a secret
}

// Of returns n of the cases in their order, or all of them in a full run.
func Of[T any](t testing.TB, n int, cases []T) []T {
	t.Helper()
	if Full() || n >= len(cases) {
		return cases
	}
	chosen := make([]bool, len(cases))
	for _, i := range Rand(t).Perm(len(cases))[:n] {
		chosen[i] = true
	}
	var out []T
	for i, c := range cases {
		if chosen[i] {
			out = append(out, c)
		}
	}
	return out
}

// Choose skips the test unless one of the n cases that this run selects among all
// is its own.
func Choose[T comparable](t testing.TB, n int, all []T, own T) {
	t.Helper()
	if !slices.Contains(all, own) {
		t.Fatalf("%v is not one of %v", own, all)
	}
	if !slices.Contains(Of(t, n, all), own) {
		t.Skipf("skipped: %v is not in the sample of this run", own)
	}
}

// OnlyFull skips the test in a run that is not full, for a reason that completes
// "skipped, because".
func OnlyFull(t testing.TB, because string) {
	t.Helper()
	if !Full() {
		t.Skipf("skipped, because %s; %s=1 runs it", because, envFull)
	}
}

// Cover returns a random part of the cases that still has each value of each
// key at least once, or all cases in a full run. key returns the values of a
// case, for example its row and its column in a table.
func Cover[T any](t testing.TB, cases []T, key func(T) []string) []T {
	t.Helper()
	if Full() {
		return cases
	}
	covered := map[string]bool{}
	chosen := make([]bool, len(cases))
	rng := Rand(t)
	// Cases with two new values come first, so that few are needed.
	for _, want := range []int{2, 1} {
		for _, i := range rng.Perm(len(cases)) {
			missing := 0
			for _, v := range key(cases[i]) {
				if !covered[v] {
					missing++
				}
			}
			if missing < want {
				continue
			}
			chosen[i] = true
			for _, v := range key(cases[i]) {
				covered[v] = true
			}
		}
	}
	var out []T
	for i, c := range cases {
		if chosen[i] {
			out = append(out, c)
		}
	}
	return out
}
