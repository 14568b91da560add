package runner

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/bounded"
	"github.com/agentlab-vm/agentlab/internal/guest/agentcmd"
	"github.com/agentlab-vm/agentlab/internal/hostos"
)

// git runs the runner's git commands. The repository is hostile, so nothing in it
// or around it can make them run a program or open a connection: no system or
// global configuration, no hooks, no file system monitor, no submodules, no
// transports but the four below, and after the agent had the repository not
// even its own configuration (see collect.go). What the agent runs itself is
// free.
type git struct {
	program string
	config  [][2]string // highest precedence, set by the environment
	env     []string

	progress func(step string, percent int) // gets git's progress; may be nil
}

// newGit prepares git for a job. The credential is used only for its own
// scheme and host and is never an argument, nor in any repository's
// configuration: for HTTP a credential helper, which git itself binds to the
// host, also after a redirect, reads it from a file; SSH has its key file.
func newGit(d dir, job *guestapi.Job, cred *guestapi.Git) (*git, error) {
	g := &git{program: "git", config: [][2]string{
		{"core.hooksPath", os.DevNull}, {"core.fsmonitor", "false"}, {"core.untrackedCache", "false"},
		{"protocol.allow", "never"}, {"protocol.https.allow", "always"}, {"protocol.http.allow", "always"},
		{"protocol.git.allow", "always"}, {"protocol.ssh.allow", "always"},
		{"submodule.recurse", "false"}, {"fetch.recurseSubmodules", "false"},
		{"gc.auto", "0"}, {"maintenance.auto", "false"}, {"advice.detachedHead", "false"},
		{"init.defaultBranch", "main"}, {"safe.directory", "*"}, {"credential.helper", ""},
		{"http.lowSpeedLimit", "1"}, {"http.lowSpeedTime", "120"},
	}}
	ssh := sshCommand(d, "")
	if cred != nil && cred.Token != "" {
		scope, err := credentialScope(job, cred)
		if err != nil {
			return nil, err
		}
		if scope != "" {
			g.config = append(g.config, [2]string{"credential." + scope + ".helper", credentialHelper(d)})
		}
	}
	if sshKeyFits(job, cred) {
		ssh = sshCommand(d, d.path(fileSSHKey))
	}
	g.env = []string{
		"PATH=" + os.Getenv("PATH"), "HOME=" + d.path("nohome"), "LANG=C", "LC_ALL=C",
		"GIT_CONFIG_NOSYSTEM=1", "GIT_CONFIG_GLOBAL=" + os.DevNull, "GIT_TERMINAL_PROMPT=0",
		"GIT_ATTR_NOSYSTEM=1", "GIT_NO_REPLACE_OBJECTS=1", "GIT_SSH_COMMAND=" + ssh,
		"GIT_AUTHOR_NAME=AgentLab", "GIT_AUTHOR_EMAIL=agentlab@localhost",
		"GIT_COMMITTER_NAME=AgentLab", "GIT_COMMITTER_EMAIL=agentlab@localhost",
	}
	return g, nil
}

// credentialHelper returns a credential helper that runs one shell and one
// cat, and only if a server asks for a credential.
func credentialHelper(d dir) string {
	return fmt.Sprintf("!f() { test \"$1\" = get && cat %s; }; f", agentcmd.ShellQuote(d.path(fileGitCred)))
}

func sshCommand(d dir, key string) string {
	cmd := "ssh -F none -o BatchMode=yes -o StrictHostKeyChecking=accept-new -o ConnectTimeout=30 -o ServerAliveInterval=15 -o UserKnownHostsFile=" + agentcmd.ShellQuote(d.path(fileKnownHosts))
	if key == "" {
		return cmd + " -o IdentityFile=none -o IdentitiesOnly=yes"
	}
	return cmd + " -o IdentitiesOnly=yes -i " + agentcmd.ShellQuote(key)
}

// credentialScope returns the scheme and host of the token, as a pattern of
// git's credential configuration; "" if it is for another kind of URL.
func credentialScope(job *guestapi.Job, cred *guestapi.Git) (string, error) {
	u, err := url.Parse(cmp.Or(cred.URL, job.RepoURL))
	if err != nil {
		return "", errors.New("the URL of the git credential is not valid")
	}
	if u.Scheme != "https" && u.Scheme != "http" || u.Host == "" {
		return "", nil
	}
	return u.Scheme + "://" + u.Host, nil
}

// hostOf returns the scheme and host of a repository's URL. The scp form is
// ssh.
func hostOf(raw string) (scheme, host string) {
	if !strings.Contains(raw, "://") {
		h, _, ok := strings.Cut(raw, ":")
		if !ok {
			return "", ""
		}
		return "ssh", h[strings.LastIndexByte(h, '@')+1:]
	}
	u, err := url.Parse(raw)
	if err != nil {
		return "", ""
	}
	if strings.Contains(u.Scheme, "ssh") {
		return "ssh", u.Hostname()
	}
	return u.Scheme, u.Host
}

// sameHost reports whether a credential for the URL b is valid for the URL a.
func sameHost(a, b string) bool {
	as, ah := hostOf(a)
	bs, bh := hostOf(b)
	return ah != "" && strings.EqualFold(ah, bh) && as == bs
}

