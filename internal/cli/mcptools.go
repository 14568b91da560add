package cli

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/agentlab-vm/agentlab/internal/mcp"
)

// effect is what a tool does to sandboxes, jobs and files.
type effect int

const (
	toolReads    effect = iota
	toolChanges         // nothing is lost
	toolDestroys        // something may be lost
)

// mcpTool is a command that is a tool of 'agentlab mcp'.
type mcpTool struct {
	path   string // words of the command
	name   string // "" means the words of path
	about  string // for the model
	args   []mcp.Param
	flags  string   // names of the flags that are parameters; others cannot be used
	fixed  []string // flags that each call has, before those of the parameters
	before []string // words before the last argument
	omit   string   // a key of the document that is not returned
	effect effect
	text   bool // its standard output is text, and no JSON document
	notes  bool // its progress has more than events
}

// Arguments of several tools.
var (
	jobParam     = mcp.Param{Name: "job", Description: "ID of the job", Required: true}
	sandboxParam = mcp.Param{Name: "sandbox", Description: "number or name of the sandbox", Required: true}
)

func mcpTools() []mcpTool {
	return slices.Concat(mcpJobTools(), mcpSandboxTools(), mcpOtherTools())
}

func mcpJobTools() []mcpTool {
	job := []mcp.Param{jobParam}
	return []mcpTool{
		{path: "job run", about: "Start a coding agent, or with agent=shell a shell script, on a repository in a new sandbox. Returns the job at once; call job_wait next. Uncommitted changes of a local repository are not sent.",
			flags: "repo ref task! agent profile image ttl keepalive branch session attempts pick", fixed: []string{"--no-wait"}, notes: true, effect: toolChanges},
		{path: "job wait", about: "Wait for a job to end, 45 s unless timeout is set. If its status is still QUEUED or RUNNING, call it again.",
			args: job, flags: "timeout", fixed: []string{"--timeout=45s"}, omit: "events"},
		{path: "job show", about: "Show a job: status, result, artifacts and last events.", args: job},
		{path: "job list", about: "List jobs, newest first.", flags: "status limit", fixed: []string{"--limit=20"}},
		{path: "job logs", about: "Read the log of a job's agent. Of a long log, the beginning and the end.", args: job, flags: "attempt", text: true},
		{path: "job diff", about: "Show the uncommitted changes of a job's agent as a diff.", args: job, flags: "repo stat", text: true},
		{path: "job fetch", about: "Fetch the commits of a job into refs/agentlab/JOB of a local repository. Nothing is checked out or merged.", args: job, flags: "repo with-changes", notes: true, effect: toolChanges},
		{path: "job artifacts", about: "List the artifacts of a job.", args: job},
		{path: "job artifacts download", name: "job_artifact", about: "Read an artifact of a job. Of a long one, the beginning and the end.",
			args: append(job[:1:1], mcp.Param{Name: "path", Description: "path of the artifact", Required: true}), fixed: []string{"--out=-"}, text: true},
		{path: "job cancel", about: "Stop the agent of a job and keep its results.", args: job, effect: toolDestroys},
	}
}

func mcpSandboxTools() []mcpTool {
	sandbox := []mcp.Param{sandboxParam}
	return []mcpTool{
		{path: "sandbox new", about: "Create a sandbox and wait until it is ready.", flags: "name profile image ttl cores memory-mb from-snapshot workspace no-wait", effect: toolChanges},
		{path: "sandbox list", about: "List sandboxes."},
		{path: "sandbox show", about: "Show a sandbox: state, lease, network, resources.", args: sandbox},
		{path: "exec", about: "Run a shell command in a sandbox and return its exit code and output. Of a long output, the beginning and the end.",
			args: append(sandbox[:1:1], mcp.Param{Name: "command", Description: "command for bash", Required: true}), flags: "user dir", before: []string{"--", "bash", "-c"}, effect: toolChanges, text: true},
		{path: "cp", about: "Copy a file or directory of this machine to a sandbox, where existing files are not replaced.",
			args: []mcp.Param{{Name: "source", Description: "PATH on this machine", Required: true}, {Name: "destination", Description: "SANDBOX:PATH", Required: true}}, flags: "user", effect: toolChanges},
		{path: "sandbox logs", about: "Read the console of a sandbox.", args: sandbox, text: true},
		{path: "sandbox stop", about: "Shut down a sandbox and keep its disk.", args: sandbox, effect: toolChanges},
		{path: "sandbox start", about: "Start a stopped sandbox.", args: sandbox, effect: toolChanges},
		{path: "sandbox pause", about: "Pause a sandbox and keep its memory.", args: sandbox, flags: "to-disk", effect: toolChanges},
		{path: "sandbox resume", about: "Continue a paused sandbox.", args: sandbox, effect: toolChanges},
		{path: "sandbox fork", about: "Create copies of a running sandbox, with its disk and processes.", args: sandbox, flags: "count! name-prefix ttl", effect: toolChanges},
		{path: "sandbox snapshot save", about: "Save the disk and memory of a sandbox.", args: sandbox, flags: "name! keep", effect: toolChanges},
		{path: "sandbox snapshot list", about: "List snapshots.", args: []mcp.Param{{Name: "sandbox", Description: sandboxParam.Description}}},
		{path: "sandbox snapshot restore", about: "Replace the disk and memory of a sandbox by those of a snapshot.", args: sandbox, flags: "name!", fixed: []string{"--yes"}, effect: toolDestroys},
		{path: "sandbox lease renew", about: "Set the lease of a sandbox to end this long from now.", args: sandbox, flags: "ttl!", effect: toolChanges},
		{path: "sandbox destroy", about: "Delete a sandbox and its disk.", args: sandbox, effect: toolDestroys},
	}
}

