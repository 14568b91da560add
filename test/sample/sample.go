// Package sample selects what a run tests. Without AGENTLAB_TEST_FULL=1 a test runs a random
// part of the cases of an exhaustive table, and logs the seed that selects the same part
// again. Long tests are skipped by -short; 'make test' runs a sample of them (test/run).
package sample

import (
	"math/rand/v2"
	"os"
	"strconv"
	"sync"
	"testing"
)

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
	return os.Setenv(envSeed, strconv.FormatUint(rand.Uint64(), 10))
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
	return rand.New(rand.NewPCG(seed, 0))
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

// LongTest starts the message of a test of which -short leaves out a part. A run of the tests
// finds them by it, and runs a sample of them in full.
const LongTest = "long test, skipped by -short: "

// Short reports whether this run leaves out the long part of a test, and logs the reason: a
// clause such as "it boots virtual machines".
func Short(t testing.TB, why string) bool {
	t.Helper()
	if testing.Short() {
		t.Log(LongTest + why)
	}
	return testing.Short()
}

// Long skips a test that boots virtual machines, builds images, or takes minutes for another
// reason, under -short.
func Long(t testing.TB, why string) {
	t.Helper()
	if testing.Short() {
		t.Skip(LongTest + why)
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
