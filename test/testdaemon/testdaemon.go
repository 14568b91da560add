// Package testdaemon is the program agentlabd for tests: it also has the fake
// backend, and its guests use a network of the test instead of the internet.
package testdaemon

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/agentlab-vm/agentlab/internal/backends"
	"github.com/agentlab-vm/agentlab/internal/daemon"
	"github.com/agentlab-vm/agentlab/internal/supervisor"
	"github.com/agentlab-vm/agentlab/test/fakebackend"
	"github.com/agentlab-vm/agentlab/test/fakenet"
)

// Internet is the name of the socket of the guests' internet
// (fakenet.Net.ServeUnix) in the home of the daemon. Without it guests have no
// internet.
const Internet = "internet.sock"

// Main is daemon.Main with more backends, and a supervisor with the test's
// internet.
func Main(args []string) int {
	if len(args) == 2 && args[0] == "vmm" {
		return supervise(args[1])
	}
	dropRuleIn(os.Getenv("AGENTLAB_HOME"))
	return daemon.Main(args, append(slices.Clip(backends.All), fakebackend.Backend)...)
}

// supervise runs the supervisor of the VM in a directory in HOME/state.
func supervise(dir string) int {
	home, _, _ := strings.Cut(dir, "/state/")
	dropRuleIn(home)
	o := supervisor.Options{Dialer: fakenet.UnixDialer{Path: filepath.Join(home, Internet)}}
	if err := supervisor.Run(context.Background(), dir, backends.All.VM, o); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}
