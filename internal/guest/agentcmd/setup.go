package agentcmd

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/hostos"
	"github.com/agentlab-vm/agentlab/internal/lock"
)

// The files of setUpOnce in the home of the agent. The home is on the disk of the
// sandbox, so a new sandbox has none of them.
const (
	setupStamp = ".agentlab-setup"     // the sum of the commands that have run
	setupLog   = ".agentlab-setup.log" // their output
)

// lockPause is the pause between two looks at the lock of the stamp.
const lockPause = 200 * time.Millisecond

// setupVars are the variables that the commands under setup get: none that can have a
// secret.
var setupVars = []string{
	"PATH", "LANG", "TZ", "HOME", "USER", "LOGNAME", "XDG_RUNTIME_DIR",
	"npm_config_cache", "npm_config_store_dir", "YARN_CACHE_FOLDER", "PIP_CACHE_DIR", "UV_CACHE_DIR", "GOCACHE", "GOMODCACHE", "CARGO_HOME",
	"SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "GIT_SSL_CAINFO", "NODE_EXTRA_CA_CERTS",
}

// setUpOnce runs the commands under setup of a session's repository, unless they have run
// in this sandbox: then the stamp in home is theirs.
func setUpOnce(req guestapi.SetupRun, home string, out io.Writer) error {
	sum := sha256.Sum256([]byte(strings.Join(req.Commands, "\x00")))
	stamp := filepath.Join(home, setupStamp)
	lockFile, err := os.OpenFile(stamp, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	defer func() { _ = lockFile.Close() }()
	ctx, cancel := context.WithTimeout(context.Background(), time.Duration(req.Seconds)*time.Second)
	defer cancel()
	for { // of two starts at the same time, the second waits
		ok, err := lock.TryFile(lockFile)
		if err != nil {
			return err
		}
		if ok {
			break
		}
		select {
		case <-time.After(lockPause):
		case <-ctx.Done():
			return errors.New("another start runs the commands under setup")
		}
	}
	want := hex.EncodeToString(sum[:])
	if have, err := io.ReadAll(io.LimitReader(lockFile, int64(len(want)+1))); err != nil || string(have) == want {
		return err
	}
	log, err := os.Create(filepath.Join(home, setupLog))
	if err != nil {
		return err
	}
	defer func() { _ = log.Close() }()
	for i, command := range req.Commands {
		if err := runSetup(ctx, req, i, command, io.MultiWriter(log, out)); err != nil {
			return err
		}
	}
	if err := lockFile.Truncate(0); err != nil {
		return err
	}
	_, err = lockFile.WriteAt([]byte(want), 0)
	return err
}

func runSetup(ctx context.Context, req guestapi.SetupRun, i int, command string, out io.Writer) error {
	name := fmt.Sprintf("setup[%d] %.60q", i, command)
	if _, err := fmt.Fprintln(out, "[agentlab]", name); err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, "bash", "-c", "set -euo pipefail\n"+command)
	cmd.Dir, cmd.Stdout, cmd.Stderr = req.Dir, out, out
	for _, v := range setupVars {
		if value, ok := os.LookupEnv(v); ok {
			cmd.Env = append(cmd.Env, v+"="+value)
		}
	}
	cmd.Env = append(slices.Clip(cmd.Env), "SHELL=/bin/bash", "AGENTLAB_REPO="+req.Dir)
	// What a command leaves in the background ends with it. The client's end ends all.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := hostos.EndWithParent(cmd.SysProcAttr); err != nil {
		return err
	}
	end := func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.Cancel, cmd.WaitDelay = end, time.Second
	err := cmd.Start()
	if err == nil {
		err = waitSetup(cmd, end)
	}
	switch exit, isExit := errors.AsType[*exec.ExitError](err); {
	case ctx.Err() != nil:
		return fmt.Errorf("%s was stopped: setup may take %s", name, time.Duration(req.Seconds)*time.Second)
	case isExit:
		return fmt.Errorf("%s exited with code %d", name, cmp.Or(max(exit.ExitCode(), 0), 128))
	case err != nil:
		return fmt.Errorf("%s: %w", name, err)
	}
	return nil
}

// waitSetup waits for a command, and then ends what it has left in the background, which
// may have its output open.
func waitSetup(cmd *exec.Cmd, end func() error) error {
	awaitExit(cmd.Process.Pid)
	_ = end()
	return cmd.Wait()
}
