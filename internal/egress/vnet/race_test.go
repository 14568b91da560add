//go:build race

package vnet_test

const raceEnabled = true
