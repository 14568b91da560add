// Package bootstrap delivers to the runner of a sandbox what it needs: its job
// and its secrets.
//
// A guest gets a Document with a one-time token together with its identity. Its
// runner exchanges the token for the answer (Exchange), in one transaction with
// the start of its job. An answer can be lost on its way, for instance when
// the daemon dies; then the guest gets another token (Reissue), a few times.
// A kept sandbox that boots again after its job gets no other token in that
// boot, because a guest that has deleted its secrets at the end of the job
// answers the same. It gets its secrets when it is stopped and started.
//
// The secrets that a guest got are stored, encrypted, until its sandbox is
// destroyed: the service builds the redactors for all data from the guest.
package bootstrap

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/guestcheck"
	"github.com/agentlab-vm/agentlab/internal/job"
	"github.com/agentlab-vm/agentlab/internal/lock"
	"github.com/agentlab-vm/agentlab/internal/secret"
)

// Store is the part of the database that the service uses. Its semantics are
// those of package store.
type Store interface {
	Job(ctx context.Context, id string) (agentlab.Job, error)
	Jobs(ctx context.Context, f agentlab.JobFilter) ([]agentlab.Job, error)
	UpdateJob(ctx context.Context, id string, fn func(*agentlab.Job) ([]agentlab.Event, error)) (agentlab.Job, error)
	Sandbox(ctx context.Context, vmid int) (agentlab.Sandbox, error)
	Sandboxes(ctx context.Context, f agentlab.SandboxFilter) ([]agentlab.Sandbox, error)
	AppendEvents(ctx context.Context, evs ...agentlab.Event) error
	PutBootstrapToken(ctx context.Context, t agentlab.BootstrapToken, check func(agentlab.Sandbox, *agentlab.Job) error) error
	BootstrapOpen(ctx context.Context, vmid int) (bool, error)
	CheckBootstrap(ctx context.Context, hash string, vmid int) error
	ConsumeBootstrap(ctx context.Context, hash string, vmid int, grants []agentlab.Grant,
		fn func(*agentlab.Sandbox, *agentlab.Job) ([]agentlab.Event, error)) error
	// Subscribe calls fn after each commit.
	Subscribe(fn func(agentlab.Commit))
}

// Profiles returns a profile, or an error with the reason why it cannot be used.
type Profiles interface {
	Use(name string) (agentlab.Profile, error)
}

// Secrets opens secrets bundles and stores what was delivered; *secret.Vault
// implements it.
type Secrets interface {
	Deliver(ctx context.Context, name string, want func(key string) bool) (secret.Bundle, error)
	SaveDelivered(ctx context.Context, id string, values []string) error
	Delivered(id string) (values []string, ok bool, err error)
	Known(ctx context.Context) ([]string, error)
	SweepDelivered(ctx context.Context, done func(ctx context.Context, id string) (bool, error)) (int, error)
}

// Cache is the registry cache; *regcache.Service implements it.
type Cache interface {
	// Settings returns what a guest needs to use the cache, nil if it must not.
	Settings(sb agentlab.Sandbox, prof agentlab.Profile) *guestapi.RegistryCache
}

// Backends describes the backend with a name: its URLs of the guest plane; *fleet.Fleet
// implements it.
type Backends interface {
	Info(name string) backend.Info
}

// Config is the configuration of a Service. Zero durations and sizes take the
// default.
type Config struct {
	Store    Store
	Profiles Profiles
	Secrets  Secrets
	Backends Backends
	Cache    Cache // nil: there is none

	TokenTTL      time.Duration // lifetime of a bootstrap token; default 10 min
	Unused        time.Duration // after which an answer may be lost; default 5 s, longer with each token
	UploadWindow  time.Duration // after a job's deadline, for uploads; default job.UploadWindow
	ArtifactBytes int64         // maximum size of a job's artifacts; default 4 GiB

	Clock  func() time.Time // nil means time.Now
	Logger *slog.Logger     // nil means none
}

// Service delivers jobs and secrets. Its methods may be called from any
// goroutine.
type Service struct {
	cfg   Config
	log   *slog.Logger
	clock func() time.Time

	turns lock.Keyed[string] // by UID of the sandbox; held during an exchange

	mu         sync.Mutex
	deliveries map[string]*delivery  // by UID of the sandbox
	redactors  map[string]*redaction // by secretsKey
}

