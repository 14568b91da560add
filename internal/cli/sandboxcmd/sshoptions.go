package sandboxcmd

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/agentlab-vm/agentlab"

	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
)

// sshForwards are options that OpenSSH adds up: no value before them prevents that the
// ones for all hosts count, and ClearAllForwardings would also remove those of the
// command line, with which editors reach their servers.
var sshForwards = []string{"remoteforward", "localforward", "dynamicforward"}

// sshEnv are the patterns of SendEnv that tell a sandbox only the language and the
// terminal of the user. Distributions send some of them to all hosts.
var sshEnv = []string{"LANG", "LANGUAGE", "LC_*", "TERM", "COLORTERM", "TZ"}

// sshWithValue are the options of the command line of ssh that have a value.
const sshWithValue = "bceilmopBDEFIJLOPQRSwW"

// checkSSHOptions returns an error if the configuration of OpenSSH forwards something
// to, or from, a sandbox, or sends it variables. args is the command line of the ssh
// that asks for the connection, as far as it is known.
func checkSSHOptions(ctx context.Context, host string, args []string) error {
	argv := []string{"-G"}
	if file := sshConfigArg(args); file != "" {
		argv = append(argv, "-F", file)
	}
	var stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, "ssh", append(argv, "--", host)...)
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return agentlab.Errorf(agentlab.CodeUnavailable, "cannot read the configuration of OpenSSH for %s: %w: %s", host, err, agentlab.WithoutControls(gitsafe.LastLine(strings.TrimSpace(stderr.String())))).
			WithHint("run: ssh -G %s", host)
	}
	return refusedSSHOption(host, string(out))
}

// refusedSSHOption returns an error for the first option in the output of 'ssh -G' that a
// sandbox must not have.
func refusedSSHOption(host, options string) error {
	lines := bufio.NewScanner(strings.NewReader(options))
	lines.Buffer(nil, maxSSHConfig)
	for lines.Scan() {
		name, value, _ := strings.Cut(lines.Text(), " ")
		why := ""
		switch {
		case slices.Contains(sshForwards, name):
			why = "connects this machine with the sandbox"
		case name == "sendenv" && !slices.Contains(sshEnv, value):
			why = "sends the sandbox variables of your environment"
		default:
			continue
		}
		return agentlab.Errorf(agentlab.CodeDenied, "%q in your configuration of OpenSSH %s", agentlab.WithoutControls(name+" "+value), why).
			WithHint("apply it to other hosts only, in ~/.ssh/config: Host * !*%s (ssh -G %s shows what applies)", sshSuffix, host)
	}
	return lines.Err()
}

// sshConfigArg returns the configuration file in a command line of ssh, "" if there is
// none.
func sshConfigArg(args []string) string {
	if len(args) == 0 || filepath.Base(args[0]) != "ssh" {
		return ""
	}
	host := false
	for i := 1; i < len(args); i++ {
		flags, isFlag := strings.CutPrefix(args[i], "-")
		switch {
		case args[i] == "--" || !isFlag && host: // the command follows
			return ""
		case !isFlag || flags == "":
			host = true
			continue
		}
		at := strings.IndexAny(flags, sshWithValue)
		if at < 0 {
			continue
		}
		value := flags[at+1:]
		if value == "" && i+1 < len(args) {
			i++
			value = args[i]
		}
		if flags[at] == 'F' {
			return value
		}
	}
	return ""
}

// parentArgs returns the command line of the parent process: of ssh, for a
// ProxyCommand. It returns nil where there is no /proc.
func parentArgs() []string {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", os.Getppid()))
	if err != nil {
		return nil
	}
	return strings.Split(strings.TrimSuffix(string(text), "\x00"), "\x00")
}
