//go:build !linux

package main

import (
	"fmt"
	"os"
)

func main() {
	fmt.Fprintln(os.Stderr, "agent-runner: it runs in guests only, which run Linux")
	os.Exit(1)
}
