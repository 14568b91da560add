//go:build race

package sandbox_test

// Under the race detector the database is some twenty times slower.
const many = 100
