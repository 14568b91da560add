// Package config finds AgentLab's directories and reads config.yaml.
//
// The file is optional and strict: an unknown key is an error with its line
// and the nearest known key. Every key has an effect.
package config

import (
	"errors"
	"io/fs"
	"os"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/strictyaml"
)

// Config is the content of config.yaml. docs/config.md is generated from
// the doc tags.
type Config struct {
	Backend        string `yaml:"backend" doctor:"show" doc:"Where new sandboxes run: a driver, with the section of its name, or a name of backends."`
	DefaultProfile string `yaml:"default_profile" doctor:"show" doc:"Profile of jobs and sandboxes that do not name one."`
	SessionProfile string `yaml:"session_profile" doctor:"show" doc:"Profile of sessions that 'agentlab start' creates without one. git config agentlab.profile has precedence."`
	DefaultAgent   string `yaml:"default_agent" doctor:"show" doc:"Agent of jobs that do not name one: claude, codex, opencode, gemini or shell."`

	Images    Images         `yaml:"images"`
	WarmPool  map[string]int `yaml:"warm_pool" doctor:"show" doc:"Sandboxes that are started in advance and wait, as IMAGE: NUMBER or IMAGE/PROFILE: NUMBER, each number 0 to 100. A new sandbox with the same image, cores, memory, disk size and backend options as the profile (default_profile if there is none) starts as one of them; its network policy may differ. See docs/templates.md."`
	Limits    Limits         `yaml:"limits"`
	VMIDRange VMIDRange      `yaml:"vmid_range"`
	Retention Retention      `yaml:"retention"`
	Artifacts Artifacts      `yaml:"artifacts"`
	Logs      Logs           `yaml:"logs"`
	Messages  Messages       `yaml:"messages"`
	Backups   Backups        `yaml:"backups"`

	BootstrapTTLMinutes int `yaml:"bootstrap_ttl_minutes" doc:"Minutes, 5 to 15, in which a sandbox must exchange its one-time token for its secrets."`

	API API `yaml:"api"`

	Metrics Metrics `yaml:"metrics"`

	DevServers DevServers `yaml:"dev_servers"`

	Network Network `yaml:"network"`

	UpstreamProxy UpstreamProxy `yaml:"upstream_proxy"`

	Guest Guest `yaml:"guest"`

	Cache Cache `yaml:"cache"`

	HostNetwork HostNetwork `yaml:"host_network"`

	instances []Instance // the default first
}

// Images names the default images.
type Images struct {
	Base   string `yaml:"base" doctor:"show" doc:"Default image of sandboxes and of jobs with the agent shell. A sandbox, a job or a profile can name another one."`
	Agents string `yaml:"agents" doctor:"show" doc:"Default image of jobs with any other agent. A job or a profile can name another one."`
}

// Limits are limits of one sandbox or of all sandboxes together.
type Limits struct {
	MaxSandboxes  int `yaml:"max_sandboxes" doc:"Maximum number of sandboxes at one time, 1 to 100000; DESTROYED ones do not count."`
	MinFreeMB     int `yaml:"min_free_mb" doc:"Free space in MiB on the disk of the state directory that is needed to start a sandbox, 0 to 1048576. Below a quarter of it, and always below 128 MiB, guests that write are paused (if the backend can pause them) and data from guests is not stored. Below half of that, all guests are paused."`
	MaxTTLMinutes int `yaml:"max_ttl_minutes" doc:"Maximum lease and job time in minutes, 1 to 43200 (30 days)."`
	BootMinutes   int `yaml:"boot_minutes" doc:"Minutes, 1 to 60, until a guest must answer after its start; a sandbox that takes longer is FAILED."`
	MaxSnapshots  int `yaml:"max_snapshots" doc:"Maximum number of snapshots of all sandboxes, 1 to 10000."`
	SnapshotsGB   int `yaml:"snapshots_gb" doc:"Maximum size in GiB of all snapshots together, 1 to 1048576."`
	SetupCacheGB  int `yaml:"setup_cache_gb" doc:"Maximum size in GiB of all snapshots after setup, 0 to 1048576; the least recently used are deleted first. With 0, the default, there are none, and each job runs the commands under setup."`
	MaxWorkspaces int `yaml:"max_workspaces" doc:"Maximum number of workspaces, 1 to 10000, with those in the trash."`
	WorkspaceGB   int `yaml:"workspace_gb" doc:"Maximum size of one workspace in GiB, 1 to 65536."`
	WorkspacesGB  int `yaml:"workspaces_gb" doc:"Maximum size in GiB of all workspaces together, with those in the trash, 1 to 1048576."`
	SalvageGB     int `yaml:"salvage_gb" doc:"Maximum size in GiB of the disks that are kept for the unstored work of ended jobs, all together, 1 to 1048576. A disk counts with its full size, or with 32 GiB if that is not known. If there are more, the oldest are deleted."`
	EgressRecords int `yaml:"egress_records" doc:"Maximum number of egress records of one sandbox, 100 to 1000000, counted separately for allowed and denied connections. If there are more, the first half and the newest ones are stored."`
}

