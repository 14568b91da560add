package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/mod/semver"
	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/internal/config"
	"github.com/agentlab-vm/agentlab/internal/lock"
	"github.com/agentlab-vm/agentlab/internal/version"
	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/attach"
)

const (
	daemonStartLimit = 30 * time.Second // for the start of a daemon
	daemonEndLimit   = 2 * time.Second  // for another daemon, after the one that this command started has ended
)

// DaemonPoll is the time between two looks at a daemon that starts or ends.
const DaemonPoll = 20 * time.Millisecond

// Paths returns the directories of the system daemon if its socket exists, else
// of the user's daemon. AGENTLAB_HOME always means the user's daemon.
func (a *App) Paths() (config.Paths, error) {
	if os.Getenv("AGENTLAB_HOME") == "" {
		system, err := config.ResolvePaths(os.Getenv, true)
		if err != nil {
			return config.Paths{}, err
		}
		if _, err := os.Stat(system.Socket()); err == nil {
			return system, nil
		}
	}
	return config.ResolvePaths(os.Getenv, false)
}

// SocketPath returns the path of the control socket of the selected daemon of this machine.
func (a *App) SocketPath() (string, error) {
	if a.Socket != "" {
		return filepath.Abs(a.Socket)
	}
	p, err := a.Paths()
	if err != nil {
		return "", err
	}
	p = p.Running()
	return p.Socket(), p.CheckRun()
}

// Connect returns a client of the daemon. It starts the user's daemon if none is
// running, unless --socket is set.
func (a *App) Connect(ctx context.Context) (c *client.Client, err error) {
	defer func() { a.daemon = c }()
	c, err = a.dial()
	if err != nil || c.Socket() == "" {
		return c, err
	}
	err = c.Ping(ctx)
	switch {
	case err == nil:
	case agentlab.CodeOf(err) == agentlab.CodeDenied:
		return nil, err
	case a.Socket != "":
		return nil, agentlab.Errorf(agentlab.CodeOf(err), "%w", err).WithHint("a daemon is not started for --socket; run agentlabd there")
	default:
		if err := a.startDaemon(ctx); err != nil {
			return nil, err
		}
		return a.dial() // its socket can differ from that of the daemon that did not answer
	}
	return c, nil
}

// dial returns a client of the selected daemon, which need not be running.
func (a *App) dial() (*client.Client, error) {
	url, err := a.remoteURL()
	if err != nil {
		return nil, err
	}
	if url != "" {
		return a.remote(url)
	}
	if a.TokenFile != "" {
		return nil, work.UsageErrorf("--token-file requires --host")
	}
	socket, err := a.SocketPath()
	if err != nil {
		return nil, err
	}
	return client.New(socket), nil
}

// Ping checks that a daemon of this user or root listens on the socket.
func Ping(ctx context.Context, socket string) error {
	return client.New(socket).Ping(ctx)
}

// startDaemon starts the user-mode daemon in the background and waits until
// it answers.
func (a *App) startDaemon(ctx context.Context) error {
	if runtime.GOOS != "linux" {
		return agentlab.Errorf(agentlab.CodeUnsupported, "agentlabd does not run on %s", runtime.GOOS).
			WithHint("run it on a Linux machine, and set --host or AGENTLAB_HOST to its URL (docs/access.md)")
	}
	p, err := a.Paths()
	if err != nil {
		return err
	}
	binary, err := config.FindProgram("agentlabd")
	if err != nil {
		return err
	}
	if err := os.MkdirAll(p.Run, 0o700); err != nil {
		return agentlab.Errorf(agentlab.CodeUnavailable, "cannot create the runtime directory: %w", err)
	}
	if err := p.CheckRun(); err != nil {
		return err
	}
	for {
		exited, startLog, err := launchDaemon(binary, p)
		if err != nil {
			return err
		}
		a.Started = true
		err = awaitDaemon(ctx, p, exited, startLog)
		_ = startLog.Close()
		if !errors.Is(err, errDaemonFreed) {
			return err
		}
	}
}

// errDaemonFreed means that a daemon did not start because of another one, which has
// ended since, for example for a restart.
var errDaemonFreed = errors.New("the other daemon has ended")

