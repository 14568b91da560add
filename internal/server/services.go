package server

import (
	"context"
	"io"
	"net"
	"net/netip"
	"time"

	"github.com/agentlab-vm/agentlab/internal/fleet"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/artifact"
	"github.com/agentlab-vm/agentlab/internal/auth"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/image"
	"github.com/agentlab-vm/agentlab/internal/profile"
	"github.com/agentlab-vm/agentlab/internal/sandbox"
	"github.com/agentlab-vm/agentlab/internal/secret"
)

// Services are the services that the API calls. A method returns an
// *agentlab.Error if the cause is known. No method waits for a sandbox to
// reach a state.
type Services struct {
	HostNetwork HostNetwork
	Jobs        Jobs
	Sandboxes   Sandboxes
	Snapshots   Snapshots
	Artifacts   Artifacts
	Profiles    Profiles
	Secrets     Secrets
	Images      Images
	ImageUse    ImageUse
	Templates   Templates
	Workspaces  Workspaces
	Sessions    Sessions
	Ports       Ports
	Events      Events
	Messages    Messages
	Egress      Egress
	Verify      Verifier
	System      System
	Doctor      Doctor
	Bundles     Bundles
	Backups     Backups
	Clock       Clock
	Metrics     Metrics
	Tokens      Tokens // nil: the daemon accepts no tokens
	Cache       Cache
}

// Tokens stores the tokens of the API and checks them. *auth.Service implements
// it.
type Tokens interface {
	Authenticate(ctx context.Context, from netip.Addr, secret string) (t agentlab.APIToken, call context.Context, leave func(), err error)
	Create(ctx context.Context, r auth.Request) (t agentlab.APIToken, secret string, err error)
	List(ctx context.Context) ([]agentlab.APIToken, error)
	Revoke(ctx context.Context, idOrName string) (agentlab.APIToken, error)
}

// Jobs is the job service.
type Jobs interface {
	Create(ctx context.Context, r agentlab.JobRequest) (agentlab.Job, error)
	CreateWithSandbox(ctx context.Context, r agentlab.SandboxRequest) (agentlab.Sandbox, error)
	Check(ctx context.Context, r agentlab.JobRequest) error   // the error that Create would return
	Get(ctx context.Context, id string) (agentlab.Job, error) // ID or a unique prefix of it
	List(ctx context.Context, f agentlab.JobFilter) ([]agentlab.Job, error)
	Attempts(ctx context.Context, id string) ([]agentlab.Job, error)
	Cancel(ctx context.Context, id string) (agentlab.Job, error)
	Salvage(ctx context.Context, id string) (agentlab.Job, error)
}

// Sandboxes is the sandbox service. Get takes a name or a VMID.
type Sandboxes interface {
	Create(ctx context.Context, r agentlab.SandboxRequest) (agentlab.Sandbox, error)
	Get(ctx context.Context, arg string) (agentlab.Sandbox, error)
	GetUnique(ctx context.Context, arg string) (agentlab.Sandbox, error)
	List(ctx context.Context, f agentlab.SandboxFilter) ([]agentlab.Sandbox, error)
	Start(ctx context.Context, vmid int) (agentlab.Sandbox, error)
	Suspend(ctx context.Context, vmid int, toDisk bool) (agentlab.Sandbox, error)
	Resume(ctx context.Context, vmid int) (agentlab.Sandbox, error)
	Stop(ctx context.Context, vmid int, grace time.Duration) (agentlab.Sandbox, error)
	Destroy(ctx context.Context, vmid int) (agentlab.Sandbox, error)
	Purge(ctx context.Context, vmid int) (agentlab.Sandbox, error)
	RenewLease(ctx context.Context, vmid int, ttl time.Duration) (agentlab.Sandbox, error)
	Exec(ctx context.Context, vmid int, r guestapi.ExecRequest) (net.Conn, error)
	Attach(ctx context.Context, vmid int, r guestapi.AttachRequest) (net.Conn, error)
	DialGuest(ctx context.Context, vmid int, port uint16) (net.Conn, error)
	SSHKey(ctx context.Context, vmid int, r guestapi.SSHKeyRequest) (guestapi.SSHKeyResponse, error)
	ConsoleLog(ctx context.Context, vmid int, follow bool) (io.ReadCloser, error) // a waiting Read ends with ctx
	Orphans(ctx context.Context) ([]fleet.Instance, []error, error)               // what the backends have that belongs to no sandbox
	DestroyOrphan(ctx context.Context, id string) (fleet.Instance, error)

	// ReloadNetworks gives sandboxes, or without numbers every one whose
	// profile's policy has changed, the policy that their profile has now.
	ReloadNetworks(ctx context.Context, vmids []int) ([]sandbox.Reloaded, error)

	Memory(ctx context.Context, sb agentlab.Sandbox) (m backend.Memory, ok bool)
}

// Snapshots is the service for the snapshots of sandboxes.
type Snapshots interface {
	Snapshots(ctx context.Context, nameOrVMID string) ([]agentlab.Snapshot, error) // of one sandbox, or all for ""
	SaveSnapshot(ctx context.Context, vmid int, name string, keep bool) (agentlab.Snapshot, error)
	RestoreSnapshot(ctx context.Context, vmid int, name string) (agentlab.Sandbox, error)
	DeleteSnapshot(ctx context.Context, nameOrVMID, name string) (agentlab.Snapshot, error)
	ExportDisk(ctx context.Context, vmid int, uid, path string) error // of a stopped one
	Setups(ctx context.Context) ([]agentlab.Snapshot, error)
	DeleteSetups(ctx context.Context, prefix string) ([]agentlab.Snapshot, error) // "" is all
	Fork(ctx context.Context, vmid int, r agentlab.ForkRequest) ([]agentlab.Sandbox, error)
}