// VMIDRange is the range of the numbers of sandboxes.
type VMIDRange struct {
	First int `yaml:"first" doc:"Lowest number of a sandbox, at least 100."`
	Last  int `yaml:"last" doc:"Highest number of a sandbox, at most 999999999."`
}

// Retention is how long records of the past are stored.
type Retention struct {
	ArtifactsDays int `yaml:"artifacts_days" doc:"Retention of the artifacts of an ended job in days, 1 to 3650. A profile can set another period."`
	BundlesDays   int `yaml:"job_bundles_days" doc:"Retention of the bundle of an ended job in days, 0 to 3650: its commits, changes, report and logs, without declared outputs and the files of attempts. Less than artifacts_days has no effect."`
	EventsDays    int `yaml:"events_days" doc:"Retention of events in days, 1 to 3650."`
	EgressDays    int `yaml:"egress_days" doc:"Retention of egress records in days, 1 to 3650."`
	SnapshotsDays int `yaml:"snapshots_days" doc:"Retention of snapshots in days, 1 to 3650; those that were saved with --keep exist until they are deleted."`
	SalvageHours  int `yaml:"salvage_hours" doc:"Hours, 0 to 8760, for which the disk of a sandbox is kept whose job has ended with work that is not stored, for agentlab job salvage; 0 keeps none."`
	TrashDays     int `yaml:"trash_days" doc:"Days, 1 to 3650, for which a deleted workspace stays in the trash, from which it can be returned."`
	JobsDays      int `yaml:"jobs_days" doc:"Retention of ended jobs and destroyed sandboxes in days, 1 to 3650; at least artifacts_days and job_bundles_days. The row of a job is kept as long as its sandbox."`
}

// Artifacts are the limits of the artifacts of one job.
type Artifacts struct {
	MaxFileMB int `yaml:"max_file_mb" doc:"Maximum size of one artifact in MiB, 1 to 1048576."`
	MaxJobMB  int `yaml:"max_job_mb" doc:"Maximum size of all artifacts of one job in MiB, 1 to 1048576; at least max_file_mb."`
	MaxFiles  int `yaml:"max_files" doc:"Maximum number of artifacts of one job, 1 to 100000."`
}

// Logs are the limits of the logs that guests write.
type Logs struct {
	MaxJobMB int `yaml:"max_job_mb" doc:"Maximum size of the agent log of one job in MiB, 1 to 10240; the rest is discarded."`
}

// Messages are the limits of the messages of one job, workspace or session.
type Messages struct {
	PerMinute int `yaml:"per_minute" doc:"Maximum number of messages that one author can post for a job, workspace or session in a minute, 1 to 1000."`
	PerAuthor int `yaml:"per_author" doc:"Maximum number of stored messages of one author for a job, workspace or session, at least per_minute, at most 10000; the oldest are deleted."`
	PerScope  int `yaml:"per_scope" doc:"Maximum number of stored messages for a job, workspace or session, at least per_author, at most 100000; the oldest are deleted."`
}

// Backups is how many backups of the database are stored.
type Backups struct {
	Newest int `yaml:"newest" doc:"Number of the newest backups of the database to store, 0 to 1000, in backups/ of the state directory. A backup is made every hour; 0 makes none."`
	Daily  int `yaml:"daily" doc:"Number of further days, 0 to 366, of which the last backup is stored."`
}

// DevServers configures the ports of guests on this machine.
type DevServers struct {
	Enabled bool `yaml:"enabled" doc:"Make the TCP ports on which processes of sandboxes listen available on the loopback of this machine, as http://PROJECT.sandbox.localhost:PORT. See docs/devservers.md."`
}

// API configures who may use the control API beside the user of the daemon, and
// whether it is also served over TCP.
type API struct {
	Groups  map[string]string `yaml:"groups" doctor:"show" doc:"Access of groups of this machine over the unix socket, as GROUP: read, write or admin; only for the machine-wide daemon. Empty means agentlab: write."`
	Listen  string            `yaml:"listen" doctor:"show" doc:"ADDRESS:PORT for clients with a token (agentlab token create) over TCP; empty means only the unix socket. 0.0.0.0 means all IPv4 addresses; [::] means all IPv6 and IPv4 addresses. Without TLS, only a loopback address, for example 127.0.0.1:8843."`
	TLSCert string            `yaml:"tls_cert" doctor:"show" doc:"Absolute path of the certificate chain for api.listen (PEM); the file is reloaded when it changes."`
	TLSKey  string            `yaml:"tls_key" doctor:"secret-file" doc:"Absolute path of the private key of tls_cert (PEM); other users must not be able to read the file."`
}

