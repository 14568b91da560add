package cli

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/strictyaml"
	"github.com/agentlab-vm/agentlab/internal/work"
)

// ReadPrivate reads a file with a token. Other users must not be able to read
// it, because the token gives access.
func ReadPrivate(name string) (string, error) {
	info, err := os.Stat(name)
	if err != nil {
		return "", agentlab.Errorf(agentlab.CodeInvalid, "cannot read the token: %w", err)
	}
	if info.Mode().Type()&fs.ModeNamedPipe == 0 && info.Mode().Perm()&0o077 != 0 {
		return "", agentlab.Errorf(agentlab.CodeDenied, "other users can read or write %s (mode %04o)", name, info.Mode().Perm()).
			WithHint("run chmod 600 %s, and revoke the token if others may have read it", work.ShellQuote(name))
	}
	text, err := ReadFile(name, maxTokenFileBytes)
	if err != nil {
		return "", agentlab.Errorf(agentlab.CodeInvalid, "cannot read the token: %w", err)
	}
	return text, nil
}

// WritePrivate writes a file that only its owner can read. The file must not
// exist.
func WritePrivate(name, text string) error {
	f, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return agentlab.Errorf(agentlab.CodeInvalid, "cannot write the token: %w", err).WithHint("choose the path of a new file")
	}
	_, err = io.WriteString(f, text)
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	return err
}

// CopyOut copies a file of a guest to standard output. The guest wrote it: on a terminal
// it is printed only if it is text, without control characters, unless force is
// set.
func CopyOut(w io.Writer, r io.Reader, force bool) error {
	if _, tty := work.TerminalOf(w); tty && !force {
		in := bufio.NewReader(r)
		head, err := in.Peek(in.Size())
		if err != nil && !errors.Is(err, io.EOF) {
			return err
		}
		if bytes.IndexByte(head, 0) >= 0 {
			return agentlab.Errorf(agentlab.CodeInvalid, "the file is binary and standard output is a terminal").
				WithHint("write it to a file or a pipe, or print it with --force")
		}
		r = in
	}
	if !force {
		w = work.LogWriter(w)
	}
	_, err := io.Copy(w, r)
	return err
}

// OutputName applies --out, a file or directory, to a default file name.
func OutputName(out, name string) string {
	if out == "" {
		return name
	}
	if info, err := os.Stat(out); strings.HasSuffix(out, "/") || err == nil && info.IsDir() {
		return filepath.Join(out, name)
	}
	return out
}

// ReadInput reads a file of at most limit bytes; - is standard input.
func (a *App) ReadInput(path string, limit int64) (string, error) {
	if path == "-" {
		return ReadLimited(a.Stdin, "standard input", limit)
	}
	return ReadFile(path, limit)
}

// ReadFile reads a file of at most limit bytes.
func ReadFile(path string, limit int64) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", agentlab.Errorf(agentlab.CodeInvalid, "cannot read the file: %w", err)
	}
	defer func() { _ = f.Close() }()
	return ReadLimited(f, path, limit)
}

// ReadLimited reads at most limit bytes of r, and returns an error for a longer text. Errors
// contain the name.
func ReadLimited(r io.Reader, name string, limit int64) (string, error) {
	text, err := io.ReadAll(io.LimitReader(r, limit+1))
	if err != nil {
		return "", agentlab.Errorf(agentlab.CodeInvalid, "cannot read %s: %w", name, err)
	}
	if int64(len(text)) > limit {
		return "", agentlab.Errorf(agentlab.CodeInvalid, "%s is larger than %d bytes", name, limit)
	}
	return string(text), nil
}

// MaxRecipeBytes limits a recipe or profile that is sent to the daemon.
const MaxRecipeBytes = strictyaml.MaxBytes
