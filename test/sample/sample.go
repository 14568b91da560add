// Package sample shortens exhaustive test matrices. Without
// AGENTLAB_TEST_FULL=1 a test runs a random part of its cases, and logs the
// seed that selects the same part again.
package sample

import (
	"math/rand/v2"
	"os"
	"strconv"
	"testing"
)

const (
	envFull = "AGENTLAB_TEST_FULL" // "1": run every case
	envSeed = "AGENTLAB_TEST_SEED" // select the cases of an earlier run
)

// Full reports whether exhaustive tests are to run every case.
func Full() bool { return os.Getenv(envFull) == "1" }

// Rand returns a source of random numbers for the selection of cases, and
// logs its seed.
func Rand(t testing.TB) *rand.Rand {
	t.Helper()
	seed := rand.Uint64()
	if text := os.Getenv(envSeed); text != "" {
		var err error
		if seed, err = strconv.ParseUint(text, 10, 64); err != nil {
			t.Fatalf("%s: %v", envSeed, err)
		}
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
