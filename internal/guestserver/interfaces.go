package guestserver

import (
	"context"
	"io"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/redact"
)

// Bootstrap delivers jobs and secrets; *bootstrap.Service implements it.
type Bootstrap interface {
	// Exchange trades the one-time token, given as its lower-case hex SHA-256,
	// for everything that the runner of the sandbox needs. In one transaction
	// it consumes the token, stores the grants whose tokens the answer holds
	// and moves the job to RUNNING. Unknown, used, expired and foreign tokens
	// are all CodeDenied, without a difference in message; every other error
	// leaves the token usable, and the runner tries again.
	Exchange(ctx context.Context, vmid int, tokenHash string) (guestapi.BootstrapResponse, error)

	// Redactor returns the redactor of the secrets of a job. An error makes
	// log appends fail (the runner tries again): nothing unredacted is stored.
	Redactor(ctx context.Context, jobID string) (*redact.Redactor, error)
}

// Jobs is what the guest plane asks of the job service. vmid is always that
// of the channel on which the call came, never what the guest claims.
type Jobs interface {
	// Started is called after each successful Exchange.
	Started(ctx context.Context, vmid int)

	// Get returns the job with that id.
	Get(ctx context.Context, id string) (agentlab.Job, error)

	// Report checks (guestcheck.Report) and records how the job of the
	// sandbox stands. Its text is already redacted. It is idempotent; a
	// report for a job that is final is answered, not an error.
	Report(ctx context.Context, vmid int, r guestapi.Report) (guestapi.Directive, error)

	// NarrowNetwork narrows the sandbox's network policy, and never widens
	// it. When it returns nil the narrower policy is in force. The same again
	// changes nothing.
	NarrowNetwork(ctx context.Context, vmid int, n guestapi.NetworkNarrow) error

	// Directive answers what the controller wants of the runner. With
	// wait > 0 it answers when Stop changes to something not empty or when
	// wait is over, whichever is first.
	Directive(ctx context.Context, vmid int, wait time.Duration) (guestapi.Directive, error)
}

// Tokens looks up grants, which are stored by hash.
type Tokens interface {
	// GrantByHash finds the grant of that kind by the lower-case hex SHA-256
	// of its token. Code not_found (or denied) means there is none. Expiry
	// and VMID are checked by the caller.
	GrantByHash(ctx context.Context, hash, kind string) (agentlab.Grant, error)
}

// Artifacts keeps what guests send. *artifact.Service implements it.
type Artifacts interface {
	// Put stores a file of a job, replacing one of the same path.
	Put(ctx context.Context, jobID, path string, r io.Reader) (agentlab.Artifact, error)
	// LogSize tells how many bytes of the job's agent log are held.
	LogSize(ctx context.Context, jobID string) (int64, error)
	// Log reads the log from offset to its present end.
	Log(ctx context.Context, jobID string, offset int64, follow bool) (io.ReadCloser, error)
	// AppendLog adds p to the log at offset, which must not be beyond its
	// end; what is held already is skipped. full: the quota is reached.
	AppendLog(ctx context.Context, jobID string, offset int64, p []byte) (size int64, full bool, err error)
	// RepoBundle opens the git bundle given for the job.
	RepoBundle(ctx context.Context, jobID string) (rc io.ReadSeekCloser, size int64, err error)
}