// sshKeyFits reports whether the job's remote uses SSH and the credential has
// a key for it. The key is for the host of the credential's URL, regardless of
// its scheme, which is that of the token: a server never receives the key.
func sshKeyFits(job *guestapi.Job, cred *guestapi.Git) bool {
	if cred == nil || cred.SSHPrivateKey == "" {
		return false
	}
	scheme, host := hostOf(job.RepoURL)
	_, credHost := hostOf(cmp.Or(cred.URL, job.RepoURL))
	if name, _, err := net.SplitHostPort(credHost); err == nil {
		credHost = name
	}
	return scheme == "ssh" && host != "" && strings.EqualFold(host, credHost)
}

// mayPush reports whether the credential is for the job's own remote.
func mayPush(job *guestapi.Job, cred *guestapi.Git) bool {
	if scheme, _ := hostOf(job.RepoURL); scheme == "ssh" {
		return sshKeyFits(job, cred)
	}
	return cred != nil && cred.Token != "" && job.RepoURL != "" && sameHost(job.RepoURL, cmp.Or(cred.URL, job.RepoURL))
}

// stageGit writes the credential's files.
func stageGit(d dir, cred *guestapi.Git) error {
	if cred == nil {
		return nil
	}
	var errs []error
	write := func(name, content string) { errs = append(errs, os.WriteFile(d.path(name), []byte(content), 0o600)) }
	if cred.Token != "" {
		name := cred.Username
		if name == "" {
			name = "x-access-token"
		}
		if strings.ContainsAny(name+cred.Token, "\n\x00") {
			return errors.New("the git credential contains a line break")
		}
		write(fileGitCred, "username="+name+"\npassword="+cred.Token+"\n")
	}
	if cred.SSHPrivateKey != "" {
		write(fileSSHKey, strings.TrimSpace(cred.SSHPrivateKey)+"\n")
	}
	if cred.SSHKnownHosts != "" {
		write(fileKnownHosts, strings.TrimSpace(cred.SSHKnownHosts)+"\n")
	}
	return errors.Join(errs...)
}

// environ is the environment of the runner's git commands, with more configuration.
func (g *git) environ(extra ...[2]string) []string {
	env, config := slices.Clone(g.env), slices.Concat(g.config, extra)
	for i, kv := range config {
		env = append(env, fmt.Sprintf("GIT_CONFIG_KEY_%d=%s", i, kv[0]), fmt.Sprintf("GIT_CONFIG_VALUE_%d=%s", i, kv[1]))
	}
	return append(env, "GIT_CONFIG_COUNT="+strconv.Itoa(len(config)))
}

// gitError is a git command that failed.
type gitError struct {
	command string
	code    int
	stderr  string
}

// boilerplate is git's message after every failure of SSH. It would hide the
// message of SSH before it.
var boilerplate = strings.NewReplacer(
	"Please make sure you have the correct access rights\nand the repository exists.", "",
	"fatal: Could not read from remote repository.", "",
)

func (e *gitError) Error() string {
	msg := strings.TrimSpace(boilerplate.Replace(e.stderr))
	if lines := strings.Split(msg, "\n"); len(lines) > 3 {
		msg = strings.Join(lines[len(lines)-3:], "\n")
	}
	return fmt.Sprintf("git %s failed: %s", e.command, strings.Join(strings.Fields(strings.ReplaceAll(msg, "fatal: ", "")), " "))
}

// run runs git with environ env in dir and returns its standard output.
func (g *git) run(ctx context.Context, cwd string, env []string, args ...string) (string, error) {
	return g.runInput(ctx, cwd, env, nil, args...)
}

// runInput is run with a standard input.
func (g *git) runInput(ctx context.Context, cwd string, env []string, in io.Reader, args ...string) (string, error) {
	out := bounded.Head{Max: 1 << 20}
	err := g.exec(ctx, cwd, env, in, &out, args...)
	return strings.TrimSpace(out.String()), err
}

// stream runs git with its standard output written to w.
func (g *git) stream(ctx context.Context, cwd string, env []string, w io.Writer, args ...string) error {
	return g.exec(ctx, cwd, env, nil, w, args...)
}

// exec runs git. When ctx ends, git and its child processes are killed.
func (g *git) exec(ctx context.Context, cwd string, env []string, in io.Reader, w io.Writer, args ...string) error {
	cmd := exec.CommandContext(ctx, g.program, args...)
	cmd.Dir, cmd.Env, cmd.Stdin, cmd.Stdout = cwd, env, in, w
	stderr := bounded.Head{Max: 64 << 10}
	filter := &gitProgress{w: &stderr, report: g.progress}
	if cmd.Stderr = filter; g.progress == nil {
		cmd.Stderr = filter.w
	}
	// It is killed when this process ends, which Linux binds to the thread
	// that started it.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := hostos.EndWithParent(cmd.SysProcAttr); err != nil {
		return err
	}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = 2 * time.Second
	err := cmd.Run()
	if ctx.Err() != nil {
		return ctx.Err()
	}
	filter.flush()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		return &gitError{command: args[0], code: exit.ExitCode(), stderr: stderr.String()}
	}
	if errors.Is(err, exec.ErrNotFound) {
		return errors.New("git is not installed in this image")
	}
	return err
}
