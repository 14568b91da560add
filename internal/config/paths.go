package config

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"syscall"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/fsfault"
	"github.com/agentlab-vm/agentlab/internal/lock"
)

// Paths are the directories of one AgentLab installation. All are absolute.
type Paths struct {
	Home   string // AGENTLAB_HOME; "" if not set
	System bool   // the machine-wide installation, run by root
	Config string // files that users write: config.yaml, profiles/, secrets/
	State  string // data that must not be lost: agentlab.db, backups/, records/, sandboxes/, artifacts/, bundles/, and the reserve of disk space
	Cache  string // data that can be rebuilt: images/
	Run    string // removed at boot: agentlabd.sock
	Log    string // logs of the daemon
}

// ResolvePaths returns the paths: under AGENTLAB_HOME if it is set (config,
// state, cache, run, state/logs); otherwise the system's if system is true;
// otherwise subdirectories agentlab of the user's XDG directories. An XDG
// variable that is not absolute is ignored, as required by the XDG
// specification. Without XDG_RUNTIME_DIR, sockets are in /tmp/agentlab-UID.
// ResolvePaths accesses no file.
func ResolvePaths(getenv func(string) string, system bool) (Paths, error) {
	if home := getenv("AGENTLAB_HOME"); home != "" {
		abs, err := filepath.Abs(home)
		if err != nil {
			return Paths{}, &agentlab.Error{Code: agentlab.CodeInvalid, Message: "AGENTLAB_HOME cannot be made absolute", Err: err}
		}
		under := func(s string) string { return filepath.Join(abs, s) }
		return Paths{Home: abs, Config: under("config"), State: under("state"), Cache: under("cache"), Run: under("run"), Log: under("state/logs")}, nil
	}
	if system {
		return Paths{System: true, Config: "/etc/agentlab", State: "/var/lib/agentlab", Cache: "/var/cache/agentlab",
			Run: "/run/agentlab", Log: "/var/log/agentlab"}, nil
	}
	home := getenv("HOME")
	missing := false
	xdg := func(name, fallback string) string {
		if dir := getenv(name); filepath.IsAbs(dir) {
			return filepath.Join(dir, "agentlab")
		}
		missing = missing || !filepath.IsAbs(home)
		return filepath.Join(home, fallback, "agentlab")
	}
	p := Paths{
		Config: xdg("XDG_CONFIG_HOME", ".config"),
		State:  xdg("XDG_STATE_HOME", ".local/state"),
		Cache:  xdg("XDG_CACHE_HOME", ".cache"),
		Run:    filepath.Join("/tmp", "agentlab-"+strconv.Itoa(os.Geteuid())),
	}
	if dir := getenv("XDG_RUNTIME_DIR"); filepath.IsAbs(dir) {
		p.Run = filepath.Join(dir, "agentlab")
	}
	p.Log = filepath.Join(p.State, "logs")
	if missing {
		return Paths{}, agentlab.Errorf(agentlab.CodeInvalid, "no home directory: HOME is not set").
			WithHint("set HOME, or AGENTLAB_HOME to the directory that AgentLab may use")
	}
	return p, nil
}

// Socket returns the path of the control API's socket.
func (p Paths) Socket() string { return filepath.Join(p.Run, "agentlabd.sock") }

// StoppedSuffix is the end of the name of a file next to the socket. A user has stopped
// the daemon with 'agentlab daemon stop', so no client starts another one by itself.
const StoppedSuffix = ".stopped"

// Lock is the lock file: its holder is the only daemon of p. It is beside the
// database, which two daemons would damage.
func (p Paths) Lock() string { return filepath.Join(p.State, "agentlabd.lock") }

// ExitLocked is the exit code of agentlabd if another process has the lock.
const ExitLocked = 3

// ExitCode returns the exit code of agentlabd for an error.
func ExitCode(err error) int {
	if agentlab.CodeOf(err) == agentlab.CodeExists {
		return ExitLocked
	}
	return 1
}