// Default returns the configuration of an empty file. The first of the known
// backends is the default.
func Default(known ...Backend) Config {
	c := Config{
		DefaultProfile:      "yolo-ephemeral",
		SessionProfile:      "interactive",
		DefaultAgent:        "claude",
		Images:              Images{Base: "base", Agents: "agents"},
		WarmPool:            map[string]int{},
		Limits:              Limits{MaxSandboxes: 100, MaxTTLMinutes: 7 * 24 * 60, MinFreeMB: 1024, BootMinutes: 3, MaxSnapshots: 50, SnapshotsGB: 100, MaxWorkspaces: 50, WorkspaceGB: 200, WorkspacesGB: 1000, SalvageGB: 100, EgressRecords: 5000},
		VMIDRange:           VMIDRange{First: 1000, Last: 999999},
		Retention:           Retention{ArtifactsDays: 30, EventsDays: 30, EgressDays: 30, SnapshotsDays: 30, SalvageHours: 24, TrashDays: 14, JobsDays: 90},
		Artifacts:           Artifacts{MaxFileMB: 1024, MaxJobMB: 4096, MaxFiles: 10000},
		Logs:                Logs{MaxJobMB: 64},
		Messages:            Messages{PerMinute: 60, PerAuthor: 500, PerScope: 2000},
		Backups:             Backups{Newest: 24, Daily: 7},
		BootstrapTTLMinutes: 10,
		API:                 API{Groups: map[string]string{}},
		DevServers:          DevServers{Enabled: true},
		Network:             Network{Private: []Private{}},
		Guest:               Guest{CACertificates: []string{}},
		Cache:               defaultCache(),
		HostNetwork:         defaultHostNetwork,
	}
	if len(known) > 0 {
		c.Backend = known[0].Name
		c.instances = []Instance{instance(c.Backend, known[0])}
	}
	return c
}

// Load reads the file at path for a program that knows these backends. A
// missing file is the default configuration. Errors have code invalid, with
// the key as Field and its line in the message, or denied if the file cannot
// be read.
func Load(path string, known ...Backend) (Config, error) {
	data, err := os.ReadFile(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return Default(known...), nil
	case err != nil:
		return Config{}, &agentlab.Error{Code: agentlab.CodeDenied, Message: "cannot read the configuration", Err: err}
	}
	c, err := Parse(data, known...)
	if err != nil {
		return Config{}, in(path, err)
	}
	return c, nil
}

// At returns err, an error about a value in the file at path, with the path and
// the line of the key before its message.
func At(path string, err error) error {
	data, rerr := os.ReadFile(path)
	if rerr != nil {
		return err
	}
	doc, perr := strictyaml.Parse(data)
	if perr != nil {
		return err
	}
	return in(path, doc.At(err))
}

func in(path string, err error) error {
	e, ok := errors.AsType[*agentlab.Error](err)
	if !ok {
		return err
	}
	named := *e
	named.Message = path + ": " + e.Message
	return &named
}

// Parse reads the text of a config.yaml over the defaults and validates it.
func Parse(data []byte, known ...Backend) (Config, error) {
	c := Default(known...)
	doc, err := strictyaml.Parse(data)
	if err != nil {
		return Config{}, err
	}
	if err := c.decode(doc, known); err != nil {
		return Config{}, err
	}
	if err := c.Validate(); err != nil {
		return Config{}, doc.At(err)
	}
	return c, nil
}

// Validate checks every value; the error names the key.
func (c Config) Validate() error {
	for _, check := range []func() error{
		func() error { return OneOf("default_agent", c.DefaultAgent, agentlab.Agents) },
		c.validateNames,
		func() error { _, err := c.Pool(); return err },
		c.API.validate, c.Metrics.validate, c.UpstreamProxy.validate, c.Guest.validate, c.Cache.validate, c.HostNetwork.validate,
		c.validateRanges,
		c.validateInstances,
	} {
		if err := check(); err != nil {
			return err
		}
	}
	return nil
}