// delivery is the state of the delivery to one sandbox. A new process begins
// without it: it can be restored from the rows and the guest.
type delivery struct {
	exchanging bool      // an exchange is running
	token      string    // created, and neither confirmed by the guest nor exchanged
	tokenEnds  time.Time // of the last token of this process
	tradedAt   time.Time // when the last token was exchanged, or first found to be closed
	reissued   int       // tokens that Reissue created
	done       bool      // the guest has the answer
	failures   int       // consecutive exchanges that failed because the secrets were not available
	trouble    string    // why the last one failed
}

// New returns a Service.
func New(cfg Config) *Service {
	cfg.TokenTTL = cmp.Or(cfg.TokenTTL, 10*time.Minute)
	cfg.Unused = cmp.Or(cfg.Unused, 5*time.Second)
	cfg.UploadWindow = cmp.Or(cfg.UploadWindow, job.UploadWindow)
	cfg.ArtifactBytes = cmp.Or(cfg.ArtifactBytes, 4<<30)
	s := &Service{cfg: cfg, log: cfg.Logger, clock: cfg.Clock, deliveries: map[string]*delivery{}, redactors: map[string]*redaction{}}
	if s.log == nil {
		s.log = slog.New(slog.DiscardHandler)
	}
	if s.clock == nil {
		s.clock = time.Now
	}
	cfg.Store.Subscribe(func(c agentlab.Commit) {
		for _, sb := range c.Sandboxes {
			if sb.State == agentlab.SandboxDestroyed {
				s.forget(sb)
			}
		}
	})
	return s
}

// with calls fn with the delivery to a sandbox, under the lock.
func (s *Service) with(uid string, fn func(*delivery)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	d := s.deliveries[uid]
	if d == nil {
		d = &delivery{}
		s.deliveries[uid] = d
	}
	fn(d)
}

// deliveryTo returns the delivery to a sandbox as it is now: empty if nothing was
// delivered. Most sandboxes have no job and no secrets, and so none.
func (s *Service) deliveryTo(uid string) delivery {
	s.mu.Lock()
	defer s.mu.Unlock()
	if d := s.deliveries[uid]; d != nil {
		return *d
	}
	return delivery{}
}

// Document returns what the runner of a booting sandbox needs to fetch its job
// and secrets; nil if there is nothing to fetch. A token that has not reached
// the guest is used again; call Sent when it has.
func (s *Service) Document(ctx context.Context, sb agentlab.Sandbox) (*guestapi.Bootstrap, error) {
	if sb.JobID == "" && !s.hasSecrets(sb) {
		return nil, nil
	}
	s.with(sb.UID, func(d *delivery) { d.tradedAt, d.reissued, d.done = time.Time{}, 0, false })
	if token, err := s.unsent(ctx, sb, s.cfg.TokenTTL/2); err != nil || token != "" {
		return s.document(sb, token), err
	}
	return s.mint(ctx, sb, nil)
}

// unsent returns the token that the guest has not confirmed, if it can still be
// exchanged and has more than left of its lifetime.
func (s *Service) unsent(ctx context.Context, sb agentlab.Sandbox, left time.Duration) (token string, err error) {
	d := s.deliveryTo(sb.UID)
	if d.token == "" || !s.clock().Add(left).Before(d.tokenEnds) {
		return "", nil
	}
	token = d.token
	err = s.cfg.Store.CheckBootstrap(ctx, secret.HashToken(token), sb.VMID)
	if agentlab.CodeOf(err) == agentlab.CodeDenied { // it was revoked or exchanged
		return "", nil
	}
	return token, err
}

// mint returns a document with a new token. The store calls check, if it is
// not nil, in the same transaction; after an error there is no new token.
func (s *Service) mint(ctx context.Context, sb agentlab.Sandbox, check func(agentlab.Sandbox, *agentlab.Job) error) (*guestapi.Bootstrap, error) {
	token, hash := secret.MintToken()
	ends := s.clock().UTC().Add(s.cfg.TokenTTL)
	if err := s.cfg.Store.PutBootstrapToken(ctx, agentlab.BootstrapToken{Hash: hash, VMID: sb.VMID, ExpiresAt: ends}, check); err != nil {
		return nil, err
	}
	s.with(sb.UID, func(d *delivery) { d.token, d.tokenEnds = token, ends })
	return s.document(sb, token), nil
}

