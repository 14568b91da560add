//go:build !mutation

package e2e

// buildFlags are for the programs under test; the mutation check has its own.
var buildFlags []string
