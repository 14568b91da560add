package devenv

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/bounded"
)

const (
	// containerLimit limits the start of a dev container, with the build of its image.
	containerLimit = 60 * time.Minute

	maxConfig = 1 << 20 // bytes of devcontainer.json
	maxResult = 8 << 20 // bytes of what the CLI prints
	maxPorts  = 64
	maxWord   = 4 << 10 // bytes of a name or path that the CLI prints
)

// configFiles are the places of a dev container's configuration, in the order of the
// specification.
var configFiles = []string{".devcontainer/devcontainer.json", ".devcontainer.json"}

// Container is a dev container that runs.
type Container struct {
	ID      string   `json:"id"`
	User    string   `json:"user"`
	Root    string   `json:"root"`    // work tree in the VM
	Dir     string   `json:"dir"`     // the same directory in the container
	Program string   `json:"program"` // agent-runner in the container
	Env     []string `json:"env"`     // of a login of the user
	Ports   []uint16 `json:"ports,omitempty"`
	Config  string   `json:"config"` // hash of the configuration
	UID     int      `json:"uid"`    // of the user

	// CannotRun is why the container cannot run the VM's agents; "" if it can.
	CannotRun string `json:"cannot_run,omitempty"`
}

// Request asks for the dev container of a work tree.
type Request struct {
	Dir    string   // work tree
	Mode   string   // one of agentlab.DevcontainerModes
	Mounts []string // directories of the VM that the container gets at the same path
	Refuse string   // why it cannot be used here; "" if it can
	Before string   // Container.Config of an earlier start; "" if there was none
}

// ConfigHash returns a hash of the configuration of a work tree's dev container; "" if
// it has none.
func ConfigHash(dir string) string {
	_, text := readConfig(dir)
	if text == nil {
		return ""
	}
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:])
}

// readConfig returns the configuration of a work tree; its name is "" if there is none.
func readConfig(dir string) (name string, text []byte) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return "", nil
	}
	defer func() { _ = root.Close() }()
	for _, name := range configFiles {
		st, err := root.Stat(name)
		if err != nil || !st.Mode().IsRegular() || st.Size() > maxConfig {
			continue
		}
		if text, err := root.ReadFile(name); err == nil {
			return name, text
		}
	}
	return "", nil
}

// StartContainer starts the dev container of a work tree. It returns nil if there is
// none, or if the mode is auto and it cannot be used: then the notice has the reason. It
// may be called again. The output of the build and of the commands goes to out.
func StartContainer(ctx context.Context, r Request, out io.Writer) (c *Container, notice string, err error) {
	if r.Mode == agentlab.DevcontainerOff {
		return nil, "", nil
	}
	name, _ := readConfig(r.Dir)
	switch {
	case name == "" && r.Mode == agentlab.DevcontainerOn:
		return nil, "", agentlab.Errorf(agentlab.CodeNotFound, "the repository has no %s", configFiles[0]).WithHint("add it, or use --devcontainer auto")
	case name == "":
		return nil, "", nil
	}
	if why := unusable(r); why != nil {
		if r.Mode == agentlab.DevcontainerOn {
			return nil, "", why
		}
		return nil, fmt.Sprintf("%s is not used: %v (%s)", name, why, agentlab.HintOf(why)), nil
	}
	ctx, cancel := context.WithTimeoutCause(ctx, containerLimit, errTooLong)
	defer cancel()
	if err := docker(ctx); err != nil {
		return nil, "", err
	}
	if c, err = up(ctx, r, name, out); err != nil {
		return nil, "", err
	}
	if err := c.look(ctx, out); err != nil {
		return nil, "", err
	}
	return c, "", c.forward(ctx)
}

// unusable returns why this VM cannot run dev containers, or nil.
func unusable(r Request) error {
	if r.Refuse != "" {
		return agentlab.Errorf(agentlab.CodeUnsupported, "%s", r.Refuse).WithHint("use --devcontainer off")
	}
	for program, name := range map[string]string{"docker": "Docker", "devcontainer": "@devcontainers/cli"} {
		if _, err := exec.LookPath(program); err != nil {
			return agentlab.Errorf(agentlab.CodeUnsupported, "this image does not have %s", name).WithHint(imageHint)
		}
	}
	return nil
}

// result is what the CLI prints after a start.
type result struct {
	Outcome     string `json:"outcome"`
	Message     string `json:"message"`
	Description string `json:"description"`
	ID          string `json:"containerId"`
	User        string `json:"remoteUser"`
	Dir         string `json:"remoteWorkspaceFolder"`
	Merged      struct {
		ForwardPorts []any `json:"forwardPorts"`
	} `json:"mergedConfiguration"`
}

