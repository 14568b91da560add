package pvenode

import (
	"context"
	"fmt"
	"io"
	"strings"
)

// Stdio is where a program of the node writes.
type Stdio struct {
	Out, Err io.Writer
	// Gone, if not nil, reports whether the process has been killed: its
	// worker continues, and dies at its next line of output, because its
	// standard output is a pipe to that process. The worker then cleans up
	// nothing.
	Gone func() bool
}

// Run runs a program of the node as root there: qm, pvesh, pvesm or pveum. It
// returns the exit code. When ctx ends, the worker gets SIGTERM and cleans up
// by its own code.
func (n *Node) Run(ctx context.Context, program string, args []string, std Stdio) (exit int) {
	return n.RunOn(ctx, n.name, program, args, std)
}

// RunOn is Run on another node of the cluster.
func (n *Node) RunOn(ctx context.Context, node, program string, args []string, std Stdio) (exit int) {
	t := &tool{n: n, ctx: ctx, node: node, exe: program, std: std}
	defer func() {
		if r := recover(); r != nil {
			if _, dead := r.(killed); !dead {
				panic(r)
			}
			exit = 137
		}
	}()
	switch program {
	case "qm":
		return t.main(qmCommands, args)
	case "pvesm":
		return t.main(pvesmCommands, args)
	case "pveum":
		return t.main(pveumCommands, args)
	case "pvesh":
		return t.pvesh(args)
	}
	t.errorf("%s: command not found\n", program)
	return 127
}

// tool is one run of a program.
type tool struct {
	n    *Node
	ctx  context.Context
	node string
	exe  string
	std  Stdio
}

// pipe is the worker's standard output.
type pipe struct {
	to   io.Writer
	gone func() bool
}

func (p pipe) Write(b []byte) (int, error) {
	if p.gone != nil && p.gone() {
		panic(killed{})
	}
	if p.to != nil {
		_, _ = p.to.Write(b)
	}
	return len(b), nil
}

func (t *tool) printf(format string, args ...any) {
	fmt.Fprintf(pipe{t.std.Out, t.std.Gone}, format, args...)
}

func (t *tool) errorf(format string, args ...any) {
	fmt.Fprintf(pipe{t.std.Err, t.std.Gone}, format, args...)
}

// toolCommand is one command of qm, pvesm or pveum: a call of the API whose
// parameters come from the command line.
type toolCommand struct {
	name   string // "disk move"
	method string
	path   string   // with {node} and the names of parameters
	args   []string // parameters that are given without a name
	fixed  map[string]string
	// show prints the result; nil prints nothing.
	show func(t *tool, resp Response)
	// upidExit makes the exit code 255 when the task failed; without it the
	// exit code of a failed task is 0.
	upidExit bool
	// format accepts the options of formats (--output-format).
	format bool
	// local is a command that is no call of the API; options are its own.
	local   func(t *tool, p values) (exit int)
	options map[string]optionKind
	// files are parameters whose value is the name of a file.
	files []string
}

// optionKind is how the command line takes an option.
type optionKind int

const (
	plainOption optionKind = iota
	boolOption             // its value may be left out
	listOption             // may be repeated: the values are joined
	arrayOption            // may be repeated
)

// main resolves the command, as every tool does: it may have two words, and
// an alias.
func (t *tool) main(table toolTable, args []string) int {
	if len(args) == 0 {
		return t.abort("no command specified")
	}
	words := args
	if alias, ok := table.aliases[words[0]]; ok {
		words = append(strings.Split(alias, " "), words[1:]...)
	}
	for i := range table.commands {
		c := &table.commands[i]
		parts := strings.Split(c.name, " ")
		if len(words) < len(parts) || strings.Join(words[:len(parts)], " ") != c.name {
			continue
		}
		return t.command(c, words[len(parts):])
	}
	for _, c := range table.commands {
		if strings.HasPrefix(c.name, words[0]+" ") {
			if len(words) == 1 {
				return t.abort("incomplete command '" + t.exe + " " + words[0] + "'")
			}
			return t.abort("unknown command '" + t.exe + " " + words[0] + " " + words[1] + "'")
		}
	}
	return t.abort("unknown command '" + t.exe + " " + words[0] + "'")
}

type toolTable struct {
	commands []toolCommand
	aliases  map[string]string
}

// abort ends a run whose command is not there. The real tools list all their
// commands below.
func (t *tool) abort(reason string) int {
	t.errorf("ERROR: %s\nUSAGE: %s <COMMAND> [ARGS] [OPTIONS]\n\n", reason, t.exe)
	return 255
}

