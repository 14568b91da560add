// Program agentlabd of the tests.
package main

import (
	"os"

	"github.com/agentlab-vm/agentlab/test/testdaemon"
)

func main() { os.Exit(testdaemon.Main(os.Args[1:])) }
