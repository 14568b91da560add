package agentcmd

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/agentlab-vm/agentlab/internal/guest/filescmd"
	"github.com/agentlab-vm/agentlab/internal/guest/repocmd"
	"github.com/agentlab-vm/agentlab/internal/version"
)

const usage = `agentlab-agent runs a coding agent with every permission granted.

Usage:
  agentlab-agent run --agent NAME [--task-file FILE]   run a task; FILE "-", the default, is standard input
  agentlab-agent versions [--json]                     list the installed agents and their versions
  agentlab-agent open [--session NAME] [--dir DIR] [--agent NAME [--resume] | --run COMMAND] [--detach] [-- ARGS]
                                                       attach to a terminal, in which an agent runs
  agentlab-agent repo COMMAND                          read and update the repository of a session
  agentlab-agent files COMMAND                         copy files to and from the host
  agentlab-agent --version

Agents: claude, codex, opencode, gemini, shell (the task is a bash script).
The exit code is the agent's; 127 when it is not installed in this image,
126 when it cannot be run, 2 for wrong usage.
`

// Main runs the command agentlab-agent; args do not include the program's
// name.
func Main(args []string) int { return mainTo(os.Stdout, args) }

func mainTo(stdout io.Writer, args []string) int {
	if len(args) == 0 {
		fmt.Fprint(os.Stderr, usage)
		return 2
	}
	switch args[0] {
	case "-h", "--help", "help":
		fmt.Fprint(stdout, usage)
		return 0
	case "--version", "version":
		fmt.Fprintln(stdout, "agentlab-agent "+version.String())
		return 0
	case "run":
		return runMain(stdout, args[1:])
	case "versions":
		return versionsMain(stdout, args[1:])
	case "open":
		return openMain(stdout, args[1:])
	case "terminal": // internal: before open
		return terminalMain(stdout, args[1:])
	case "files":
		return filescmd.Main(args[1:])
	case "repo":
		reclaim()
		return repocmd.Main(args[1:])
	case "session": // internal: before open
		return sessionMain(os.Stdin, stdout, args[1:])
	case "close": // internal: before a work tree is removed
		return closeMain(args[1:])
	case "services": // internal: for the runner
		return servicesMain(args[1:])
	case "devcontainer": // internal: for the runner
		return devcontainerMain(args[1:])
	case "contained": // internal: in a dev container
		return containedMain(stdout, args[1:])
	case "forward": // internal: as root
		return forwardMain(args[1:])
	case "pane": // internal: in a pane of Zellij
		return paneMain(args[1:])
	case "tui": // internal: in a window of open
		return tuiMain(args[1:])
	case "supervise": // internal: see Supervise
		if len(args) == 2 {
			return Supervise(args[1])
		}
	}
	fmt.Fprintf(os.Stderr, "agentlab-agent: unknown arguments %q\n\n%s", args, usage)
	return 2
}

func flags(name string) *flag.FlagSet {
	f := flag.NewFlagSet("agentlab-agent "+name, flag.ContinueOnError)
	f.Usage = func() { fmt.Fprint(os.Stderr, usage) }
	return f
}

func runMain(stdout io.Writer, args []string) int {
	f := flags("run")
	name := f.String("agent", "", "")
	task := f.String("task-file", "-", "")
	if f.Parse(args) != nil {
		return 2
	}
	_, err := find(*name)
	if err == nil && f.NArg() > 0 {
		err = fmt.Errorf("unknown arguments %q", f.Args())
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "agentlab-agent: %v\n\n%s", err, usage)
		return 2
	}
	if *task == "-" {
		*task = "/dev/stdin"
		if a, _ := find(*name); !a.stdin { // it reads the task from a file, and its standard input is empty
			file, err := spool(os.Stdin)
			if err != nil {
				return reportError(os.Stderr, err)
			}
			defer func() { _ = os.Remove(file) }()
			*task = file
		}
	}
	return Run(*name, *task, os.Environ(), stdout, os.Stderr)
}

func spool(r io.Reader) (string, error) {
	f, err := os.CreateTemp("", "agentlab-task-*")
	if err != nil {
		return "", err
	}
	_, err = io.Copy(f, r)
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	return f.Name(), err
}

// Versions asks every installed agent for its version; it has "" for one that
// does not answer and no entry for one that is not installed. "shell" is
// bash's version.
func Versions(ctx context.Context, env []string) map[string]string {
	versionRE := regexp.MustCompile(`[0-9]+\.[0-9]+\.[0-9A-Za-z.+-]+`)
	out := map[string]string{}
	var mu sync.Mutex
	var wg sync.WaitGroup
	for _, a := range agents {
		path := lookPath(a.program, get(env, "PATH"))
		if path == "" {
			continue
		}
		wg.Go(func() {
			cmd := exec.CommandContext(ctx, path, a.version...)
			cmd.Env = withDefaults(env, slices.Concat(a.env, commonEnv))
			cmd.WaitDelay = time.Second
			p, _ := cmd.Output() // no output, no version
			mu.Lock()
			defer mu.Unlock()
			out[a.name] = string(versionRE.Find(bytes.TrimSpace(p)))
		})
	}
	wg.Wait()
	return out
}

func versionsMain(stdout io.Writer, args []string) int {
	f := flags("versions")
	asJSON := f.Bool("json", false, "")
	if f.Parse(args) != nil || f.NArg() > 0 {
		return 2
	}
	// Node.js programs take many seconds to start under emulation.
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	got := Versions(ctx, os.Environ())
	if *asJSON {
		p, _ := json.Marshal(got) // a map of strings
		fmt.Fprintln(stdout, string(p))
		return 0
	}
	var b strings.Builder
	for _, a := range agents {
		v, ok := got[a.name]
		switch {
		case !ok:
			v = "not installed"
		case v == "":
			v = "installed, version unknown"
		}
		fmt.Fprintf(&b, "%-9s %s\n", a.name, v)
	}
	fmt.Fprint(stdout, b.String())
	return 0
}
