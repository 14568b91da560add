//go:build !race

package sandbox_test

const many = 1000
