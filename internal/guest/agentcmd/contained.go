package agentcmd

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/agentlab-vm/agentlab/internal/guest/devenv"
)

// containedErrorFile has the reason why a supervised agent was not started in a
// container.
const containedErrorFile = "agent.contained-error"

// secretsDir is the runner's directory, which a dev container has at the same path.
const secretsDir = devenv.RunDir + "/secrets"

// containedCommand returns the command that runs the plan in its container. The agent
// there ends when hold is closed, also by the end of this process.
func (s *supervisor) containedCommand() (c command, in *os.File, err error) {
	if c.agent, err = find(s.plan.Agent); err != nil {
		return c, nil, err
	}
	if c.path, err = exec.LookPath("docker"); err != nil {
		return c, nil, err
	}
	for _, name := range []string{"PATH", "HOME"} {
		c.env = append(c.env, name+"="+get(s.plan.Env, name))
	}
	c.argv = s.plan.Container.Exec(s.plan.Dir, false, "agentlab-agent", "contained", "--plan", s.dir)
	in, s.hold, err = os.Pipe()
	return c, in, err
}

// containedError returns why the agent was not started in its container, or "".
func (s *supervisor) containedError() string {
	if s.hold == nil {
		return ""
	}
	text, _ := os.ReadFile(filepath.Join(s.dir, containedErrorFile))
	return string(text)
}

// containedMain runs in a dev container.
func containedMain(stdout io.Writer, args []string) int {
	f := flags("contained")
	look := f.String("look", "", "")
	dir := f.String("plan", "", "")
	if f.Parse(args) != nil || f.NArg() > 0 {
		return 2
	}
	if *look != "" {
		if json.NewEncoder(stdout).Encode(devenv.LookAround(*look)) != nil {
			return ExitNotRun
		}
		return 0
	}
	code, err := runContained(*dir)
	if err != nil {
		_ = os.WriteFile(filepath.Join(*dir, containedErrorFile), []byte(err.Error()), 0o600)
		return reportError(os.Stderr, err)
	}
	return code
}

// runContained runs the agent of a plan until it ends, or until the end of standard
// input asks it to stop.
func runContained(dir string) (code int, err error) {
	plan, err := readPlan(dir)
	if err != nil {
		return 0, err
	}
	in := &contained{plan.Container}
	env := in.Environ(plan.Env)
	in.link(get(env, "HOME"))
	c, err := prepare(plan.Agent, plan.TaskFile, env)
	if err != nil {
		return 0, err
	}
	if c.path, c.argv, err = in.interpret(c.path, c.argv); err != nil {
		return 0, err
	}
	task, err := os.Open(c.stdin)
	if err != nil {
		return 0, err
	}
	defer func() { _ = task.Close() }()
	if err := becomeReaper(); err != nil {
		return 0, err
	}
	s := &supervisor{plan: plan, stop: make(chan os.Signal, 1)}
	p, err := os.StartProcess(c.path, c.argv, &os.ProcAttr{
		Env: c.env, Files: []*os.File{task, os.Stdout, os.Stderr}, Sys: &syscall.SysProcAttr{Setpgid: true},
	})
	if err != nil {
		return 0, err
	}
	pid := p.Pid
	_ = p.Release()
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		s.stop <- syscall.SIGTERM
	}()
	status, _ := s.wait(pid)
	return exitCode(status), nil
}

func readPlan(dir string) (plan Plan, err error) {
	raw, err := os.ReadFile(filepath.Join(dir, PlanFile))
	if err == nil {
		err = json.Unmarshal(raw, &plan)
	}
	return plan, err
}

// contained is the dev container of this process.
type contained struct{ *devenv.Container }

// link makes the files that Prepare wrote available in a home of the container. What
// exists in their place stays.
func (c *contained) link(home string) {
	for _, name := range managedFiles {
		file, at := managedPath(secretsDir, name), filepath.Join(home, name)
		if _, err := os.Stat(file); err != nil || os.MkdirAll(filepath.Dir(at), 0o700) != nil {
			continue
		}
		_ = os.Symlink(file, at)
	}
}

// interpret completes the command of an agent of the VM. Scripts of Node.js run with the
// version of the VM: the project's own may be too old.
func (c *contained) interpret(path string, argv []string) (string, []string, error) {
	if !isBelow(path, devenv.Programs) {
		return path, argv, nil
	}
	if c.CannotRun != "" {
		return "", nil, fmt.Errorf("%s of the VM cannot run in the dev container: %s: install it in the container, or use --devcontainer off", argv[0], c.CannotRun)
	}
	f, err := os.Open(path)
	if err != nil {
		return "", nil, err
	}
	defer func() { _ = f.Close() }()
	line, _ := bufio.NewReader(io.LimitReader(f, 256)).ReadString('\n')
	if words := strings.Fields(strings.TrimPrefix(line, "#!")); strings.HasPrefix(line, "#!") && slices.Contains(words, "node") {
		node := filepath.Join(devenv.Programs, "bin/node")
		return node, slices.Concat([]string{node, path}, argv[1:]), nil
	}
	return path, argv, nil
}

// tuiPlan is what an agent on a terminal in a container needs from the VM.
type tuiPlan struct {
	Container *devenv.Container `json:"container"`
	Env       []string          `json:"env"`
}

// leaveVM replaces this process by the agent in a container. It returns only an error.
func (t *tui) leaveVM(c *devenv.Container) error {
	docker, err := exec.LookPath("docker")
	if err != nil {
		return err
	}
	f, err := os.CreateTemp(secretsDir, "tui-*.json") // it has secrets
	if err != nil {
		return err
	}
	err = json.NewEncoder(f).Encode(tuiPlan{c, t.env})
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return err
	}
	args := []string{"agentlab-agent", "tui", "--inside", f.Name(), "--agent", t.name}
	if t.resume {
		args = append(args, "--resume")
	}
	argv := c.Exec(t.dir, true, append(append(args, "--"), t.args...)...)
	return syscall.Exec(docker, argv, t.env)
}

// enter continues leaveVM in the container.
func (t *tui) enter(file string) error {
	raw, err := os.ReadFile(file)
	_ = os.Remove(file)
	var plan tuiPlan
	if err == nil {
		err = json.Unmarshal(raw, &plan)
	}
	if err != nil {
		return err
	}
	t.contained = &contained{plan.Container}
	t.env = t.contained.Environ(plan.Env)
	t.contained.link(get(t.env, "HOME"))
	return nil
}

// forwardMain forwards ports to a container.
func forwardMain(args []string) int {
	if len(args) < 2 {
		return 2
	}
	var ports []uint16
	for _, arg := range args[1:] {
		n, err := strconv.ParseUint(arg, 10, 16)
		if err != nil {
			return 2
		}
		ports = append(ports, uint16(n))
	}
	if err := devenv.Forward(context.Background(), args[0], ports); err != nil {
		return reportError(os.Stderr, err)
	}
	return 0
}
