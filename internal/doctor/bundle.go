package doctor

import (
	"context"
	"io"
	"runtime"
	"strings"
	"time"

	"github.com/agentlab-vm/agentlab/internal/fleet"

	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/internal/redact"
	"github.com/agentlab-vm/agentlab/internal/version"
)

// Rows are the rows of the database; *store.Store implements it.
type Rows interface {
	Store
	Sandbox(ctx context.Context, vmid int) (agentlab.Sandbox, error)
	Sandboxes(ctx context.Context, f agentlab.SandboxFilter) ([]agentlab.Sandbox, error)
	Job(ctx context.Context, id string) (agentlab.Job, error)
	Jobs(ctx context.Context, f agentlab.JobFilter) ([]agentlab.Job, error)
	Events(ctx context.Context, f agentlab.EventFilter) ([]agentlab.Event, error)
	Snapshots(ctx context.Context, f agentlab.SnapshotFilter) ([]agentlab.Snapshot, error)
	Artifacts(ctx context.Context, jobID string) ([]agentlab.Artifact, error)
	SandboxByUID(ctx context.Context, uid string) (agentlab.Sandbox, error)
	Workspace(ctx context.Context, id string) (agentlab.Workspace, error)
	Workspaces(ctx context.Context) ([]agentlab.Workspace, error)
	WorkspaceSnapshots(ctx context.Context, workspaceID string) ([]agentlab.WorkspaceSnapshot, error)
	Session(ctx context.Context, id string) (agentlab.Session, error)
	Sessions(ctx context.Context) ([]agentlab.Session, error)
	SessionHistory(ctx context.Context, id string) ([]agentlab.SessionSandbox, error)
}

// Egress is the egress log; *audit.Service implements it.
type Egress interface {
	List(ctx context.Context, f agentlab.EgressFilter) ([]agentlab.EgressEntry, error)
}

// Logs are the logs of agents; *artifact.Service implements it.
type Logs interface {
	LogSize(ctx context.Context, jobID string) (int64, error)
	Log(ctx context.Context, jobID string, offset int64, follow bool) (io.ReadCloser, error)
}

// Secrets returns every secret that the daemon can read, so that none gets into
// a bundle; *bootstrap.Service implements it.
type Secrets interface {
	Secrets(ctx context.Context) ([]string, error)
}

// BundleConfig is what Bundles needs. Every field is required.
type BundleConfig struct {
	Rows    Rows
	Egress  Egress
	Logs    Logs
	Secrets Secrets
	Fleet   *fleet.Fleet
	Checks  func(ctx context.Context) (api.HostChecks, error)

	Settings    any      // the configuration without secrets
	SecretFiles []string // files with credentials of the daemon; their content is redacted
	LogFile     string   // the log of the daemon, a bounded.Log

	// Made is called after each call of Make, with the size of the bundle in bytes,
	// how long it took, and its error.
	Made func(size int, took time.Duration, err error)
}

// Bundles makes doctor bundles: archives for a user who looks for the cause of a
// fault. The same state gives the same bytes. A bundle contains no secret that
// the daemon knows; without the list of secrets none is made.
type Bundles struct {
	cfg  BundleConfig
	turn chan struct{} // full while a bundle is made: each needs memory for all of its files
}

// NewBundles returns a Bundles.
func NewBundles(cfg BundleConfig) *Bundles { return &Bundles{cfg: cfg, turn: make(chan struct{}, 1)} }

// subjects are the kinds of bundles: what each collects about an ID.
var subjects = map[string]func(b *collector, ctx context.Context, id string) error{
	api.DoctorInstallation: func(b *collector, ctx context.Context, _ string) error { return b.installation(ctx) },
	api.DoctorSandbox:      (*collector).sandbox,
	api.DoctorJob:          (*collector).job,
	api.DoctorWorkspace:    (*collector).workspace,
	api.DoctorSession:      (*collector).session,
}

// Make returns a bundle (tar.gz) about the sandbox with a VMID, the job, the
// workspace or the session with an ID, or the installation. Codes: not_found, and
// unavailable if the secrets that must be redacted cannot be read. What cannot be read
// otherwise is an entry in the manifest.
func (s *Bundles) Make(ctx context.Context, kind, id string) ([]byte, error) {
	begin := time.Now()
	bundle, err := s.bundle(ctx, kind, id)
	s.cfg.Made(len(bundle), time.Since(begin), err)
	return bundle, err
}

func (s *Bundles) bundle(ctx context.Context, kind, id string) ([]byte, error) {
	collect, ok := subjects[kind]
	if !ok {
		return nil, agentlab.Errorf(agentlab.CodeInvalid, "there is no doctor bundle of the kind %q", kind)
	}
	select {
	case s.turn <- struct{}{}:
		defer func() { <-s.turn }()
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	r, err := s.redactor(ctx)
	if err != nil {
		return nil, agentlab.Errorf(agentlab.CodeUnavailable, "the bundle cannot be redacted, because the secrets cannot be read: %w", err).
			WithHint("see 'agentlab secrets validate'")
	}
	b := &collector{cfg: s.cfg, archive: newArchive(kind, id, r)}
	b.versions(ctx)
	if err := collect(b, ctx, id); err != nil {
		return nil, err
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	return b.archive.bytes()
}

// redactor returns a redactor of all secrets that the daemon knows.
func (s *Bundles) redactor(ctx context.Context) (*redact.Redactor, error) {
	values, err := s.cfg.Secrets.Secrets(ctx)
	if err != nil {
		return nil, err
	}
	for _, path := range s.cfg.SecretFiles {
		text, err := readSecretFile(path)
		if err != nil {
			return nil, err
		}
		values = append(values, text)
		if !strings.Contains(text, "\n") { // NAME:PASSWORD, or ID=SECRET
			_, password, _ := strings.Cut(text, ":")
			_, secret, _ := strings.Cut(text, "=")
			values = append(values, password, secret)
		}
	}
	return redact.New(values...), nil
}

// collector collects the files of one bundle.
type collector struct {
	cfg     BundleConfig
	archive *archive
}

// sourceLimit is how long one call of the backend may take.
const sourceLimit = 10 * time.Second

// try adds a file that may take long. An error becomes an entry of the manifest.
func (b *collector) try(ctx context.Context, name string, add func(ctx context.Context) error) {
	call, cancel := context.WithTimeout(ctx, sourceLimit)
	defer cancel()
	err := add(call)
	if err != nil && call.Err() != nil && ctx.Err() == nil {
		err = agentlab.Errorf(agentlab.CodeTimeout, "there was no answer within %s", sourceLimit)
	}
	b.archive.fail(name, err)
}

// versions adds the versions of AgentLab, of the kernel and of the programs of
// the backend to the manifest.
func (b *collector) versions(ctx context.Context) {
	v := b.archive.manifest.Versions
	v["agentlab"], v["backend"], v["arch"] = version.String(), b.cfg.Fleet.Default().Name(), runtime.GOARCH
	var u unix.Utsname
	if unix.Uname(&u) == nil {
		v["kernel"] = unix.ByteSliceToString(u.Release[:])
	}
}
