package runner

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab/internal/durable"
	"github.com/agentlab-vm/agentlab/internal/guest/msgcmd"
)

// The files of the run directory, in addition to those of the agent's
// supervisor. Each contains one fact and is written atomically.
const (
	fileResponse   = "bootstrap.json" // fetched response; deleted last
	fileBoot       = "boot.json"      // when it was fetched
	fileRepo       = "repo.json"      // the repository is in place
	fileStop       = "stop.json"      // the agent must be stopped, and why
	fileOutcome    = "outcome.json"   // how the work ended
	fileUnsent     = "unsent.json"    // the controller does not have all work in the checkout
	fileFinal      = "final.json"     // the final report
	fileKills      = "kills.json"     // guestapi.MemoryKills before the job
	fileTask       = "task"
	fileLog        = "agent.log" // redacted
	fileEnv        = "env.sh"
	dirMessages    = msgcmd.Dir       // agentlab-msg and its configuration; package agentcmd knows the name
	fileGitCred    = "git-credential" //nolint:gosec // a file name
	fileSSHKey     = "ssh-key"
	fileKnownHosts = "ssh-known-hosts"
)

// dir is the run directory.
type dir string

func (d dir) path(name string) string { return filepath.Join(string(d), name) }

// save writes a fact.
func (d dir) save(name string, v any) error {
	return durable.ReplaceJSON(d.path(name), v, durable.None)
}

// load reads a fact; it returns false if the fact is not known yet.
func (d dir) load(name string, v any) (bool, error) {
	p, err := os.ReadFile(d.path(name))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	if err := json.Unmarshal(p, v); err != nil {
		return false, fmt.Errorf("%s is damaged: %w", name, err)
	}
	return true, nil
}

func (d dir) has(name string) bool {
	_, err := os.Lstat(d.path(name))
	return err == nil
}

// open makes the directory, private, and refuses one that would put secrets
// on a disk or that another user owns.
func (d dir) open() error {
	if err := os.MkdirAll(string(d), 0o700); err != nil {
		return fmt.Errorf("cannot create the run directory: %w", err)
	}
	st, err := os.Lstat(string(d))
	if err != nil {
		return err
	}
	if !st.IsDir() {
		return fmt.Errorf("%s is not a directory", d)
	}
	var sys unix.Stat_t
	if err := unix.Lstat(string(d), &sys); err != nil {
		return err
	}
	if int(sys.Uid) != os.Geteuid() {
		return fmt.Errorf("%s belongs to user %d, not to user %d that agent-runner runs as", d, sys.Uid, os.Geteuid())
	}
	if err := os.Chmod(string(d), 0o700); err != nil {
		return err
	}
	inMemory, err := isInMemory(string(d))
	if err == nil && !inMemory {
		err = fmt.Errorf("%s is not on a tmpfs: secrets would reach a disk", d)
	}
	return err
}

// wipe removes everything. The response is removed last but one, and the final
// report last, so that a runner that is killed in between and started again
// knows that the report was accepted.
func (d dir) wipe() error {
	entries, err := os.ReadDir(string(d))
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return err
	}
	var errs []error
	for _, e := range entries {
		if n := e.Name(); n != fileResponse && n != fileFinal {
			errs = append(errs, os.RemoveAll(d.path(n)))
		}
	}
	for _, name := range []string{fileResponse, fileFinal} {
		if err := os.Remove(d.path(name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// boot is the fact about the fetch.
type boot struct {
	At       time.Duration // uptime of the fetch
	Deadline time.Duration // uptime at which the agent must stop; 0: never
	Began    time.Time
}

// stopRequest is a request to stop the agent. The zero value means none.
type stopRequest struct {
	Status string // CANCELLED or TIMEOUT
	Reason string // the controller's; may be empty
}

// outcome is the result of the work, before results are collected.
type outcome struct {
	Status   string
	Phase    string // in which it ended
	Message  string
	ExitCode *int

	KeyRejected bool

	Judge judgement
	Ended time.Time
}
