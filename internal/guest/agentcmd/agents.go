// Package agentcmd implements agentlab-agent, the wrapper around the coding
// agents. It runs each agent's command line headless and with every permission
// granted, so that nothing else in the guest depends on the agent.
//
// Run runs an agent in the foreground. Supervise runs it for agent-runner,
// continues if agent-runner ends, and writes the redacted log and the exit
// status to files.
package agentcmd

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/agentlab-vm/agentlab/internal/lazyre"
)

// agent describes how to run one of the agents.
type agent struct {
	name    string
	program string
	args    []string
	stdin   bool     // the task is on standard input, otherwise in a file whose name is the last argument
	env     []string // defaults, which the environment overrides
	version []string
	render  func(io.Writer) io.WriteCloser // makes standard output readable; nil if it already is

	// rejected matches a line of the log that says that the model rejects the key.
	rejected *lazyre.Regexp
}

// agents are the known agents. Each gets its task by file or standard input: an
// argument is limited to 128 KiB, and a task may be longer.
var agents = []agent{
	{
		name: "claude", program: "claude", stdin: true, version: []string{"--version"},
		args:   []string{"-p", "--dangerously-skip-permissions", "--output-format", "stream-json", "--verbose"},
		env:    []string{"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1", "DISABLE_AUTOUPDATER=1", "IS_SANDBOX=1"},
		render: renderClaude, rejected: lazyre.New(`^\[claude: the model answers 40[13] `),
	},
	{
		name: "codex", program: "codex", stdin: true, version: []string{"--version"},
		args:     []string{"exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--color", "never", "-"},
		rejected: lazyre.New(`^ERROR: unexpected status 40[13] `),
	},
	{
		name: "opencode", program: "opencode", stdin: true, version: []string{"--version"},
		args: []string{"run"},
		env:  []string{`OPENCODE_PERMISSION={"*":"allow"}`, "OPENCODE_DISABLE_AUTOUPDATE=1"},
		// It prints only the message of the model: of Anthropic, OpenAI or Google.
		rejected: lazyre.New(`Error: .*(invalid x-api-key|Incorrect API key|API key not valid)`),
	},
	{
		name: "gemini", program: "gemini", stdin: true, version: []string{"--version"},
		args: []string{"--approval-mode=yolo"},
		env:  []string{"GEMINI_CLI_TRUST_WORKSPACE=true"},
		// Google answers 400 to a key that it does not know.
		rejected: lazyre.New(`^  status: 40[13]\b|API key not valid`),
	},
	{
		name: "shell", program: "bash", version: []string{"--version"},
		args: []string{"-euo", "pipefail"},
	},
}

// commonEnv are defaults for all agents: no user answers questions or looks at a
// pager.
var commonEnv = []string{
	"TERM=dumb", "NO_COLOR=1", "CI=1", "PAGER=cat", "GIT_PAGER=cat", "GIT_TERMINAL_PROMPT=0",
	"GIT_EDITOR=true", "DEBIAN_FRONTEND=noninteractive", "LANG=C.UTF-8",
}

// Names lists the agents.
func Names() []string {
	var out []string
	for _, a := range agents {
		out = append(out, a.name)
	}
	return out
}

func find(name string) (agent, error) {
	for _, a := range agents {
		if a.name == name {
			return a, nil
		}
	}
	return agent{}, fmt.Errorf("unknown agent %q: choose one of %s", name, strings.Join(Names(), ", "))
}

// The exit codes of shells for a command that could not be run.
const (
	ExitNotRun   = 126
	ExitNotFound = 127
)

// notInstalled is the error for an agent that the image does not have.
type notInstalled struct{ a agent }

func (e notInstalled) Error() string {
	if e.a.name == "shell" {
		return "bash is not installed in this image"
	}
	return fmt.Sprintf("%s is not installed in this image; the images \"agents\" and \"dev\" have it: choose one with --image", e.a.program)
}

// command is the command to start.
type command struct {
	agent agent
	path  string
	argv  []string
	env   []string
	stdin string // file name
	task  string // file name
}

// prepare finds the agent's program on env's PATH and completes its command.
func prepare(name, taskFile string, env []string) (command, error) {
	a, err := find(name)
	if err != nil {
		return command{}, err
	}
	c := command{agent: a, env: withDefaults(env, slices.Concat(a.env, commonEnv)), stdin: os.DevNull, task: taskFile}
	if c.path = lookPath(a.program, get(c.env, "PATH")); c.path == "" {
		return c, notInstalled{a}
	}
	if _, err := os.Stat(taskFile); err != nil {
		return c, fmt.Errorf("the task cannot be read: %w", err)
	}
	c.argv = append([]string{a.program}, a.args...)
	if a.stdin {
		c.stdin = taskFile
	} else {
		c.argv = append(c.argv, taskFile)
	}
	if key := get(c.env, "OPENAI_API_KEY"); a.name == "codex" && key != "" {
		c.env = withDefaults(c.env, []string{"CODEX_API_KEY=" + key})
	}
	return c, nil
}

// withDefaults adds the defaults whose names are not in env.
func withDefaults(env, defaults []string) []string {
	env = slices.Clone(env)
	for _, d := range defaults {
		name, _, _ := strings.Cut(d, "=")
		if !has(env, name) {
			env = append(env, d)
		}
	}
	return env
}

func has(env []string, name string) bool {
	return slices.ContainsFunc(env, func(e string) bool { return strings.HasPrefix(e, name+"=") })
}

// get returns the last value of a name, which is the effective one for
// programs.
func get(env []string, name string) string {
	for _, e := range slices.Backward(env) {
		if v, ok := strings.CutPrefix(e, name+"="); ok {
			return v
		}
	}
	return ""
}

// lookPath is exec.LookPath with another PATH.
func lookPath(program, path string) string {
	for _, dir := range filepath.SplitList(path) {
		if !filepath.IsAbs(dir) {
			continue
		}
		p := filepath.Join(dir, program)
		if st, err := os.Stat(p); err == nil && st.Mode().IsRegular() && st.Mode()&0o111 != 0 {
			return p
		}
	}
	return ""
}