func (s *Service) document(sb agentlab.Sandbox, token string) *guestapi.Bootstrap {
	return &guestapi.Bootstrap{Token: token, Controller: s.cfg.Backends.Info(sb.Backend).ControllerURL, VMID: sb.VMID}
}

// Sent records that the guest of the sandbox with that UID has its document.
func (s *Service) Sent(uid string) {
	if s.deliveryTo(uid).token != "" {
		s.with(uid, func(d *delivery) { d.token = "" })
	}
}

// hasSecrets reports whether the profile of a sandbox has a secrets bundle. A
// profile that can no longer be used has none.
func (s *Service) hasSecrets(sb agentlab.Sandbox) bool {
	prof, err := s.cfg.Profiles.Use(sb.Profile)
	if err != nil {
		s.log.Warn("sandbox gets no secrets: its profile can no longer be used", "vmid", sb.VMID, "err", err)
		return false
	}
	return prof.SecretsBundle != ""
}

// maxReissued is how often a guest gets another token, until it boots again or
// this process ends.
const maxReissued = 3

// errNotMissing is the error of a token that is no longer needed.
var errNotMissing = errors.New("no bootstrap answer is missing")

// Reissue returns another document for a running sandbox whose token was
// exchanged, or has expired, while its guest does not have the answer; nil
// otherwise. health asks the guest. again is when to call it next, 0 for not
// until the sandbox or its job changes.
//
// The row of the job decides whether an answer is missing, and never the guest
// alone: a guest whose job has ended deletes the answer itself. It is read
// again in the transaction that creates the token, because the job may end
// while the guest is asked.
func (s *Service) Reissue(ctx context.Context, sb agentlab.Sandbox, health func(context.Context) (guestapi.Health, error)) (doc *guestapi.Bootstrap, again time.Duration, err error) {
	token, err := s.unsent(ctx, sb, 0)
	if err != nil {
		return nil, 0, err
	}
	d := s.deliveryTo(sb.UID)
	if d.done || d.reissued == maxReissued && token == "" {
		return nil, 0, nil
	}
	if missing, err := s.missing(ctx, sb); err != nil || !missing {
		return nil, 0, err
	}
	if token != "" {
		return s.document(sb, token), s.cfg.Unused, nil
	}
	if again, err = s.waitForExchange(ctx, sb, d); err != nil || again > 0 {
		return nil, again, err
	}
	h, err := health(ctx)
	if err != nil {
		s.log.Debug("a guest cannot be asked whether it has its job and secrets", "vmid", sb.VMID, "err", err)
		return nil, s.cfg.Unused, nil
	}
	if h.Bootstrapped {
		s.with(sb.UID, func(d *delivery) { d.done = true })
		return nil, 0, nil
	}
	doc, err = s.mint(ctx, sb, func(now agentlab.Sandbox, j *agentlab.Job) error {
		if now.UID != sb.UID || !mayLackAnswer(now, j) {
			return errNotMissing
		}
		return nil
	})
	switch {
	case errors.Is(err, errNotMissing):
		return nil, 0, nil
	case err != nil:
		return nil, s.cfg.Unused, err
	}
	s.log.Info("a runner does not have its bootstrap answer; it gets another token", "vmid", sb.VMID, "job", sb.JobID)
	s.with(sb.UID, func(d *delivery) {
		d.reissued++
		d.tradedAt = time.Time{}
	})
	return doc, s.cfg.Unused, nil
}

// waitForExchange returns the time during which the runner may still use its
// token or receive its answer. It waits for an open token only if this process
// created it: an earlier process may have died before the guest got its token.
func (s *Service) waitForExchange(ctx context.Context, sb agentlab.Sandbox, d delivery) (again time.Duration, err error) {
	if d.exchanging {
		return s.cfg.Unused, nil
	}
	if !d.tokenEnds.IsZero() {
		if open, err := s.cfg.Store.BootstrapOpen(ctx, sb.VMID); err != nil || open {
			return s.cfg.Unused, err
		}
	}
	now := s.clock()
	s.with(sb.UID, func(d *delivery) {
		if d.tradedAt.IsZero() {
			d.tradedAt = now
		}
		again = d.tradedAt.Add(s.cfg.Unused << (2 * d.reissued)).Sub(now)
	})
	return again, nil
}