// TryLock makes this process the only one that works with the state directory,
// which must exist: two daemons would damage the database. Code exists means
// that a daemon runs.
func (p Paths) TryLock() (*lock.Lock, error) {
	l, err := lock.Try(p.Lock())
	if agentlab.CodeOf(err) == agentlab.CodeBusy {
		return nil, p.locked()
	}
	return l, err
}

// locked returns the error for a state directory that another process has locked. Its
// hint names the socket of that process if it is not that of p.
func (p Paths) locked() error {
	pid, socket := lock.Holder(p.Lock())
	who, how := "", "stop it first: agentlab daemon stop"
	if pid != 0 {
		who = fmt.Sprintf(" (pid %d)", pid)
	}
	if pid != 0 && socket != "" {
		if _, err := os.Stat(socket); errors.Is(err, fs.ErrNotExist) {
			how = fmt.Sprintf("its socket %s has been deleted; stop it first: kill %d", socket, pid)
		} else if socket != p.Socket() {
			how = fmt.Sprintf("stop it first: agentlab --socket %s daemon stop", socket)
		}
	}
	return agentlab.Errorf(agentlab.CodeExists, "a daemon is already running for %s%s", p.State, who).WithHint("%s", how)
}

// Running returns p with the runtime directory of the daemon that runs for p.State.
// That directory differs from p.Run if the daemon was started with another
// XDG_RUNTIME_DIR, for example by cron or over ssh.
func (p Paths) Running() Paths {
	pid, socket := lock.Holder(p.Lock())
	if pid == 0 || !filepath.IsAbs(socket) || syscall.Kill(pid, 0) != nil {
		return p
	}
	q := p
	q.Run = filepath.Dir(socket)
	if _, err := os.Stat(q.Socket()); err != nil {
		return p
	}
	return q
}

// ConfigFile is config.yaml.
func (p Paths) ConfigFile() string { return filepath.Join(p.Config, "config.yaml") }

// Profiles is the directory of the user's profiles.
func (p Paths) Profiles() string { return filepath.Join(p.Config, "profiles") }

// Secrets is the directory of the age-encrypted bundles and their identity.
func (p Paths) Secrets() string { return filepath.Join(p.Config, "secrets") }

// Database is the SQLite file.
func (p Paths) Database() string { return filepath.Join(p.State, "agentlab.db") }

// Reserve is the file that is deleted on a full disk, so that the database can
// be written.
func (p Paths) Reserve() string { return filepath.Join(p.State, "reserve") }

// Ending has an empty file for each sandbox whose destruction was requested
// while the disk was too full for the database.
func (p Paths) Ending() string { return filepath.Join(p.State, "ending") }

// Ports is the file with the ports of this machine that lead to guests.
func (p Paths) Ports() string { return filepath.Join(p.State, "ports.json") }

// Backups is the directory of copies of the database.
func (p Paths) Backups() string { return filepath.Join(p.State, "backups") }

// Records is the directory of copies of the rows of jobs.
func (p Paths) Records() string { return filepath.Join(p.State, "records") }

// Installation is the file with the ID of the installation, which is also in
// the database.
func (p Paths) Installation() string { return filepath.Join(p.State, "installation") }

// Sandboxes has one directory for each sandbox of drivers that store files.
func (p Paths) Sandboxes() string { return filepath.Join(p.State, "sandboxes") }

// Network returns the directory of the records of the bridge's sandboxes.
func (p Paths) Network() string { return filepath.Join(p.State, "network") }

// Artifacts has one directory for each job.
func (p Paths) Artifacts() string { return filepath.Join(p.State, "artifacts") }

// Bundles is the directory of git bundles that were uploaded for jobs.
func (p Paths) Bundles() string { return filepath.Join(p.State, "bundles") }

// Images is the directory of the built images.
func (p Paths) Images() string { return filepath.Join(p.Cache, "images") }

// DaemonLog is the log of the daemon.
func (p Paths) DaemonLog() string { return filepath.Join(p.Log, "agentlabd.log") }

