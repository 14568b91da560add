//go:build !race

package vnet_test

const raceEnabled = false
