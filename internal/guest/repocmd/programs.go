package repocmd

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/hostos"
)

// shells are programs that wait for a person and have no state worth a question.
var shells = []string{"bash", "sh", "dash", "zsh", "fish"}

// interpreters are programs of which the first argument names what runs.
var interpreters = []string{"node", "python", "python3", "bun", "deno", "ruby", "perl", "bash", "sh"}

// quiet are programs of AgentLab's terminals themselves.
var quiet = []string{"agentlab-agent", "agent-runner", "tmux", "zellij", "git"}

// programs returns the programs whose working directory is in a directory of the
// repository, without this one and those that it descends from. "" is the whole
// repository.
func (r repo) programs(dir string) (guestapi.RepoPrograms, error) {
	out := guestapi.RepoPrograms{Names: []string{}}
	if dir != "" && !filepath.IsLocal(dir) {
		return out, fmt.Errorf("%q is not in the repository", dir)
	}
	top, err := filepath.EvalSymlinks(filepath.Join(r.dir, dir))
	if err != nil {
		return out, err
	}
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return out, err
	}
	own := ancestors()
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || slices.Contains(own, pid) {
			continue
		}
		cwd, err := os.Readlink("/proc/" + e.Name() + "/cwd") // also fails for other users
		if err != nil || cwd != top && !strings.HasPrefix(cwd, top+"/") {
			continue
		}
		if dir == guestapi.MainWorktree && strings.HasPrefix(cwd, filepath.Join(top, guestapi.WorktreesDir)+"/") {
			continue
		}
		line, _ := os.ReadFile("/proc/" + e.Name() + "/cmdline") // "" for one that has ended
		switch name := programName(string(line)); {
		case name == "" || slices.Contains(quiet, name):
		case slices.Contains(shells, name):
			out.Shells++
		case !slices.Contains(out.Names, name) && len(out.Names) < guestapi.MaxRepoPrograms:
			out.Names = append(out.Names, name)
		}
	}
	slices.Sort(out.Names)
	return out, nil
}

// ancestors returns this process and those that it descends from.
func ancestors() (pids []int) {
	for pid := os.Getpid(); pid > 0 && !slices.Contains(pids, pid); {
		pids = append(pids, pid)
		fields, _ := hostos.ProcStat(pid)
		if len(fields) < 2 {
			break
		}
		pid, _ = strconv.Atoi(fields[1])
	}
	return pids
}

// programName returns the name of the program of a command line as in /proc.
func programName(cmdline string) string {
	argv := strings.Split(strings.TrimRight(cmdline, "\x00"), "\x00")
	base := func(arg string) string {
		name, _, _ := strings.Cut(strings.TrimPrefix(filepath.Base(arg), "-"), ":") // "-bash", "tmux: server"
		return agentlab.Cut(name, 100)
	}
	name := base(argv[0])
	if argv[0] == "" {
		return ""
	}
	if slices.Contains(interpreters, name) && len(argv) > 1 && !strings.HasPrefix(argv[1], "-") {
		return base(argv[1])
	}
	return name
}