// Templates manages the booted guests of which sandboxes start as copies.
// *snapshot.Service implements it.
type Templates interface {
	Warm(ctx context.Context, r agentlab.SandboxRequest, progress func(line string)) (fleet.Template, error)
	Templates(ctx context.Context) ([]fleet.Template, []error, error)
	DeleteTemplate(ctx context.Context, prefix string) ([]fleet.Template, error) // "" is all
}

// Artifacts is the artifact service: files of jobs, their logs, and uploaded
// git bundles.
type Artifacts interface {
	List(ctx context.Context, jobID string) ([]agentlab.Artifact, error)
	Open(ctx context.Context, jobID, path string) (agentlab.Artifact, io.ReadCloser, error)
	Bundle(ctx context.Context, jobID string) (io.ReadCloser, error)                         // tar.gz
	Log(ctx context.Context, jobID string, offset int64, follow bool) (io.ReadCloser, error) // a waiting Read ends with ctx
	PutBundle(ctx context.Context, r io.Reader) (artifact.Bundle, error)
	DeleteBundle(bundleID string) error // if no job uses it
}

// Secrets manages the encrypted bundles; *secret.Vault implements it.
type Secrets interface {
	Init() error
	Public() (own string, others []string, err error) // keys
	Rotate(ctx context.Context, add, remove []string) (secret.Rotation, error)
	Bundles(ctx context.Context) ([]secret.Info, error)
	Create(ctx context.Context, bundle string) error
	Keys(ctx context.Context, bundle string) ([]string, error)
	Entries(ctx context.Context, bundle string, reveal bool) ([]secret.Entry, error)
	Set(ctx context.Context, bundle, key string, value io.Reader, reference bool) error
	Unset(ctx context.Context, bundle, key string) error
	Text(ctx context.Context, bundle string) (text, version string, err error)
	Replace(ctx context.Context, bundle, text, version string) error
	Validate(ctx context.Context, bundle string, resolve bool) (checked []string, found []secret.Finding, err error)
}

// Profiles reads and stores profiles; *profile.Library implements it.
type Profiles interface {
	List() ([]profile.Entry, error)
	Find(name string) (profile.Entry, error)
	Put(name, yaml string) (profile.Entry, error)
	Remove(name, sum string) error
	Check(yaml string) profile.Entry
}

// Images builds and stores images; *image.Store implements it.
type Images interface {
	List(ctx context.Context) ([]image.Image, error)
	Resolve(ctx context.Context, ref string) (image.Image, error)
	Build(ctx context.Context, r image.BuildRequest, progress func(line string)) (image.Image, error)
	Commit(ctx context.Context, name string, base image.Image, disk func(ctx context.Context, path string) error, progress func(line string)) (image.Image, error)
	Remove(ctx context.Context, ref string) error
	Layers() []image.Layer
	RemoveLayers() ([]image.Layer, error)
	Building() map[string]time.Time
}

// ImageUse is the record of which images sandboxes use.
type ImageUse interface {
	ImagesInUse(ctx context.Context) (map[string]int, error) // numbers by reference
}

// Events is the stored event log.
type Events interface {
	Events(ctx context.Context, f agentlab.EventFilter) ([]agentlab.Event, error)

	// Subscribe returns a channel of the events that are committed from now
	// on. The channel is closed if its reader is too slow; missed events are
	// in the database. cancel ends the subscription and may be called more
	// than once.
	Subscribe() (events <-chan agentlab.Event, cancel func())
}

// Egress is the egress audit log.
type Egress interface {
	List(ctx context.Context, f agentlab.EgressFilter) ([]agentlab.EgressEntry, error)
	Summary(ctx context.Context, f agentlab.EgressFilter, targets int) (agentlab.EgressSummary, error)

	// Changed returns a channel that is closed when there are new entries.
	// Watch makes the entries that f selects available sooner, until stop
	// is called.
	Changed() <-chan struct{}
	Watch(f agentlab.EgressFilter) (stop func())
}

// System is the daemon itself.
type System interface {
	Health() api.Health
	Status(ctx context.Context) (api.Status, error)
	Stop() // starts the shutdown of the daemon and returns at once
}

// Doctor checks the host.
type Doctor interface {
	Checks(ctx context.Context) (api.HostChecks, error) // runs the checks now
	CheckBackend(ctx context.Context, name string) (api.HostChecks, error)
	Backends() []api.Backend
	Drain(ctx context.Context, name string, drain bool) (api.Backend, error)
}

// Bundles makes doctor bundles; *doctor.Bundles implements it.
type Bundles interface {
	Make(ctx context.Context, kind, id string) ([]byte, error) // tar.gz; kind is one of api.Doctor…
}

// Backups makes backups of the database.
type Backups interface {
	Make(ctx context.Context) (api.Backup, error)
}

// Clock watches the clock of the host.
type Clock interface {
	Confirm(ctx context.Context) (api.Clock, error)
}

// Metrics are the metrics of the daemon; *metrics.Set implements it.
type Metrics interface {
	Text(ctx context.Context) ([]byte, error) // in the text format of Prometheus
}
