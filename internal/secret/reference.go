package secret

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/bounded"
)

// A stored value that begins with one of these words is a reference to the
// source of the value, which is read at delivery.
//
//	op://VAULT/ITEM/FIELD   what `op read` prints (1Password)
//	env:NAME                a variable of the daemon's environment
//	file:/PATH              a private file on the host
//	cmd:PROGRAM ARG…        what a program prints; words as a shell splits
//	                        them, but no shell: nothing is expanded
//
// A literal that begins like that, or with "literal:", is stored after
// "literal:".
const (
	refOp         = "op://"
	refEnv        = "env:"
	refFile       = "file:"
	refCmd        = "cmd:"
	literalPrefix = "literal:"
)

// Limits of resolving.
const (
	refTimeout    = 20 * time.Second // for all references of a bundle; a runner waits 30 s for its answer
	refAtOnce     = 4                // references of one bundle that are resolved at the same time
	maxRefBytes   = 4096
	outputTimeout = 2 * time.Second // for output that a child process of the program keeps open
)

// parseReference reports whether a stored text is a reference, and of which
// kind.
func parseReference(text string) (kind string, ok bool) {
	for _, kind := range []string{refOp, refEnv, refFile, refCmd} {
		if strings.HasPrefix(text, kind) {
			return kind, true
		}
	}
	return "", false
}

// literal returns the value of a stored text that is not a reference.
func literal(text string) string { return strings.TrimPrefix(text, literalPrefix) }

// storeLiteral returns the text at rest for a plain value, so that literal
// gives the value again and no reader takes it for a reference.
func storeLiteral(value string) string {
	if _, ok := parseReference(value); ok || strings.HasPrefix(value, literalPrefix) {
		return literalPrefix + value
	}
	return value
}

// checkReference checks the syntax of a reference and does not resolve it.
func checkReference(key, text string) error {
	bad := func(format string, args ...any) error {
		return agentlab.Errorf(agentlab.CodeInvalid, format, args...).WithField(key)
	}
	kind, _ := parseReference(text)
	rest := strings.TrimPrefix(text, kind)
	switch {
	case len(text) > maxRefBytes:
		return bad("the reference has more than %d bytes", maxRefBytes)
	case strings.ContainsAny(text, "\x00\r\n"):
		return bad("the reference has more than one line")
	}
	switch kind {
	case refOp:
		if len(strings.Split(rest, "/")) < 3 || strings.Contains("/"+rest+"/", "//") {
			return bad("the reference %q is not op://VAULT/ITEM/FIELD", text)
		}
	case refEnv:
		if !envName.MatchString(rest) {
			return bad("the reference %q does not name an environment variable", text)
		}
	case refFile:
		if !filepath.IsAbs(rest) {
			return bad("the reference %q is not an absolute path", text)
		}
	case refCmd:
		words, err := splitWords(rest)
		if err != nil || len(words) == 0 {
			return bad("the reference %q is not a command", text)
		}
		if strings.Contains(words[0], "/") && !filepath.IsAbs(words[0]) {
			return bad("the program of %q is neither a name nor an absolute path", text)
		}
	}
	return nil
}

// resolve replaces every reference of b by its value. Codes of permanent
// errors: invalid, not_found, denied; of temporary ones: unavailable, timeout.
// The field of an error is the key.
func resolve(ctx context.Context, b Bundle) (Bundle, error) {
	ctx, cancel := context.WithTimeout(ctx, refTimeout)
	defer cancel()
	entries := b.entries()
	errs := make([]error, len(entries))
	slots := make(chan struct{}, refAtOnce)
	var wg sync.WaitGroup
	for i := range entries {
		e := &entries[i]
		if _, ok := parseReference(e.value); !ok {
			e.value = literal(e.value)
			continue
		}
		wg.Go(func() {
			select {
			case slots <- struct{}{}:
				defer func() { <-slots }()
			case <-ctx.Done():
			}
			e.value, errs[i] = resolveOne(ctx, e.key, e.value)
		})
	}
	wg.Wait()
	var out Bundle
	for i, e := range entries {
		if errs[i] != nil {
			return Bundle{}, errs[i]
		}
		out.put(e.key, e.value)
	}
	return out, nil
}