func (t *tool) command(c *toolCommand, args []string) int {
	kinds, required := c.options, []string(nil)
	if c.path != "" {
		kinds, required = t.n.options(c.method, c.path)
		if kinds == nil {
			t.errorf("%s\n", notImplemented(c.method, c.path).Message)
			return 255
		}
	}
	kinds = withFormats(kinds, c.format)
	for k := range c.fixed {
		delete(kinds, k)
	}
	delete(kinds, "node")
	usage := t.usage(c, kinds, required)
	p, err := getOptions(kinds, required, args, c.args)
	if err != nil {
		t.fail(err, usage)
		return 255
	}
	std, err := takeFormats(p, c.format)
	if err != nil {
		t.fail(err, usage)
		return 255
	}
	for _, k := range c.files {
		if err := t.fileParameter(p, k); err != nil {
			return t.fail(err, usage)
		}
	}
	for k, v := range c.fixed {
		p[k] = []string{v}
	}
	if c.local != nil {
		return c.local(t, p)
	}
	resp := t.invoke(c.method, c.path, p)
	if resp.Err != nil {
		return t.fail(resp.Err, usage)
	}
	if c.show != nil && !std.quiet {
		t.format(c, std, resp)
	}
	if c.upidExit && resp.TaskError != "" {
		return 255
	}
	return 0
}

func (t *tool) format(c *toolCommand, std formats, resp Response) {
	if c.format && std.output != "" && std.output != "text" {
		t.printData(resp.Data, std)
		return
	}
	c.show(t, resp)
}

// invoke makes a call with parameters of which some are in the path.
func (t *tool) invoke(method, template string, p values) Response {
	path := template
	rest := values{}
	for k, v := range p {
		if strings.Contains(template, "{"+k+"}") {
			path = strings.ReplaceAll(path, "{"+k+"}", v[len(v)-1])
			continue
		}
		rest[k] = v
	}
	return t.call(method, strings.ReplaceAll(path, "{node}", t.node), rest)
}

// call makes a call as root on this node, with workers in the foreground.
func (t *tool) call(method, path string, p values) Response {
	resp := t.n.Invoke(t.ctx, Request{
		Method: method, Path: path, Params: p, User: "root@pam", CLI: true, Node: t.node,
		Out: pipe{t.std.Out, t.std.Gone}, Err: pipe{t.std.Err, t.std.Gone},
	})
	switch {
	case resp.TaskError != "":
		t.errorf("%s\n", resp.TaskError)
	case resp.Task != "" && resp.Err == nil:
		if w := t.n.taskWarnings(resp.Task); w > 0 {
			t.errorf("Task finished with %d warning(s)!\n", w)
		}
	}
	return resp
}

// fail prints an error as a tool dies of it.
func (t *tool) fail(err *Error, usage string) int {
	text := strings.TrimSuffix(err.Message, "\n")
	if err.Status == 400 {
		if before, last, found := strings.Cut(text, "\n"); found {
			t.errorf("%s\n", before)
			text = last
		}
		text = "400 " + text
	}
	for _, r := range text {
		if r > 0xff {
			t.errorf("Wide character in die at /usr/share/perl5/PVE/RESTHandler.pm line 1008.\n")
			break
		}
	}
	t.errorf("%s\n", text)
	for _, k := range sortedKeys(err.Params) {
		t.errorf("%s: %s\n", k, err.Params[k])
	}
	if err.Status == 400 {
		t.errorf("%s\n", usage)
	}
	if err.Exit != 0 {
		return err.Exit
	}
	return exitCode(err)
}

// usage is the line below a parameter's error.
func (t *tool) usage(c *toolCommand, kinds map[string]optionKind, required []string) string {
	words := []string{t.exe, c.name}
	given := map[string]bool{}
	need := map[string]bool{}
	for _, r := range required {
		need[r] = true
	}
	for _, a := range c.args {
		given[a] = true
		switch {
		case a == "extra-args":
			words = append(words, "[<extra-args>]")
		case need[a] || c.local != nil:
			words = append(words, "<"+a+">")
		default:
			words = append(words, "[<"+a+">]")
		}
	}
	options := false
	for _, k := range sortedKeys(kinds) {
		switch {
		case given[k] || k == "output-format" || k == "noborder" || k == "noheader" || k == "quiet" || k == "human-readable":
		case need[k]:
			words = append(words, "--"+k+" <string>")
			options = true
		default:
			options = true
		}
	}
	if options {
		words = append(words, "[OPTIONS]")
	}
	if c.format {
		words = append(words, "[FORMAT_OPTIONS]")
	}
	return strings.Join(words, " ")
}
