//go:build !mutation

package testdaemon

func dropRuleIn(string) {}