// Ensure creates the directories that are missing. In user mode each gets mode
// 0700, also one that exists. It returns code denied for a directory of another
// user and for a symbolic link in place of the directory under /tmp.
func (p Paths) Ensure() error {
	type dir struct {
		path string
		mode fs.FileMode
	}
	open := fs.FileMode(0o700)
	if p.System {
		open = 0o755 // the group's members may traverse it; files inside have their own modes
	}
	dirs := []dir{{p.Config, open}, {p.Run, open}, {p.State, 0o700}, {p.Cache, 0o700}, {p.Log, 0o700},
		{p.Profiles(), open}, {p.Secrets(), 0o700},
		{p.Ending(), 0o700}, {p.Sandboxes(), 0o700}, {p.Backups(), 0o700}, {p.Records(), 0o700}, {p.Artifacts(), 0o700}, {p.Bundles(), 0o700}, {p.Images(), 0o700}}
	if p.Home != "" {
		if err := os.MkdirAll(p.Home, 0o700); err != nil {
			return dirFault(p.Home, err)
		}
	}
	for _, d := range dirs {
		if err := ensureDir(d.path, d.mode); err != nil {
			return err
		}
	}
	return nil
}

// CheckRun refuses a runtime directory in which another user may have put a
// socket or a link: it must be a real directory with mode 0700 that this user
// owns, or in system mode one that only root can write. A client calls it before
// it connects, because any user can create /tmp/agentlab-UID.
func (p Paths) CheckRun() error {
	st, err := os.Lstat(p.Run)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return agentlab.Errorf(agentlab.CodeDenied, "cannot inspect the runtime directory: %w", err).
			WithHint("set XDG_RUNTIME_DIR or AGENTLAB_HOME to a directory of your own")
	}
	owner, others := os.Geteuid(), fs.FileMode(0o077)
	if p.System {
		owner, others = 0, 0o022
	}
	sys, ok := st.Sys().(*syscall.Stat_t)
	switch {
	case !st.IsDir():
		return agentlab.Errorf(agentlab.CodeDenied, "%s is not a directory", p.Run).WithHint("move it away")
	case !ok || int(sys.Uid) != owner:
		return agentlab.Errorf(agentlab.CodeDenied, "%s does not belong to user %d", p.Run, owner).
			WithHint("set XDG_RUNTIME_DIR or AGENTLAB_HOME to a directory of your own")
	case st.Mode().Perm()&others != 0:
		return agentlab.Errorf(agentlab.CodeDenied, "%s is accessible to other users (mode %04o)", p.Run, st.Mode().Perm()).
			WithHint("check that all files in it are yours, then run: chmod go-rwx %s", p.Run)
	}
	return nil
}

func ensureDir(path string, mode fs.FileMode) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return dirFault(path, err)
	}
	if err := os.Mkdir(path, mode); err != nil && !errors.Is(err, fs.ErrExist) {
		return dirFault(path, err)
	}
	// Lstat under a sticky /tmp, where any user may create a link; elsewhere a
	// user may have linked a directory to a larger disk.
	stat := os.Stat
	if filepath.Dir(path) == "/tmp" {
		stat = os.Lstat
	}
	st, err := stat(path)
	if err != nil {
		return dirFault(path, err)
	}
	sys, ok := st.Sys().(*syscall.Stat_t)
	switch {
	case !st.IsDir():
		return agentlab.Errorf(agentlab.CodeDenied, "%s is not a directory", path).WithHint("move it away")
	case ok && int(sys.Uid) != os.Geteuid():
		return agentlab.Errorf(agentlab.CodeDenied, "%s belongs to user %d, not to %d", path, sys.Uid, os.Geteuid()).
			WithHint("set AGENTLAB_HOME to a directory of your own")
	case st.Mode().Perm()&^mode != 0:
		if err := os.Chmod(path, st.Mode().Perm()&mode); err != nil {
			return dirFault(path, err)
		}
	}
	return nil
}

func dirFault(path string, err error) error {
	code := fsfault.Code(err)
	if errors.Is(err, syscall.ENOTDIR) {
		code = agentlab.CodeInvalid
	}
	return &agentlab.Error{Code: code, Message: fmt.Sprintf("cannot create the directory %s", path), Err: err,
		Hint: "set AGENTLAB_HOME to a directory that you may write"}
}
