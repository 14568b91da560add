package agentcmd

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/durable"
	"github.com/agentlab-vm/agentlab/internal/guest/devenv"
	"github.com/agentlab-vm/agentlab/internal/lock"
	"github.com/agentlab-vm/agentlab/internal/projectfile"
)

// servicesMain starts the services of a work tree for the runner.
func servicesMain(args []string) int {
	f := flags("services")
	dir := f.String("dir", "", "")
	file := f.String("file", "", "")
	reason := f.String("reason", "", "")
	if f.Parse(args) != nil || *dir == "" || *file == "" || f.NArg() > 0 {
		return 2
	}
	return noteReason(*reason, devenv.StartServices(context.Background(), *dir, *file, os.Stderr))
}

// noteReason reports an error, and writes it to a file for the runner.
func noteReason(file string, err error) int {
	if err == nil {
		return 0
	}
	err = withHint(err)
	if file != "" {
		_ = os.WriteFile(file, []byte(agentlab.OneLine(err.Error(), maxReason)), 0o600)
	}
	return reportError(os.Stderr, err)
}

// maxReason limits the size of a reason for the runner, in bytes.
const maxReason = 1 << 10

// withHint adds the hint of an error to its text.
func withHint(err error) error {
	if hint := agentlab.HintOf(err); hint != "" {
		return hinted{err, hint}
	}
	return err
}

// hinted is an error with its hint: a program can only write text.
type hinted struct {
	error
	hint string
}

func (h hinted) Error() string { return h.error.Error() + " (" + h.hint + ")" }

// environment is what was started for the repository in this boot.
type environment struct {
	Boot      string            `json:"boot"`     // ID
	Services  string            `json:"services"` // hash of the Compose file; "" if there is none
	Mode      string            `json:"mode"`     // of the dev container
	Config    string            `json:"config"`   // hash of the dev container's configuration; "" if there is none
	Notice    string            `json:"notice,omitempty"`
	Container *devenv.Container `json:"container,omitempty"`
}

// environmentPath is the file of the environment. It is on the disk that has the
// containers.
func environmentPath() string {
	return filepath.Join(os.Getenv("HOME"), ".cache", "agentlab", "environment.json")
}

func readEnvironment() (e environment, ok bool) {
	text, err := os.ReadFile(environmentPath())
	return e, err == nil && json.Unmarshal(text, &e) == nil // another content is that of another version
}

// activeContainer returns the dev container for a directory; nil if there is none.
func activeContainer(dir string) *devenv.Container {
	e, ok := readEnvironment()
	if !ok || e.Container == nil || e.Boot != bootID() || !isBelow(dir, e.Container.Root) {
		return nil
	}
	return e.Container
}

// reclaim makes the repository of the session writable for this user after an agent that
// is another user in a container.
func reclaim() {
	c := activeContainer(guestapi.RepoDir)
	if err := c.Reclaim(context.Background(), guestapi.RepoDir); err != nil {
		fmt.Fprintln(os.Stderr, "agentlab-agent: files of the dev container's user:", err)
	}
}

// maxCompose limits the size of a Compose file, in bytes.
const maxCompose = 1 << 20

// startEnvironment starts the environment of the repository at root, unless that was done
// in this boot. Of several callers one starts it, and the others wait. The mode is of the
// dev container; "" is the one that was used last.
func startEnvironment(root, mode string) (now environment, err error) {
	services, err := declaredServices(root)
	if err != nil {
		return now, err
	}
	now = environment{Boot: bootID(), Services: hashFile(root, services), Mode: chosenMode(mode)}
	if now.Mode != agentlab.DevcontainerOff {
		now.Config = devenv.ConfigHash(root)
	}
	before, ok := readEnvironment()
	if !ok && services == "" && now.Config == "" && now.Mode != agentlab.DevcontainerOn {
		return now, nil
	}
	dir := filepath.Dir(environmentPath())
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return now, err
	}
	held, err := lock.Acquire(context.Background(), filepath.Join(dir, "environment.lock"))
	if err != nil {
		return now, err
	}
	defer func() { _ = held.Unlock() }()
	before, _ = readEnvironment()
	same := now.Boot != "" && now.Boot == before.Boot
	if same && now.Mode == before.Mode && now.Config == before.Config && (before.Container == nil || before.Container.Running(context.Background())) {
		now.Container, now.Notice = before.Container, before.Notice
	} else if err := now.startContainer(root, before); err != nil {
		return now, err
	}
	if services != "" && (!same || now.Services != before.Services) {
		fmt.Fprintf(os.Stderr, "agentlab-agent: starting the services of %s\n", services)
		if err := devenv.StartServices(context.Background(), root, services, os.Stderr); err != nil {
			return now, withHint(fmt.Errorf("the services of %s: %w", services, err))
		}
	}
	return now, durable.ReplaceJSON(environmentPath(), now, durable.None)
}