// launchDaemon starts a daemon in the background. exited gets its exit code.
func launchDaemon(binary string, p config.Paths) (exited <-chan int, startLog *os.File, err error) {
	startLog, err = openStartLog(filepath.Join(p.Run, "agentlabd.start.log"))
	if err != nil {
		return nil, nil, agentlab.Errorf(agentlab.CodeUnavailable, "cannot write the daemon's start log: %w", err)
	}
	cmd := exec.Command(binary, "run") //nolint:noctx // our binary, which outlives this command
	cmd.Stderr = startLog
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	cmd.Dir = "/"
	// A shell may delete its directory for temporary files at its end; the daemon stays.
	cmd.Env = slices.DeleteFunc(os.Environ(), func(kv string) bool { return strings.HasPrefix(kv, "TMPDIR=") })
	if p.Home != "" { // AGENTLAB_HOME may be relative; the daemon's working directory is /
		cmd.Env = append(cmd.Env, "AGENTLAB_HOME="+p.Home)
	}
	if err := cmd.Start(); err != nil {
		_ = startLog.Close()
		return nil, nil, agentlab.Errorf(agentlab.CodeUnavailable, "cannot start %s: %w", binary, err)
	}
	code := make(chan int, 1)
	go func() {
		_ = cmd.Wait() // the daemon logs errors
		code <- cmd.ProcessState.ExitCode()
	}()
	return code, startLog, nil
}

// openStartLog opens an empty log. It truncates an existing file only if it is a
// regular file of this user with one name: not the target of a link, nor a pipe.
func openStartLog(name string) (_ *os.File, err error) {
	file, err := os.OpenFile(name, os.O_CREATE|os.O_RDWR|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0o600)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			_ = file.Close()
		}
	}()
	info, err := file.Stat()
	if err != nil {
		return nil, err
	}
	if sys, ok := info.Sys().(*syscall.Stat_t); !ok || !info.Mode().IsRegular() || int(sys.Uid) != os.Geteuid() || sys.Nlink != 1 {
		return nil, fmt.Errorf("%s does not belong to you", name)
	}
	return file, file.Truncate(0)
}

// awaitDaemon waits until the daemon accepts connections. If several commands start
// daemons at once, all but one find the home locked and exit, and that one serves all
// commands when it has started. It returns errDaemonFreed if the daemon with the lock ends
// instead.
func awaitDaemon(ctx context.Context, p config.Paths, exited <-chan int, startLog io.ReaderAt) error {
	deadline := time.NewTimer(daemonStartLimit)
	defer deadline.Stop()
	tick := time.NewTicker(DaemonPoll)
	defer tick.Stop()
	var ended, other bool // the daemon has ended; because of another one
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case code := <-exited:
			exited, ended, other = nil, true, code == config.ExitLocked
			if !other {
				deadline.Reset(daemonEndLimit)
			}
		case <-tick.C:
			if Ping(ctx, p.Running().Socket()) == nil {
				return nil
			}
			if pid, _ := lock.Holder(p.Lock()); other && (pid == 0 || syscall.Kill(pid, 0) != nil) {
				return errDaemonFreed
			}
		case <-deadline.C:
			return startFailure(startLog, ended)
		}
	}
}

func startFailure(startLog io.ReaderAt, ended bool) error {
	text, _ := io.ReadAll(io.NewSectionReader(startLog, 0, 16<<10))
	what := "the daemon did not start in time"
	if ended {
		what = "the daemon did not start"
	}
	why := daemonError(string(text))
	if why == "" {
		return agentlab.Errorf(agentlab.CodeUnavailable, "%s", what).WithHint("see 'agentlab daemon logs', or run 'agentlab daemon run' in a terminal")
	}
	return agentlab.Errorf(agentlab.CodeUnavailable, "%s: %s", what, why).WithHint("fix this and try again; 'agentlab daemon run' shows the log")
}

// daemonError returns the error of the daemon in its first lines.
func daemonError(log string) string {
	var kept []string
	for line := range strings.Lines(log) {
		line = strings.TrimRight(line, "\n")
		if s, ok := strings.CutPrefix(line, "agentlabd: "); ok {
			kept = append(kept, s)
		} else if len(kept) > 0 && strings.HasPrefix(line, "  ") {
			kept = append(kept, strings.TrimSpace(line))
		}
	}
	return agentlab.WithoutControls(strings.Join(kept, "; "))
}

// LocalOnly returns an error if a daemon over TCP is selected.
func (a *App) LocalOnly() error {
	url, err := a.remoteURL()
	if err == nil && url != "" {
		err = work.UsageErrorf("this command works only on the daemon's own machine").WithHint("run it there, or unset AGENTLAB_HOST to use the daemon of this machine")
	}
	return err
}

// Limits of the files for a daemon over TCP.
const (
	maxTokenFileBytes = 4 << 10
	maxCAFileBytes    = 4 << 20
)

