package devenv

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Look is what agent-runner finds in a dev container.
type Look struct {
	Env       []string `json:"env"`
	UID       int      `json:"uid"`
	Problem   string   `json:"problem,omitempty"`    // why no agent can work there
	CannotRun string   `json:"cannot_run,omitempty"` // why the agents of the VM cannot run
}

// nodeStarts limits the start of Node.js, which is slow under emulation.
const nodeStarts = 2 * time.Minute

// LookAround returns what a container has for an agent in the directory dir.
func LookAround(dir string) Look {
	l := Look{Env: os.Environ(), UID: os.Getuid()}
	for _, need := range []struct {
		path string
		mode uint32
		what string
	}{{dir, unix.W_OK | unix.X_OK, "write to"}, {filepath.Join(RunDir, "secrets"), unix.R_OK | unix.X_OK, "read"}} {
		if err := unix.Access(need.path, need.mode); err != nil {
			l.Problem = fmt.Sprintf("its user (UID %d) cannot %s %s: %v", os.Getuid(), need.what, need.path, err)
			return l
		}
	}
	node := filepath.Join(Programs, "bin/node")
	if _, err := os.Stat(node); err != nil {
		return l
	}
	ctx, cancel := context.WithTimeout(context.Background(), nodeStarts)
	defer cancel()
	if out, err := exec.CommandContext(ctx, node, "--version").CombinedOutput(); err != nil {
		l.CannotRun = fmt.Sprintf("Node.js of the VM does not start in it, which needs glibc 2.28 and libstdc++: %v: %s", err, lastLines(string(out)))
	}
	return l
}

// ownNames are the variables of the VM that do not hold in a container.
var ownNames = []string{
	"PATH", "HOME", "USER", "LOGNAME", "SHELL", "PWD", "OLDPWD", "HOSTNAME", "SHLVL", "_", "MAIL", "LS_COLORS", "XDG_RUNTIME_DIR", "TMPDIR",
	"TMUX", "TMUX_PANE", "ZELLIJ", "ZELLIJ_SESSION_NAME", "ZELLIJ_PANE_ID", "SSH_CONNECTION", "SSH_CLIENT", "SSH_TTY", "SSH_AUTH_SOCK", "DBUS_SESSION_BUS_ADDRESS",
	"DIRENV_DIR", "DIRENV_FILE", "DIRENV_WATCHES", "DIRENV_DIFF",
}

// Environ returns the environment of a program in the container: that of a login there,
// with the variables of vm, and at the end of its PATH AgentLab's programs.
func (c *Container) Environ(vm []string) []string {
	env := slices.Clone(c.Env)
	path := Programs + "/bin:" + RunDir + "/bin"
	for _, kv := range vm {
		name, value, _ := strings.Cut(kv, "=")
		if name == "PATH" { // agentlab-msg has a directory of its own
			for _, dir := range filepath.SplitList(value) {
				if strings.HasPrefix(dir, RunDir+"/") && dir != RunDir+"/bin" {
					path += ":" + dir
				}
			}
		}
		if !slices.Contains(ownNames, name) {
			env = append(without(env, name), kv)
		}
	}
	for _, kv := range env {
		if value, ok := strings.CutPrefix(kv, "PATH="); ok && value != "" {
			path = value + ":" + path
		}
	}
	return append(without(env, "PATH"), "PATH="+path)
}

func without(env []string, name string) []string {
	return slices.DeleteFunc(env, func(kv string) bool { return strings.HasPrefix(kv, name+"=") })
}
