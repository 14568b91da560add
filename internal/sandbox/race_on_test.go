//go:build race

package sandbox_test

// many is smaller under the race detector: the database is about twenty times
// slower.
const many = 100
