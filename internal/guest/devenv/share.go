package devenv

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"

	"github.com/agentlab-vm/agentlab"
)

// RunDir has AgentLab's own files. A container gets it at the same path.
const RunDir = "/run/agentlab"

// Programs has the programs of the VM's /usr/local, where images have the agents, for
// containers. It is read-only.
const Programs = RunDir + "/programs"

// errTooMuch ends a program whose output is too long.
var errTooMuch = errors.New("its output is too long")

const shareScript = `set -e
mountpoint -q "$1" && exit 0
mkdir -p "$1"
mount --bind /usr/local "$1"
mount -o remount,bind,ro "$1"`

// shareAgents makes the agents available below RunDir, and returns the path of
// agent-runner there.
func shareAgents(ctx context.Context) (program string, err error) {
	if err := runQuiet(ctx, "sudo", "-n", "sh", "-c", shareScript, "sh", Programs); err != nil {
		return "", agentlab.Errorf(agentlab.CodeUnavailable, "the agents cannot be made available to the dev container: %w", err)
	}
	exe, err := os.Executable()
	if err != nil {
		return "", err
	}
	if at, ok := strings.CutPrefix(exe, "/usr/local/"); ok {
		return filepath.Join(Programs, at), nil
	}
	if !strings.HasPrefix(exe, RunDir+"/") {
		return "", agentlab.Errorf(agentlab.CodeUnsupported, "%s is not visible in a container", exe)
	}
	return exe, nil
}