func (c Config) validateNames() error {
	for _, n := range []struct{ key, value string }{
		{"default_profile", c.DefaultProfile}, {"session_profile", c.SessionProfile}, {"images.base", c.Images.Base}, {"images.agents", c.Images.Agents},
	} {
		if err := agentlab.ValidateName(n.value); err != nil {
			return agentlab.Errorf(agentlab.CodeInvalid, "%q is not a valid name", n.value).WithField(n.key).WithHint("%s", agentlab.HintOf(err))
		}
	}
	return nil
}

func (c Config) validateRanges() error {
	maxTTL := int(agentlab.MaxTTL / time.Minute)
	for _, r := range []struct {
		key           string
		value, lo, hi int
	}{
		{"limits.max_sandboxes", c.Limits.MaxSandboxes, 1, 100000},
		{"limits.min_free_mb", c.Limits.MinFreeMB, 0, 1 << 20},
		{"limits.max_ttl_minutes", c.Limits.MaxTTLMinutes, 1, maxTTL},
		{"limits.boot_minutes", c.Limits.BootMinutes, 1, 60},
		{"limits.egress_records", c.Limits.EgressRecords, 100, 1000000},
		{"vmid_range.first", c.VMIDRange.First, 100, 999999999},
		{"vmid_range.last", c.VMIDRange.Last, c.VMIDRange.First, 999999999},
		{"retention.artifacts_days", c.Retention.ArtifactsDays, 1, 3650},
		{"retention.events_days", c.Retention.EventsDays, 1, 3650},
		{"retention.egress_days", c.Retention.EgressDays, 1, 3650},
		{"retention.snapshots_days", c.Retention.SnapshotsDays, 1, 3650},
		{"limits.max_snapshots", c.Limits.MaxSnapshots, 1, 10000},
		{"limits.snapshots_gb", c.Limits.SnapshotsGB, 1, 1 << 20},
		{"limits.setup_cache_gb", c.Limits.SetupCacheGB, 0, 1 << 20},
		{"limits.max_workspaces", c.Limits.MaxWorkspaces, 1, 10000},
		{"limits.workspace_gb", c.Limits.WorkspaceGB, 1, 1 << 16},
		{"limits.workspaces_gb", c.Limits.WorkspacesGB, 1, 1 << 20},
		{"limits.salvage_gb", c.Limits.SalvageGB, 1, 1 << 20},
		{"retention.salvage_hours", c.Retention.SalvageHours, 0, 365 * 24},
		{"retention.trash_days", c.Retention.TrashDays, 1, 3650},
		{"retention.job_bundles_days", c.Retention.BundlesDays, 0, 3650},
		{"retention.jobs_days", c.Retention.JobsDays, max(c.Retention.ArtifactsDays, c.Retention.BundlesDays), 3650},
		{"artifacts.max_file_mb", c.Artifacts.MaxFileMB, 1, 1 << 20},
		{"artifacts.max_job_mb", c.Artifacts.MaxJobMB, c.Artifacts.MaxFileMB, 1 << 20},
		{"artifacts.max_files", c.Artifacts.MaxFiles, 1, 100000},
		{"logs.max_job_mb", c.Logs.MaxJobMB, 1, 10240},
		{"messages.per_minute", c.Messages.PerMinute, 1, 1000},
		{"messages.per_author", c.Messages.PerAuthor, c.Messages.PerMinute, 10000},
		{"messages.per_scope", c.Messages.PerScope, c.Messages.PerAuthor, 100000},
		{"backups.newest", c.Backups.Newest, 0, 1000},
		{"backups.daily", c.Backups.Daily, 0, 366},
		{"bootstrap_ttl_minutes", c.BootstrapTTLMinutes, int(agentlab.MinBootstrapTTL / time.Minute), int(agentlab.MaxBootstrapTTL / time.Minute)},
	} {
		if r.value < r.lo || r.value > r.hi {
			return agentlab.Errorf(agentlab.CodeInvalid, "%d is not between %d and %d", r.value, r.lo, r.hi).WithField(r.key)
		}
	}
	return nil
}

// OneOf is strictyaml.OneOf for the sections of backends.
func OneOf(key, value string, known []string) error { return strictyaml.OneOf(key, value, known) }

// MaxTTL returns limits.max_ttl_minutes.
func (c Config) MaxTTL() time.Duration { return time.Duration(c.Limits.MaxTTLMinutes) * time.Minute }

// BootTimeout returns how long a guest may take until its first answer.
func (c Config) BootTimeout() time.Duration { return time.Duration(c.Limits.BootMinutes) * time.Minute }

// BootstrapTTL returns bootstrap_ttl_minutes.
func (c Config) BootstrapTTL() time.Duration {
	return time.Duration(c.BootstrapTTLMinutes) * time.Minute
}

// Days converts one of the retention values to a duration.
func Days(n int) time.Duration { return time.Duration(n) * 24 * time.Hour }
