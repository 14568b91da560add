// Package runner implements `agent-runner run`, which runs one job in one
// sandbox.
//
// It fetches the bootstrap document, stages secrets on a tmpfs, clones the
// repository, runs the agent, streams its log, collects the results, uploads
// them, reports, and deletes the secrets.
//
// It is crash-only. It records its progress in files in its run directory, and
// a runner that is killed and started again continues from there: the
// bootstrap document is fetched once, an incomplete clone is repeated, the
// agent keeps running in its own session (package agentcmd) and is found by
// its lock, and everything after it may be done twice.
//
// The repository is untrusted, before and after the agent's work: see git.go.
package runner

import (
	"log/slog"
	"os"
	"os/user"
	"path/filepath"
	"time"

	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/guest/slice"
)

// Config has the paths and limits of a runner. Zero fields mean the default.
type Config struct {
	Bootstrap string // the bootstrap document; default $AGENTLAB_BOOTSTRAP or /etc/agentlab/bootstrap.json
	RunDir    string // private directory on a tmpfs; default /run/agentlab/secrets
	TmpDir    string // for large files that are not secret; default the system's
	Home      string // the agent's home; default this user's
	ClonePath string // path of the clone, unless the job has one; default /tmp/repo
	Workspace string // where a workspace is mounted; default guestapi.WorkspaceDir
	Cgroups   string // root file system of the cgroups; default slice.Root
	Exe       string // this program, run as agentlab-agent; default os.Executable
	MinFull   int64  // bytes up to which the increment of a checkpoint never needs a new full bundle; default 8 MiB
	Timing    Timing
	Staged    func()       `json:"-"` // called when the secrets are staged; default none
	Logger    *slog.Logger `json:"-"` // default: text to standard error
}

// Timing has all durations, so that tests can be fast.
type Timing struct {
	Grace         time.Duration // between SIGTERM and SIGKILL to the agent; default 10 s
	LogBatch      time.Duration // between two reads of the agent's log; default 200 ms
	Heartbeat     time.Duration // maximum time between two reports; default 10 s
	Poll          time.Duration // one long poll for directives; default 50 s
	FirstRetry    time.Duration // pause before a call is repeated, doubled each time; default 100 ms
	MaxRetry      time.Duration // longest such pause; default 5 s
	Denied        time.Duration // wait for another bootstrap token after one was denied; default 1 min
	Patience      time.Duration // retry limit of one upload or log append after the agent ended; default 15 min
	StorePatience time.Duration // retry limit of one copy to an external artifact store; default 1 min
	GitTimeout    time.Duration // for one git command on the result; default 2 min
	PushTimeout   time.Duration // for one push; default 2 min
	Commits       time.Duration // between two looks for new commits; default 2 s
	Checkpoint    time.Duration // between two checkpoints of uncommitted changes; default 30 s
}

const (
	defaultBootstrap = "/etc/agentlab/bootstrap.json"
	defaultRunDir    = "/run/agentlab/secrets"
	defaultClonePath = "/tmp/repo"
	maxAgentLog      = 32 << 20 // bytes of the agent log; they are in memory
	maxDiff          = 16 << 20 // bytes of changes.diff
)

func (c Config) withDefaults() (Config, error) {
	str := func(v *string, alternatives ...string) {
		for _, a := range alternatives {
			if *v == "" {
				*v = a
			}
		}
	}
	str(&c.Bootstrap, os.Getenv("AGENTLAB_BOOTSTRAP"), defaultBootstrap)
	str(&c.RunDir, defaultRunDir)
	str(&c.TmpDir, os.TempDir())
	str(&c.ClonePath, defaultClonePath)
	str(&c.Workspace, guestapi.WorkspaceDir)
	str(&c.Cgroups, slice.Root)
	if c.Home == "" {
		c.Home = os.Getenv("HOME")
	}
	if c.Home == "" {
		u, err := user.Current()
		if err != nil {
			return c, err
		}
		c.Home = u.HomeDir
	}
	if c.Exe == "" {
		exe, err := os.Executable()
		if err != nil {
			return c, err
		}
		c.Exe = exe
	}
	if c.Staged == nil {
		c.Staged = func() {}
	}
	if c.MinFull <= 0 {
		c.MinFull = 8 << 20
	}
	c.RunDir = filepath.Clean(c.RunDir)
	c.Timing = c.Timing.withDefaults()
	if c.Logger == nil {
		c.Logger = slog.New(slog.NewTextHandler(os.Stderr, nil))
	}
	return c, nil
}

func (t Timing) withDefaults() Timing {
	def := func(v *time.Duration, d time.Duration) {
		if *v <= 0 {
			*v = d
		}
	}
	def(&t.Grace, 10*time.Second)
	def(&t.LogBatch, 200*time.Millisecond)
	def(&t.Heartbeat, 10*time.Second)
	def(&t.Poll, 50*time.Second)
	def(&t.FirstRetry, 100*time.Millisecond)
	def(&t.MaxRetry, 5*time.Second)
	def(&t.Denied, time.Minute)
	def(&t.Patience, 15*time.Minute)
	def(&t.StorePatience, time.Minute)
	def(&t.GitTimeout, 2*time.Minute)
	def(&t.PushTimeout, 2*time.Minute)
	def(&t.Commits, 2*time.Second)
	def(&t.Checkpoint, 30*time.Second)
	return t
}