func resolveOne(ctx context.Context, key, text string) (string, error) {
	if err := checkReference(key, text); err != nil {
		return "", err
	}
	kind, _ := parseReference(text)
	rest := strings.TrimPrefix(text, kind)
	var value string
	var err *agentlab.Error
	switch kind {
	case refOp:
		value, err = output(ctx, []string{"op", "read", "--no-newline", text})
	case refEnv:
		if value = os.Getenv(rest); value == "" {
			err = agentlab.Errorf(agentlab.CodeNotFound, "it is not in the environment of agentlabd")
		}
	case refFile:
		value, err = readReferred(rest)
	case refCmd:
		words, _ := splitWords(rest) // checked above
		value, err = output(ctx, words)
	}
	if err == nil {
		value = normalize(key, value)
		if verr, ok := errors.AsType[*agentlab.Error](checkValue(key, value)); ok {
			err = agentlab.Errorf(agentlab.CodeInvalid, "%s", verr.Message)
		}
	}
	if err != nil {
		out := agentlab.Errorf(err.Code, "cannot resolve the reference %q: %s", text, err.Message).WithField(key)
		return "", out.WithHint("%s", err.Hint)
	}
	return value, nil
}

// readReferred reads a private file.
func readReferred(path string) (string, *agentlab.Error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return "", agentlab.Errorf(agentlab.CodeNotFound, "there is no such file")
	case err != nil:
		return "", agentlab.Errorf(agentlab.CodeDenied, "agentlabd cannot open the file")
	}
	defer func() { _ = f.Close() }()
	st, err := f.Stat()
	if err != nil || !st.Mode().IsRegular() {
		return "", agentlab.Errorf(agentlab.CodeInvalid, "it is not a regular file")
	}
	if bad := checkMode(path, st, 0o027); bad != nil {
		return "", bad
	}
	data, err := io.ReadAll(io.LimitReader(f, MaxValueBytes+3))
	if err != nil {
		return "", agentlab.Errorf(agentlab.CodeUnavailable, "the file cannot be read")
	}
	return string(data), nil
}

// output runs a program and returns what it prints.
func output(ctx context.Context, argv []string) (string, *agentlab.Error) {
	path, err := exec.LookPath(argv[0])
	if err != nil {
		return "", agentlab.Errorf(agentlab.CodeNotFound, "the program %q is not installed", argv[0]).WithHint("install it in a directory of the PATH of agentlabd")
	}
	return run(ctx, path, argv[1:], nil, MaxValueBytes)
}

// run runs a program and returns its output, at most most bytes. Its standard
// error is discarded, because it may contain the secret.
func run(ctx context.Context, path string, args, env []string, most int) (string, *agentlab.Error) {
	const byHand = "run it manually as the user that runs agentlabd; its output is not shown here, because it may contain the secret"
	name := filepath.Base(path)
	out := &bounded.Head{Max: most + 2, Fail: io.ErrShortWrite}
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.Dir, cmd.Stdout, cmd.WaitDelay = "/", out, outputTimeout
	cmd.Env = append(os.Environ(), env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	err := cmd.Run()
	if errors.Is(err, exec.ErrWaitDelay) {
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) // child processes that keep its output open
	}
	exit, exited := errors.AsType[*exec.ExitError](err)
	switch {
	case out.Over:
		return "", agentlab.Errorf(agentlab.CodeInvalid, "%s printed more than %d bytes", name, most)
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		return "", agentlab.Errorf(agentlab.CodeTimeout, "%s took longer than %s", name, refTimeout).WithHint("%s", byHand)
	case ctx.Err() != nil:
		return "", agentlab.Errorf(agentlab.CodeUnavailable, "stopped waiting for %s", name)
	case exited && exit.Exited():
		return "", agentlab.Errorf(agentlab.CodeUnavailable, "%s exited with code %d", name, exit.ExitCode()).WithHint("%s", byHand)
	case err != nil:
		return "", agentlab.Errorf(agentlab.CodeUnavailable, "%s did not run to completion", name).WithHint("%s", byHand)
	}
	return out.String(), nil
}

var errQuote = errors.New("a quote is not closed")

// splitWords splits a command as a shell does: words between blanks, '…'
// unchanged, "…" with \" and \\, and \ before a character. Nothing is
// expanded.
func splitWords(s string) ([]string, error) {
	var words []string
	var word strings.Builder
	inWord := false
	var open byte
	for i := 0; i < len(s); i++ {
		c := s[i]
		switch {
		case c == '\\' && open != '\'' && i+1 < len(s) && (open == 0 || s[i+1] == '"' || s[i+1] == '\\'):
			i++
			word.WriteByte(s[i])
			inWord = true
		case open != 0 && c == open:
			open = 0
		case open == 0 && (c == '\'' || c == '"'):
			open, inWord = c, true
		case open == 0 && (c == ' ' || c == '\t'):
			if inWord {
				words = append(words, word.String())
				word.Reset()
			}
			inWord = false
		default:
			word.WriteByte(c)
			inWord = true
		}
	}
	if open != 0 {
		return nil, errQuote
	}
	if inWord {
		words = append(words, word.String())
	}
	return words, nil
}
