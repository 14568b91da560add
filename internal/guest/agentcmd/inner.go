package agentcmd

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// Inner describes the sandbox inside the sandbox in which the agent runs.
type Inner struct {
	Args    []string // of the profile, after the built-in options, which they override
	RunDir  string   // the runner's directory, which is hidden from the agent
	Program string   // default /usr/bin/bwrap

	// Writable are directories that the agent may change, besides its own.
	Writable []string
}

const bwrap = "/usr/bin/bwrap"

// inner is a prepared Inner.
type inner struct {
	argv []string // bwrap and its options, up to the agent's own command
	dir  string   // of the agent's own /tmp and home; removed by close
}

func (in *inner) close() error {
	if in == nil {
		return nil
	}
	return os.RemoveAll(in.dir)
}

// wrap changes c to run in bubblewrap, with dir as working directory. The file
// system is read-only except dir, the directories in Writable, /tmp, /var/tmp and the
// home; the last three are empty directories of the agent. Processes, IPC and devices of the
// machine, /run and the runner's secrets are not visible, and no privilege can
// be gained. The network is that of the sandbox.
func (i *Inner) wrap(c *command, dir string) (_ *inner, err error) {
	program := i.Program
	if program == "" {
		program = bwrap
	}
	if _, err := os.Stat(program); err != nil {
		return nil, errors.New("the profile asks for behavior.inner_sandbox: bubblewrap, which this image does not have: add the package bubblewrap to the image's recipe and build it again, or remove the key from the profile")
	}
	home := get(c.env, "HOME")
	if !filepath.IsAbs(home) {
		return nil, errors.New("the inner sandbox needs HOME")
	}
	for _, hidden := range []string{home, "/run", "/tmp", "/var/tmp", i.RunDir} {
		if isBelow(c.path, hidden) {
			return nil, fmt.Errorf("%s is not visible in the inner sandbox: install it outside of %s", c.path, hidden)
		}
	}
	in := &inner{}
	if in.dir, err = os.MkdirTemp("", "agentlab-inner-*"); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			_ = in.close()
		}
	}()
	for _, own := range []string{"home", "tmp", "vartmp"} {
		if err := os.Mkdir(filepath.Join(in.dir, own), 0o700); err != nil {
			return nil, err
		}
	}
	in.argv = append([]string{program}, i.options(c, in.dir, home, dir)...)
	if err := in.try(c); err != nil {
		return nil, err
	}
	c.argv = slices.Concat(in.argv, []string{"--", c.path}, c.argv[1:])
	c.path = program
	return in, nil
}

// options returns the options of bwrap, in the order in which bwrap applies
// them.
func (i *Inner) options(c *command, own, home, dir string) []string {
	o := []string{
		"--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-uts", "--unshare-cgroup-try", "--cap-drop", "ALL",
		"--disable-userns", // and with it most kernel interfaces that only root could use
		"--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc",
		"--tmpfs", "/run", "--ro-bind-try", "/run/agentlab/bin", "/run/agentlab/bin",
		"--bind", filepath.Join(own, "tmp"), "/tmp",
		"--bind", filepath.Join(own, "vartmp"), "/var/tmp",
		"--bind", filepath.Join(own, "home"), home,
		"--ro-bind-try", filepath.Join(home, ".gitconfig"), filepath.Join(home, ".gitconfig"),
	}
	if x := get(c.env, "XDG_RUNTIME_DIR"); isBelow(x, "/run") {
		o = append(o, "--perms", "0700", "--dir", x)
	}
	if conf, err := filepath.EvalSymlinks("/etc/resolv.conf"); err == nil && isBelow(conf, "/run") {
		o = append(o, "--ro-bind", conf, conf)
	}
	if i.RunDir != "" {
		messages := filepath.Join(i.RunDir, "messages") // agentlab-msg and its token, which is for messages only
		o = append(o, "--perms", "0700", "--tmpfs", i.RunDir, "--ro-bind-try", messages, messages)
	}
	for _, d := range append([]string{dir}, i.Writable...) {
		o = append(o, "--bind", d, d)
	}
	if len(c.argv) > 0 && slices.Contains(c.argv, c.task) { // it opens the file by name
		o = append(o, "--ro-bind", c.task, c.task)
	}
	for _, link := range managedFiles {
		if file, err := os.Readlink(filepath.Join(home, link)); err == nil && isBelow(file, i.RunDir) {
			o = append(o, "--bind", file, filepath.Join(home, link))
		}
	}
	return slices.Concat(o, i.Args, []string{"--chdir", dir})
}

// tryTime limits the creation of the inner sandbox.
const tryTime = time.Minute

// try creates the inner sandbox once as a test, because its failure would look
// like a failure of the agent.
func (in *inner) try(c *command) error {
	ctx, cancel := context.WithTimeout(context.Background(), tryTime)
	defer cancel()
	cmd := exec.CommandContext(ctx, in.argv[0], slices.Concat(in.argv[1:], []string{"--", "/bin/true"})...)
	var said bytes.Buffer
	cmd.Env, cmd.Stdout, cmd.Stderr, cmd.WaitDelay = c.env, &said, &said, time.Second
	if err := cmd.Run(); err != nil {
		why, _, _ := strings.Cut(strings.TrimSpace(said.String()), "\n")
		if why == "" {
			why = err.Error()
		}
		return fmt.Errorf("the inner sandbox cannot be made: %.300s", why)
	}
	return nil
}

// isBelow reports whether path is dir or below it.
func isBelow(path, dir string) bool {
	return dir != "" && (path == dir || strings.HasPrefix(path, strings.TrimSuffix(dir, "/")+"/"))
}