// remoteURL returns the URL of the selected daemon over TCP; "" means a daemon of
// this machine. Flags take precedence over the environment.
func (a *App) remoteURL() (string, error) {
	switch {
	case a.Host != "" && a.Socket != "":
		return "", work.UsageErrorf("--host and --socket cannot be used together")
	case a.Host != "" || a.Socket != "":
		return a.Host, nil
	}
	return os.Getenv("AGENTLAB_HOST"), nil
}

// ExplicitDaemon reports whether a daemon was selected explicitly; it is then never
// started.
func (a *App) ExplicitDaemon() bool {
	return a.Socket != "" || a.Host != "" || os.Getenv("AGENTLAB_HOST") != ""
}

// remote returns a client of the daemon at url.
func (a *App) remote(url string) (*client.Client, error) {
	r := client.Remote{URL: url, Pin: os.Getenv("AGENTLAB_PIN"), Token: os.Getenv("AGENTLAB_TOKEN")}
	file := a.TokenFile
	if file == "" && r.Token == "" {
		file = os.Getenv("AGENTLAB_TOKEN_FILE")
	}
	if file != "" {
		text, err := ReadPrivate(file)
		if err != nil {
			return nil, err
		}
		r.Token = strings.TrimSpace(text)
	}
	if ca := os.Getenv("AGENTLAB_CA_FILE"); ca != "" {
		pem, err := ReadFile(ca, maxCAFileBytes)
		if err != nil {
			return nil, agentlab.Errorf(agentlab.CodeInvalid, "cannot read the CA file: %w", err).WithField("AGENTLAB_CA_FILE")
		}
		r.CA = []byte(pem)
	}
	return client.NewRemote(r)
}

// DaemonFlags returns flags that select the same daemon in another run of this
// program. The token itself is passed in the environment only.
func (a *App) DaemonFlags() ([]string, error) {
	url, err := a.remoteURL()
	if err != nil {
		return nil, err
	}
	if url == "" {
		socket, err := a.SocketPath()
		return []string{"--socket", socket}, err
	}
	words := []string{"--host", url}
	if a.TokenFile != "" {
		file, err := filepath.Abs(a.TokenFile)
		if err != nil {
			return nil, err
		}
		words = append(words, "--token-file", file)
	}
	return words, nil
}

// RestartSystem restarts the daemon of a machine.
const RestartSystem = "systemctl restart agentlabd"

// noteOldDaemon says that the daemon of this machine, which the command has used, is
// older than this program.
func (a *App) noteOldDaemon() {
	if a.daemon == nil || a.daemon.Socket() == "" || a.JSON || a.internal {
		return
	}
	of, ok := a.daemon.DaemonVersion()
	own := version.Get().Version
	if !ok || !olderVersion(of, own) {
		return
	}
	what, how := "an earlier version", "agentlab daemon restart"
	if of != "" {
		what = "version " + agentlab.WithoutControls(of)
	}
	if p, err := a.Paths(); err == nil && p.System {
		how = RestartSystem
	}
	a.Progressf("note: the daemon is of %s, and this program of %s: restart it, VMs keep running: %s", what, own, how)
}

// olderVersion reports whether the version of a daemon is older than another one. A daemon
// that does not send its version is.
func olderVersion(daemon, own string) bool {
	return daemon == "" || semver.IsValid("v"+daemon) && semver.IsValid("v"+own) && semver.Compare("v"+daemon, "v"+own) < 0
}

// StoppedMark is a file next to the socket of a daemon that a user has stopped. The next
// daemon removes it.
func StoppedMark(socket string) string { return socket + config.StoppedSuffix }

// StoppedByUser reports whether 'agentlab daemon stop' has stopped the selected daemon.
func (a *App) StoppedByUser() bool {
	socket, err := a.SocketPath()
	if err == nil {
		_, err = os.Stat(StoppedMark(socket))
	}
	return err == nil && !a.ExplicitDaemon()
}

// Restart starts the daemon if it is not selected explicitly and the user has not stopped
// it.
func (a *App) Restart(ctx context.Context) (*client.Client, error) {
	if a.ExplicitDaemon() || a.StoppedByUser() {
		return nil, nil
	}
	return a.Connect(ctx)
}

// Attached returns the terminal of the user.
func (a *App) Attached() attach.Terminal {
	return attach.Terminal{In: a.Stdin, Out: a.Stdout, Err: a.Stderr, UI: a, Daemon: a, Now: a.Now}
}
