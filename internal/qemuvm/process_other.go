//go:build !linux

package qemuvm

// NoCore does nothing: the limits of another process can be changed on Linux only.
func NoCore(int) {}
