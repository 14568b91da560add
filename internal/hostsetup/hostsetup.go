// Package hostsetup runs the scripts that set up a host. They are embedded in
// this program, so that they match its version.
//
// Without --apply, every script prints the commands that it would run now, one
// per line; if it prints none, there is nothing to do. This package knows
// nothing else about them.
package hostsetup

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/bounded"
	"github.com/agentlab-vm/agentlab/profiles"
	"github.com/agentlab-vm/agentlab/scripts"
	"github.com/agentlab-vm/agentlab/skills"
)

// EnvOptions is the environment variable with the options for scripts that
// call agentlab.
const EnvOptions = "AGENTLAB_OPTIONS"

const (
	maxOutput = 1 << 20          // bytes of one script's output
	endGrace  = 10 * time.Second // for the cleanup of a script that is stopped
)

// Kit is an unpacked private copy of the scripts and of the files that they
// install. Close removes it.
type Kit struct {
	dir string
	bin string // directory of this program and the other programs
}

// Unpack writes the scripts to a new directory below parent; "" means the
// system's directory for temporary files.
func Unpack(parent string) (_ *Kit, err error) {
	dir, err := os.MkdirTemp(parent, "agentlab-setup-") // 0700
	if err != nil {
		return nil, agentlab.Errorf(agentlab.CodeUnavailable, "cannot unpack the scripts: %w", err)
	}
	k := &Kit{dir: dir}
	defer func() {
		if err != nil {
			_ = k.Close()
		}
	}()
	for name, tree := range map[string]fs.FS{"scripts": scripts.FS, "skills": skills.FS, "profiles": profiles.FS} {
		if err := unpack(tree, filepath.Join(dir, name)); err != nil {
			return nil, agentlab.Errorf(agentlab.CodeUnavailable, "cannot unpack the scripts: %w", err)
		}
	}
	if self, err := os.Executable(); err == nil {
		if resolved, err := filepath.EvalSymlinks(self); err == nil {
			self = resolved
		}
		k.bin = filepath.Dir(self)
	}
	return k, nil
}

// Close removes the copy.
func (k *Kit) Close() error { return os.RemoveAll(k.dir) }

// unpack writes a tree below dir. Shell scripts are executable.
func unpack(tree fs.FS, dir string) error {
	return fs.WalkDir(tree, ".", func(path string, e fs.DirEntry, err error) error {
		to := filepath.Join(dir, filepath.FromSlash(path))
		if err != nil || e.IsDir() {
			return errors.Join(err, os.MkdirAll(to, 0o700))
		}
		text, err := fs.ReadFile(tree, path)
		if err != nil {
			return err
		}
		mode := fs.FileMode(0o600)
		if strings.HasSuffix(path, ".sh") {
			mode = 0o700
		}
		return os.WriteFile(to, text, mode)
	})
}

// Has reports whether there is a script of that name, such as "net/apply.sh".
func (k *Kit) Has(script string) bool {
	_, err := os.Stat(filepath.Join(k.dir, "scripts", filepath.FromSlash(script)))
	return err == nil
}

// Result is the output and exit code of one script.
type Result struct {
	Output string // standard output
	Notes  string // standard error
	Code   int    // exit code
}

// Commands returns the needed commands: the lines that begin with "+ ".
func (r Result) Commands() []string {
	var out []string
	for line := range strings.Lines(r.Output) {
		if cmd, ok := strings.CutPrefix(strings.TrimRight(line, "\n"), "+ "); ok {
			out = append(out, cmd)
		}
	}
	return out
}

// Complaint returns the last error message of a failed script, and its remedy.
func (r Result) Complaint() (what, remedy string) {
	for line := range strings.Lines(r.Notes) {
		line = strings.TrimRight(line, "\n")
		if advice, ok := strings.CutPrefix(line, "  "); ok && what != "" {
			remedy = advice
			continue
		}
		what, remedy = line, ""
		if _, text, ok := strings.Cut(line, ".sh: "); ok {
			what = text
		}
	}
	return what, remedy
}

// Run runs a script. env is added to this process's environment. Its output is
// also written to live, if that is not nil. A failed script is not an error:
// Result.Code has its exit code. Codes: not_found, unavailable (it could not
// be run), or ctx's own error.
func (k *Kit) Run(ctx context.Context, live io.Writer, env []string, script string, args ...string) (Result, error) {
	path := filepath.Join(k.dir, "scripts", filepath.FromSlash(script))
	if !k.Has(script) {
		return Result{}, agentlab.Errorf(agentlab.CodeNotFound, "script %s not found", script)
	}
	out, notes := bounded.Head{Max: maxOutput}, bounded.Head{Max: maxOutput}
	cmd := exec.CommandContext(ctx, "bash", append([]string{path}, args...)...)
	cmd.Env = append(append(os.Environ(), "AGENTLAB_BIN="+k.bin), env...)
	cmd.Stdout, cmd.Stderr = &out, &notes
	if live != nil {
		cmd.Stdout, cmd.Stderr = io.MultiWriter(&out, live), io.MultiWriter(&notes, live)
	}
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = endGrace
	err := cmd.Run()
	r := Result{Output: out.String(), Notes: notes.String()}
	if ctx.Err() != nil {
		return r, ctx.Err()
	}
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		r.Code = exit.ExitCode()
		return r, nil
	}
	if err != nil {
		return r, agentlab.Errorf(agentlab.CodeUnavailable, "cannot run %s: %w", script, err).WithHint("install bash")
	}
	return r, nil
}
