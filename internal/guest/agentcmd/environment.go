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
	"strings"

	"github.com/agentlab-vm/agentlab"
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

// environment is what open has started for the repository in this boot.
type environment struct {
	Boot     string `json:"boot"`     // ID
	Services string `json:"services"` // hash of the Compose file; "" if there is none
}

// maxCompose limits the size of a Compose file, in bytes.
const maxCompose = 1 << 20

// startEnvironment starts the environment of the repository at root, unless that was done
// in this boot. Of several callers one starts it, and the others wait.
func startEnvironment(root string) error {
	services, err := declaredServices(root)
	if err != nil {
		return err
	}
	dir := filepath.Join(os.Getenv("HOME"), ".cache", "agentlab")
	at := filepath.Join(dir, "environment.json")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	had, _ := os.ReadFile(at)
	if services == "" && len(had) == 0 {
		return nil
	}
	held, err := lock.Acquire(context.Background(), filepath.Join(dir, "environment.lock"))
	if err != nil {
		return err
	}
	defer func() { _ = held.Unlock() }()
	var before environment
	if had, err = os.ReadFile(at); err == nil {
		_ = json.Unmarshal(had, &before) // another content is that of another version
	}
	now := environment{Boot: bootID(), Services: hashFile(root, services)}
	if services != "" && (now != before || now.Boot == "") {
		fmt.Fprintf(os.Stderr, "agentlab-agent: starting the services of %s\n", services)
		if err := devenv.StartServices(context.Background(), root, services, os.Stderr); err != nil {
			return withHint(fmt.Errorf("the services of %s: %w", services, err))
		}
	}
	return durable.ReplaceJSON(at, now, durable.None)
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
