package image

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/fsfault"
	"github.com/agentlab-vm/agentlab/internal/hostos"
)

const (
	// tailLines is how many lines of a command's output are kept for its error.
	tailLines = 60
	// maxLog is how many bytes of output the build's log has.
	maxLog = 64 << 20
)

// output takes the output of commands, line by line. It writes all lines to the
// build's log and the steps to progress, and keeps the last lines for an error.
type output struct {
	mu       sync.Mutex
	log      io.Writer
	progress func(string)
	tail     []string
	logged   int // bytes
}

func (o *output) line(s string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.logged < maxLog { // a build does not fail because of its log
		_, _ = fmt.Fprintln(o.log, s)
		if o.logged += len(s) + 1; o.logged >= maxLog {
			_, _ = fmt.Fprintf(o.log, "[the log ends here: it has %d MB]\n", maxLog>>20)
		}
	}
	o.tail = append(o.tail, s)
	if len(o.tail) > tailLines {
		o.tail = o.tail[1:]
	}
	if step, ok := progressLine(s); ok {
		o.progress(step)
	}
}

// progressLine returns the text of a line of a build's log if it is a step.
func progressLine(s string) (string, bool) {
	step, ok := strings.CutPrefix(s, "I: ")
	for _, noise := range []string{"chroot architecture", "finding correct", "running --", "skipping", "success in", "cleaning", "main() received"} {
		ok = ok && !strings.HasPrefix(step, noise)
	}
	return step, ok
}

// step logs a step of the builder.
func (o *output) step(format string, args ...any) { o.line("I: " + fmt.Sprintf(format, args...)) }

func (o *output) last() []string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return append([]string(nil), o.tail...)
}

// commandError is a command that failed, with the end of its output.
type commandError struct {
	name string
	err  error
	tail []string
}

func (e *commandError) Error() string {
	for _, s := range e.tail {
		if text, ok := strings.CutPrefix(s, "E: "); ok {
			return e.name + ": " + text
		}
		if text, ok := strings.CutPrefix(s, "ERROR: "); ok {
			return "pip: " + text
		}
		for _, p := range []string{"npm error ", "npm ERR! "} {
			text, ok := strings.CutPrefix(s, p)
			first, _, _ := strings.Cut(text, " ")
			if ok && !slices.Contains([]string{"code", "syscall", "errno", "path"}, first) {
				return "npm: " + text
			}
		}
	}
	if n := len(e.tail); n > 0 {
		return fmt.Sprintf("%s: %v: %s", e.name, e.err, e.tail[n-1])
	}
	return fmt.Sprintf("%s: %v", e.name, e.err)
}

func (e *commandError) Unwrap() error { return e.err }

// run runs a command to its end with its output going to out. The command is
// killed when ctx ends, and also when this process dies for any reason.
func run(ctx context.Context, out *output, env []string, argv ...string) error {
	pr, pw, err := os.Pipe()
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...) //nolint:gosec // the programs are ours; what recipes add is validated
	cmd.Env, cmd.Stdout, cmd.Stderr = env, pw, pw
	cmd.WaitDelay = 5 * time.Second
	cmd.SysProcAttr = &syscall.SysProcAttr{}
	if err := hostos.EndWithParent(cmd.SysProcAttr); err != nil {
		return errors.Join(err, pr.Close(), pw.Close())
	}

	capture := &output{log: io.Discard, progress: func(string) {}}
	read := make(chan struct{})
	go func() {
		defer close(read)
		copyLines(pr, func(s string) { out.line(s); capture.line(s) })
	}()
	err = pinned(cmd.Run)
	_ = pw.Close()
	<-read
	_ = pr.Close()
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err != nil {
		name := argv[0]
		return &commandError{name: name[strings.LastIndexByte(name, '/')+1:], err: err, tail: capture.last()}
	}
	return nil
}