func mcpOtherTools() []mcpTool {
	return []mcpTool{
		{path: "session list", about: "List sessions: names for a workspace and the sandbox that uses it."},
		{path: "workspace list", about: "List workspaces: disks that outlive sandboxes."},
		{path: "profile list", about: "List profiles: image, resources, network policy and secrets of sandboxes."},
		{path: "image list", about: "List built images."},
		{path: "port list", about: "List the TCP ports on which processes in sandboxes listen, with their URLs on this machine."},
		{path: "policy check", about: "Check whether a network policy allows a target, such as github.com:443, and by which rule.",
			args: []mcp.Param{{Name: "target", Description: "HOST:PORT", Required: true}}, flags: "profile sandbox"},
		{path: "egress log", about: "List network requests of sandboxes, and the rules that allowed or denied them.",
			args: []mcp.Param{{Name: "sandbox", Description: sandboxParam.Description}}, flags: "denied job limit", fixed: []string{"--limit=50"}},
		{path: "events", about: "List events of sandboxes, jobs and the daemon.", flags: "sandbox job after limit", fixed: []string{"--limit=50"}},
		{path: "msg post", about: "Post a message for the agents of a job, workspace or session.", flags: "job workspace session text! kind", effect: toolChanges},
		{path: "msg tail", about: "Read the messages of a job, workspace or session.", flags: "job workspace session after limit", fixed: []string{"--limit=50"}},
		{path: "status", about: "Show the state of the daemon and its backend."},
	}
}

// params returns the parameters of the tool: the arguments, then the flags.
func (t mcpTool) params(cmd *cobra.Command) []mcp.Param {
	out := slices.Clone(t.args)
	for name, required := range t.offered() {
		f := cmd.Flags().Lookup(name)
		out = append(out, mcp.Param{Name: paramName(name), Description: f.Usage, Type: paramType(f), Required: required})
	}
	return out
}

// offered yields the flags that are parameters, and whether they are required.
func (t mcpTool) offered() func(yield func(name string, required bool) bool) {
	return func(yield func(string, bool) bool) {
		for _, word := range strings.Fields(t.flags) {
			name, required := strings.CutSuffix(word, "!")
			if !yield(name, required) {
				return
			}
		}
	}
}

func paramName(flag string) string { return strings.ReplaceAll(flag, "-", "_") }

func paramType(f *pflag.Flag) string {
	switch f.Value.Type() {
	case "bool", "boolfunc":
		return mcp.Boolean
	case "int", "int64":
		return mcp.Integer
	}
	return mcp.String
}

// line returns the command line of a call.
func (t mcpTool) line(ctx context.Context, cmd *cobra.Command, args map[string]any, at mcpPlace) ([]string, error) {
	line := append(strings.Fields(t.path), "--no-input", "--json="+strconv.FormatBool(!t.text))
	line = append(line, t.fixed...)
	for name := range t.offered() {
		f := cmd.Flags().Lookup(name)
		v, given := args[paramName(name)]
		if !given && f.DefValue == "." { // the current directory may be another one
			v, given = f.DefValue, true
		}
		if !given || v == false && f.Value.Type() == "boolfunc" { // such a flag has no value
			continue
		}
		text, err := at.check(ctx, t.path, name, argument(v))
		if err != nil {
			return nil, err
		}
		line = append(line, "--"+name+"="+text)
	}
	line = append(line, "--")
	for i, p := range t.args {
		v, given := args[p.Name]
		if !given {
			continue
		}
		text, err := at.check(ctx, t.path, p.Name, argument(v))
		if err != nil {
			return nil, err
		}
		if i == len(t.args)-1 {
			line = append(line, t.before...)
		}
		line = append(line, text)
	}
	return line, nil
}

// argument returns a value as on the command line.
func argument(v any) string {
	if n, ok := v.(float64); ok {
		return strconv.FormatFloat(n, 'f', -1, 64)
	}
	return fmt.Sprint(v)
}