// missing reports whether the runner of a sandbox may still lack its answer.
func (s *Service) missing(ctx context.Context, sb agentlab.Sandbox) (bool, error) {
	if sb.JobID == "" {
		return mayLackAnswer(sb, nil) && s.hasSecrets(sb), nil
	}
	j, err := s.cfg.Store.Job(ctx, sb.JobID)
	if err != nil {
		return false, ignoreNotFound(err)
	}
	return mayLackAnswer(sb, &j), nil
}

// mayLackAnswer reports whether the runner of a sandbox may not have its answer
// yet, from the rows of the sandbox and of its job, nil if it has none.
func mayLackAnswer(sb agentlab.Sandbox, j *agentlab.Job) bool {
	if j == nil {
		return sb.State == agentlab.SandboxReady
	}
	return sb.State == agentlab.SandboxRunning && j.Status == agentlab.JobRunning && j.Phase == guestcheck.Phases[0] && j.StopRequested == ""
}

// Trouble returns why the secrets of the sandbox with that UID could not be
// delivered the last time, "" if they could.
func (s *Service) Trouble(uid string) string { return s.deliveryTo(uid).trouble }

// forget deletes the in-memory state of a sandbox that is DESTROYED.
func (s *Service) forget(sb agentlab.Sandbox) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.deliveries, sb.UID)
	delete(s.redactors, secretsKey(sb))
}

// Sweep deletes the stored secrets of guests that no longer exist: their
// sandbox is DESTROYED, and their job, if there was one, has ended. known
// reports whether a job exists or is being created. It returns how many it
// deleted.
func (s *Service) Sweep(ctx context.Context, known func(ctx context.Context, jobID string) (bool, error)) (int, error) {
	s.mu.Lock()
	redactors, deliveries := slices.Collect(maps.Keys(s.redactors)), slices.Collect(maps.Keys(s.deliveries))
	s.mu.Unlock()
	live, err := s.live(ctx) // afterwards: a sandbox has its row before the others begin
	if err != nil {
		return 0, err
	}
	s.mu.Lock()
	for _, key := range redactors { // built again when needed
		if !live[key] {
			delete(s.redactors, key)
		}
	}
	for _, uid := range deliveries { // a call that was late made it after Forget
		if !live[uid] {
			delete(s.deliveries, uid)
		}
	}
	s.mu.Unlock()
	// A sandbox may be newer than the list above, but not newer than its secrets:
	// this list is read after SweepDelivered has read theirs.
	after := sync.OnceValues(func() (map[string]bool, error) { return s.live(ctx) })
	return s.cfg.Secrets.SweepDelivered(ctx, func(ctx context.Context, key string) (bool, error) {
		if agentlab.ValidateJobID(key) == nil {
			exists, err := known(ctx, key)
			if err != nil {
				return false, err
			}
			j, err := s.cfg.Store.Job(ctx, key)
			if err == nil && j.Prepares() { // the sandboxes of attempts inherit its secrets, also later
				if j, err = s.cfg.Store.Job(ctx, j.ParentID); agentlab.CodeOf(err) == agentlab.CodeNotFound {
					exists = false
				}
			}
			if exists && (err != nil || !j.Status.Final()) {
				return false, ignoreNotFound(err) // it may be being created
			}
		}
		live, err := after()
		return err == nil && !live[key], err
	})
}

func ignoreNotFound(err error) error {
	if agentlab.CodeOf(err) == agentlab.CodeNotFound {
		return nil
	}
	return err
}

// live returns the secretsKey and the UID of every sandbox that is not
// DESTROYED.
func (s *Service) live(ctx context.Context) (map[string]bool, error) {
	list, err := s.cfg.Store.Sandboxes(ctx, agentlab.SandboxFilter{})
	out := map[string]bool{}
	for _, sb := range list {
		out[secretsKey(sb)], out[sb.UID] = true, true
	}
	return out, err
}