// up starts the container by the CLI.
func up(ctx context.Context, r Request, name string, out io.Writer) (*Container, error) {
	program, err := shareAgents(ctx)
	if err != nil {
		return nil, err
	}
	c := &Container{Root: r.Dir, Program: program, Config: ConfigHash(r.Dir)}
	argv := []string{
		"devcontainer", "up", "--workspace-folder", r.Dir, "--config", filepath.Join(r.Dir, name), "--log-format", "text",
		"--include-merged-configuration", "--skip-post-attach",
		"--omit-syntax-directive", // or each build would download a part of BuildKit
	}
	if r.Before != "" && r.Before != c.Config {
		argv = append(argv, "--remove-existing-container")
	}
	for _, dir := range r.Mounts {
		if strings.ContainsRune(dir, ',') { // the CLI cannot express it
			return nil, agentlab.Errorf(agentlab.CodeUnsupported, "the path %q cannot be mounted in a dev container", dir).WithHint("choose a path without a comma")
		}
		argv = append(argv, "--mount", "type=bind,source="+dir+",target="+dir)
	}
	said := &bounded.Head{Max: maxResult, Fail: errTooMuch}
	err = run(ctx, r.Dir, said, out, argv)
	res, ok := lastDocument(said.String())
	switch {
	case err != nil && ok && res.Outcome == "error":
		return nil, agentlab.Errorf(agentlab.CodeConflict, "the dev container cannot be started: %s", agentlab.OneLine(res.Message+": "+res.Description, maxReason)).
			WithHint("correct %s, or use --devcontainer off", name)
	case err != nil:
		return nil, agentlab.Errorf(agentlab.CodeConflict, "the dev container cannot be started: %w", err).WithHint("correct %s, or use --devcontainer off", name)
	case !ok || !res.valid():
		return nil, agentlab.Errorf(agentlab.CodeUnavailable, "devcontainer up printed no container").WithHint(imageHint)
	}
	c.ID, c.User, c.Dir = res.ID, res.User, path.Clean(res.Dir)
	c.Ports = forwardPorts(res.Merged.ForwardPorts, out)
	return c, nil
}

// lastDocument returns the last line of the CLI's output.
func lastDocument(text string) (res result, ok bool) {
	text = strings.TrimSpace(text)
	ok = json.Unmarshal([]byte(text[strings.LastIndexByte(text, '\n')+1:]), &res) == nil
	return res, ok
}

func (r result) valid() bool {
	word := func(s string) bool {
		return s != "" && len(s) < maxWord && s[0] != '-' && agentlab.IsPrintable(s)
	}
	return r.Outcome == "success" && len(r.ID) <= 64 && agentlab.IsHex(r.ID, len(r.ID)) && r.ID != "" && word(r.User) && word(r.Dir) && path.IsAbs(r.Dir)
}

// forwardPorts returns the numbers in a list of ports, and notes the others.
func forwardPorts(list []any, out io.Writer) (ports []uint16) {
	for i, v := range list {
		if i == maxPorts {
			fmt.Fprintf(out, "only %d of forwardPorts are forwarded\n", maxPorts)
			break
		}
		n, ok := v.(float64)
		if port := uint16(n); ok && n >= 1 && n <= 65535 && float64(port) == n {
			if !slices.Contains(ports, port) {
				ports = append(ports, port)
			}
			continue
		}
		fmt.Fprintf(out, "forwardPorts: %.80q is not forwarded: it is not the number of a port\n", fmt.Sprint(v))
	}
	return ports
}

// look reads the environment of a login in the container, which the CLI composes, and
// checks that the agent can work there.
func (c *Container) look(ctx context.Context, out io.Writer) error {
	said := &bounded.Head{Max: maxResult, Fail: errTooMuch}
	err := run(ctx, c.Root, said, out, []string{
		"devcontainer", "exec", "--workspace-folder", c.Root, "--container-id", c.ID, "--log-format", "text",
		c.Program, "agentlab-agent", "contained", "--look", c.Dir,
	})
	var l Look
	text := bytes.TrimSpace([]byte(said.String()))
	if err == nil {
		err = json.Unmarshal(text[bytes.LastIndexByte(text, '\n')+1:], &l)
	}
	if err != nil {
		return agentlab.Errorf(agentlab.CodeUnsupported, "agents cannot run in the dev container: %w", err).WithHint("use --devcontainer off")
	}
	if l.Problem != "" {
		return agentlab.Errorf(agentlab.CodeUnsupported, "the agent cannot work in the dev container: %s", agentlab.OneLine(l.Problem, maxReason)).
			WithHint("correct remoteUser and updateRemoteUserUID in devcontainer.json, or use --devcontainer off")
	}
	c.Env, c.UID, c.CannotRun = l.Env, l.UID, agentlab.OneLine(l.CannotRun, maxReason)
	return nil
}

// Running reports whether the container runs.
func (c *Container) Running(ctx context.Context) bool {
	said := &bounded.Head{Max: 64}
	err := run(ctx, "/", said, io.Discard, []string{"docker", "container", "inspect", "--format", "{{.State.Running}}", c.ID})
	return err == nil && strings.TrimSpace(said.String()) == "true"
}

// Reclaim gives files below dir that the container's user has made to the user of this
// process, who otherwise cannot change a repository in which root has worked.
func (c *Container) Reclaim(ctx context.Context, dir string) error {
	uid := os.Getuid()
	if c == nil || c.UID == uid {
		return nil
	}
	owner := fmt.Sprintf("%d:%d", uid, os.Getgid())
	return runQuiet(ctx, "sudo", "-n", "find", dir, "-xdev", "-uid", strconv.Itoa(c.UID), "-exec", "chown", "-h", owner, "{}", "+")
}

// Path returns the place of a directory of the VM in the container.
func (c *Container) Path(dir string) string {
	if rel, err := filepath.Rel(c.Root, dir); err == nil && filepath.IsLocal(rel) {
		return path.Join(c.Dir, rel)
	}
	return dir
}

// Exec returns the command that runs agent-runner with args in a directory of the VM.
func (c *Container) Exec(dir string, tty bool, args ...string) []string {
	argv := []string{"docker", "exec", "--interactive", "--user", c.User, "--workdir", c.Path(dir)}
	if tty {
		argv = append(argv, "--tty")
	}
	return append(append(argv, c.ID, c.Program), args...)
}