// startContainer starts the dev container of the repository, if it has one.
func (e *environment) startContainer(root string, before environment) (err error) {
	r := devenv.Request{Dir: root, Mode: e.Mode, Mounts: []string{devenv.RunDir, guestapi.WorkspaceDir, guestapi.ProjectDir}}
	if before.Container != nil {
		r.Before = before.Container.Config
	}
	if e.Config != "" {
		fmt.Fprintln(os.Stderr, "agentlab-agent: starting the dev container")
	}
	if e.Container, e.Notice, err = devenv.StartContainer(context.Background(), r, os.Stderr); err != nil {
		return withHint(err)
	}
	if e.Notice != "" {
		fmt.Fprintln(os.Stderr, "agentlab-agent:", e.Notice)
	}
	return nil
}

// chosenMode returns the mode of the dev container, and remembers one that is not "" on
// the workspace.
func chosenMode(mode string) string {
	at := filepath.Join(filepath.Dir(choicePath()), "devcontainer")
	if mode == "" {
		text, _ := os.ReadFile(at)
		if mode = strings.TrimSpace(string(text)); !slices.Contains(agentlab.DevcontainerModes, mode) {
			mode = agentlab.DevcontainerAuto
		}
		return mode
	}
	if os.MkdirAll(filepath.Dir(at), 0o700) == nil {
		_ = os.WriteFile(at, []byte(mode+"\n"), 0o600) // without it, the default is used next time
	}
	return mode
}

// devcontainerMain starts the dev container of a work tree for the runner.
func devcontainerMain(args []string) int {
	var r devenv.Request
	var state, reason, mounts string
	f := flags("devcontainer")
	f.StringVar(&r.Dir, "dir", "", "")
	f.StringVar(&r.Mode, "mode", "", "")
	f.StringVar(&r.Refuse, "refuse", "", "")
	f.StringVar(&mounts, "mounts", "", "")
	f.StringVar(&state, "state", "", "")
	f.StringVar(&reason, "reason", "", "")
	build := f.Bool("build", false, "")
	if f.Parse(args) != nil || f.NArg() > 0 {
		return 2
	}
	if *build { // from the host, for an image
		return buildContainer(r.Dir)
	}
	r.Mounts = filepath.SplitList(mounts)
	e := Environment{}
	var err error
	if e.Container, e.Notice, err = devenv.StartContainer(context.Background(), r, os.Stderr); err == nil {
		err = durable.ReplaceJSON(state, e, durable.None)
	}
	return noteReason(reason, err)
}

// buildContainer builds the dev container of a work tree for an image.
func buildContainer(dir string) int {
	err := devenv.BuildContainer(context.Background(), dir, os.Stderr)
	if err == nil {
		return 0
	}
	reportError(os.Stderr, withHint(err))
	if agentlab.CodeOf(err) == agentlab.CodeUnsupported {
		return guestapi.ContainerUnsupported
	}
	return ExitNotRun
}

// Environment is the dev container of a job.
type Environment struct {
	Container *devenv.Container // nil: none is used
	Notice    string            // why none is used although there is one
}

// declaredServices returns the Compose file that the project file of a work tree names.
func declaredServices(dir string) (string, error) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return "", err
	}
	defer func() { _ = root.Close() }()
	st, err := root.Stat(projectfile.Name)
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	if err == nil && (!st.Mode().IsRegular() || st.Size() > projectfile.MaxBytes) {
		err = errors.New("it is no small file")
	}
	var p projectfile.File
	var text []byte
	if err == nil {
		text, err = root.ReadFile(projectfile.Name)
	}
	if err == nil {
		p, err = projectfile.Parse(text)
	}
	if err != nil {
		return "", withHint(fmt.Errorf("%s: %w", projectfile.Name, err))
	}
	return p.Services, nil
}

// hashFile returns a hash of a small file and its name; "" for no name.
func hashFile(dir, name string) string {
	if name == "" {
		return ""
	}
	h := sha256.New()
	fmt.Fprintf(h, "%q\n", name)
	if root, err := os.OpenRoot(dir); err == nil {
		defer func() { _ = root.Close() }()
		if f, err := root.Open(name); err == nil {
			_, _ = io.Copy(h, io.LimitReader(f, maxCompose))
			_ = f.Close()
		}
	}
	return hex.EncodeToString(h.Sum(nil))
}

// bootID returns the ID of this boot; "" if the kernel has none.
func bootID() string {
	text, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(text))
}