// pinned runs a command that has a death signal. The kernel sends the signal
// when the thread that started the command ends, so this thread must not end
// before the command.
func pinned(command func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		done <- command()
	}()
	return <-done
}

// copyLines splits lines at 4 KiB, because a progress bar may never end its
// line.
func copyLines(r io.Reader, line func(string)) {
	br := bufio.NewReaderSize(r, 4096)
	for {
		s, err := br.ReadSlice('\n')
		if text := strings.TrimRight(string(s), "\r\n"); text != "" {
			line(text)
		}
		if err != nil && !errors.Is(err, bufio.ErrBufferFull) {
			return
		}
	}
}

// outputFaults are faults of programs that report them only in words: those of
// apt, dpkg, mke2fs, npm and pip in the C locale, in which they run.
var outputFaults = []struct {
	code  agentlab.Code
	words []string
	hint  string
}{
	{agentlab.CodeNoSpace, []string{"No space left on device", "ENOSPC", "Disk quota exceeded", "Could not allocate block"},
		"free disk space in the image directory, or remove images with 'agentlab image rm'"},
	{agentlab.CodeInvalid, []string{"Unable to locate package", "has no installation candidate", "Couldn't find any package"},
		"check the packages of the recipe against its suite and components"},
	{agentlab.CodeInvalid, []string{"does not have a Release file", "404  Not Found"},
		"check the recipe's suite and mirror; a mirror that is just being updated may serve it in a minute"},
	{agentlab.CodeDenied, []string{"NO_PUBKEY", "The following signatures couldn't be verified", "is not signed", "BADSIG"},
		"the host does not trust the mirror's key; install the distribution's archive keyring package"},
	{agentlab.CodeInvalid, []string{"of the recipe's run failed", "of the recipe's run took"},
		"a step runs as the user agent, without network, and writes to /home/agent, /work and /usr/local only"},
	{agentlab.CodeUnavailable, []string{"NewConnectionError", "NameResolutionError", "ConnectTimeoutError", "Cannot connect to proxy"},
		"the Python package index does not answer; check the network, and PIP_INDEX_URL and the proxy settings of this host"},
	{agentlab.CodeInvalid, []string{"No matching distribution found"},
		"check the Python packages and versions of the recipe; only packages with wheels can be installed"},
	{agentlab.CodeInvalid, []string{"code ETARGET", "code E404", "No matching version found"},
		"check the npm packages and versions of the recipe"},
	{agentlab.CodeUnavailable, []string{"Could not resolve", "Temporary failure resolving", "Could not connect", "Failed to fetch",
		"Unable to connect", "Network is unreachable", "Connection timed out", "ENOTFOUND", "ECONNREFUSED", "ECONNRESET", "ETIMEDOUT", "EAI_AGAIN"},
		"the mirror or registry does not answer; check the network, and apt's and npm's proxy settings on this host"},
}

// classify converts the failure of a build's step to an *agentlab.Error.
func classify(step string, err error, log string) error {
	if err == nil {
		return nil
	}
	if ce, ok := errors.AsType[*commandError](err); ok {
		text := strings.Join(ce.tail, "\n")
		for _, f := range outputFaults {
			for _, w := range f.words {
				if strings.Contains(text, w) {
					return agentlab.Errorf(f.code, "%s failed: %w", step, err).WithHint("%s (all output: %s)", f.hint, log)
				}
			}
		}
		return agentlab.Errorf(agentlab.CodeInternal, "%s failed: %w", step, err).WithHint("all output is in %s", log)
	}
	switch {
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return err
	case fsfault.Full(err):
		return agentlab.Errorf(agentlab.CodeNoSpace, "%s failed: %w", step, err).WithHint("%s", outputFaults[0].hint)
	}
	if _, ok := errors.AsType[*agentlab.Error](err); ok {
		return err
	}
	return agentlab.Errorf(agentlab.CodeInternal, "%s failed: %w", step, err)
}
