package runner

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// On a workspace, checkouts and caches outlive jobs. An earlier job may have left
// anything there, so nothing of it is run: a checkout gets a new git directory, which
// takes only objects and branches from the old one.

const (
	workspaceRepo  = "repo"            // the checkout, in the workspace
	workspaceCache = ".cache"          // of package managers
	branchSaved    = "agentlab/saved/" // with the job: what an update would have lost
)

// cacheDirs has the directories of package managers in the cache of a workspace, by
// the variables that name them. XDG_CACHE_HOME is not among them: some programs
// store credentials there.
var cacheDirs = map[string]string{
	"npm_config_cache": "npm", "npm_config_store_dir": "pnpm", "YARN_CACHE_FOLDER": "yarn",
	"PIP_CACHE_DIR": "pip", "UV_CACHE_DIR": "uv",
	"GOCACHE": "go-build", "GOMODCACHE": "go-mod", "CARGO_HOME": "cargo",
}

// defaultPath is the path of the checkout of a job that names none.
func (r *Runner) defaultPath() string {
	if r.resp.Workspace {
		return filepath.Join(r.cfg.Workspace, workspaceRepo)
	}
	return r.cfg.ClonePath
}

// onWorkspace reports whether an absolute path is in the workspace.
func (r *Runner) onWorkspace(path string) bool {
	return r.resp.Workspace && strings.HasPrefix(path, r.cfg.Workspace+"/")
}

// prepareWorkspace checks the workspace before anything is written to it, and makes
// the directory of the caches.
func (r *Runner) prepareWorkspace() error {
	if !r.resp.Workspace {
		return nil
	}
	if err := r.checkWorkspace(r.cfg.Workspace); err != nil {
		return err
	}
	dir := filepath.Join(r.cfg.Workspace, workspaceCache)
	if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("the workspace cannot be written: %w", err)
	}
	return r.checkWorkspace(dir)
}

// checkWorkspace ensures that dir, or what exists of it, is a directory of the mounted
// workspace: otherwise the work would be on the disk of the VM, and lost with it.
func (r *Runner) checkWorkspace(dir string) error {
	target, err := filepath.EvalSymlinks(dir)
	for errors.Is(err, fs.ErrNotExist) && dir != r.cfg.Workspace && dir != "/" {
		dir = filepath.Dir(dir)
		target, err = filepath.EvalSymlinks(dir)
	}
	if err != nil {
		return err
	}
	if target != dir {
		return fmt.Errorf("%s is a symbolic link: remove it from the workspace", dir)
	}
	var system, at unix.Stat_t
	if err := errors.Join(unix.Stat("/", &system), unix.Stat(dir, &at)); err != nil {
		return err
	}
	switch {
	case at.Mode&unix.S_IFMT != unix.S_IFDIR:
		return fmt.Errorf("%s is not a directory: remove it from the workspace", dir)
	case at.Dev == system.Dev:
		return fmt.Errorf("the workspace is not mounted at %s", r.cfg.Workspace)
	}
	return nil
}

// cacheVars returns the variables by which package managers find their caches.
func (r *Runner) cacheVars() map[string]string {
	out := map[string]string{}
	if r.resp.Workspace {
		for name, dir := range cacheDirs {
			out[name] = filepath.Join(r.cfg.Workspace, workspaceCache, dir)
		}
	}
	return out
}
