// Package regcache is a read-through cache of package registries for sandboxes.
//
// Guests reach it on the controller's address, through the listener of their
// sandbox. So the sandbox of a request is known by the network. A request is
// answered only if the network policy of this sandbox allows a connection to the
// upstream, whether or not the object is stored, and is recorded in its egress log
// like a connection.
//
// The cache downloads objects itself, and shares one download among all guests
// that want the same object. A guest sends nothing that is stored: it names an
// object of a configured upstream. Objects with a known digest are verified before
// the last byte is sent. An object is stored in one file, which gets its name when
// it is complete.
package regcache

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/hostspace"
)

// Kind is the kind of a registry.
type Kind string

// The kinds of registries.
const (
	NPM    Kind = "npm"
	PyPI   Kind = "pypi"
	Go     Kind = "go"
	Apt    Kind = "apt"
	Docker Kind = "docker"
)

// Kinds are all kinds.
var Kinds = []Kind{NPM, PyPI, Go, Apt, Docker}

// Results of requests, for metrics.
const (
	ResultHit    = "hit"    // served from the cache
	ResultMiss   = "miss"   // downloaded, alone or with other guests
	ResultDenied = "denied" // the policy of the sandbox does not allow the upstream
	ResultBad    = "bad"    // not a request that the cache answers
	ResultError  = "error"  // the upstream failed, or does not have the object
)

// Outside resolves the names of upstreams and connects to them; *gate.Outside
// implements it.
type Outside interface {
	Lookup(ctx context.Context, name string, private bool) ([]netip.Addr, error)
	Dial(ctx context.Context, to netip.AddrPort, private bool) (net.Conn, error)
}

// Sandboxes returns the sandbox with a VMID; *store.Store implements it.
type Sandboxes interface {
	Sandbox(ctx context.Context, vmid int) (agentlab.Sandbox, error)
}

// Profiles returns a profile, or an error with the reason why it cannot be used.
type Profiles interface {
	Use(name string) (agentlab.Profile, error)
}

// Metrics counts requests and bytes.
type Metrics interface {
	// CacheRequest counts one request by its result.
	CacheRequest(result string)
	// CacheBytes counts bytes that were sent to guests or, if fetched, received
	// from upstreams.
	CacheBytes(fetched bool, n int64)
}

// Audit appends a request of a guest to the egress log of its sandbox.
type Audit interface {
	RecordEgress(ctx context.Context, sb agentlab.Sandbox, r agentlab.EgressRecord) error
}

// Config is the configuration of a Service.
type Config struct {
	Dir       string // it belongs to the cache alone
	MaxBytes  int64  // of all objects
	MinFree   int64  // bytes of the disk that stay free
	Base      string // URL of the controller for guests, without a path
	Upstreams Upstreams

	Outside   Outside
	Sandboxes Sandboxes
	Profiles  Profiles
	Audit     Audit
	Metrics   Metrics // nil means none
	// Certificates are trusted in addition to those of the system, each as PEM.
	Certificates []string

	Limits Limits
	Logger *slog.Logger // nil means none
}

// Limits bound the work. Zero means the default.
type Limits struct {
	Requests int           // of one sandbox at a time; more wait; default 32
	Fetches  int           // downloads at a time; more wait; default 64
	Fresh    time.Duration // how long an index is served without asking the upstream; default 1 min
	Stall    time.Duration // longest time without a byte from an upstream or to a guest; default 1 min
	Object   int64         // maximum size of a stored object; default half of MaxBytes, at most 8 GiB
	Index    int64         // maximum size of a stored index; default 128 MiB
	Whole    int64         // maximum size of an index that is rewritten, or of a manifest of Docker; default 32 MiB
}

func (l Limits) withDefaults(maxBytes int64) Limits {
	if l.Requests <= 0 {
		l.Requests = 32
	}
	if l.Fetches <= 0 {
		l.Fetches = 64
	}
	if l.Fresh <= 0 {
		l.Fresh = time.Minute
	}
	if l.Stall <= 0 {
		l.Stall = time.Minute
	}
	if l.Object <= 0 {
		l.Object = min(maxBytes/2, 8<<30)
	}
	if l.Index <= 0 {
		l.Index = 128 << 20
	}
	if l.Whole <= 0 {
		l.Whole = 32 << 20
	}
	return l
}

// Service is the cache. Its methods may be called from any goroutine. A nil Service
// is a cache that is off.
type Service struct {
	cfg    Config
	log    *slog.Logger
	store  *store
	public *http.Transport
	// private has the connections to private addresses.
	private *http.Transport
	slots   chan struct{} // of downloads
	tokens  tokens

	rewrites chan struct{} // of indexes that are rewritten or searched
	changes  atomic.Int64  // calls of SandboxChanged

	mu      sync.Mutex
	guests  map[int]*guest
	flights map[string]*flight
}

// New opens the directory of the cache, and removes what a killed process left.
func New(cfg Config) (*Service, error) {
	cfg.Limits = cfg.Limits.withDefaults(cfg.MaxBytes)
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	if cfg.Metrics == nil {
		cfg.Metrics = noMetrics{}
	}
	st, err := openStore(cfg.Dir, cfg.MaxBytes, hostspace.New(cfg.Dir, cfg.MinFree, nil, nil))
	if err != nil {
		return nil, agentlab.Errorf(agentlab.CodeUnavailable, "cannot use the directory of the registry cache: %w", err).WithField("cache.dir").WithHint("%s", cmp.Or(agentlab.HintOf(err), "check the directory and its permissions"))
	}
	s := &Service{
		cfg: cfg, log: cfg.Logger, store: st,
		slots: make(chan struct{}, cfg.Limits.Fetches), rewrites: make(chan struct{}, maxRewrites),
		guests: map[int]*guest{}, flights: map[string]*flight{}, tokens: tokens{known: map[string]token{}},
	}
	s.public, s.private = s.transport(), s.transport()
	return s, nil
}

// How many contents are in memory at the same time, to be rewritten or searched, and
// for one guest.
const (
	maxRewrites = 4
	maxWholes   = 2
)

type noMetrics struct{}

func (noMetrics) CacheRequest(string)    {}
func (noMetrics) CacheBytes(bool, int64) {}

// Close ends all downloads. Requests must have ended.
func (s *Service) Close() error {
	s.mu.Lock()
	guests, flights := s.guests, s.flights
	s.guests, s.flights = map[int]*guest{}, map[string]*flight{}
	s.mu.Unlock()
	for _, f := range flights {
		f.cancel()
	}
	for _, g := range guests {
		g.close()
	}
	for _, f := range flights {
		<-f.ended
	}
	s.public.CloseIdleConnections()
	s.private.CloseIdleConnections()
	return nil
}

// Usage is the use of the cache by one kind of registry.
type Usage struct {
	Kind    Kind
	Objects int
	Bytes   int64
}

// Status returns the use of the cache by each kind that is enabled or has objects,
// and its maximum size. The size is 0 if the cache is off.
func (s *Service) Status() (use []Usage, maxBytes int64) {
	if s == nil {
		return nil, 0
	}
	for _, k := range Kinds {
		u := s.store.usage(k)
		if u.Objects > 0 || s.cfg.Upstreams.has(k) {
			use = append(use, u)
		}
	}
	return use, s.cfg.MaxBytes
}

// Findings implements doctor.Reporter.
func (s *Service) Findings() []backend.Finding {
	use, most := s.Status()
	f := backend.Finding{Name: "registry-cache", Level: backend.LevelOK}
	objects, bytes := 0, int64(0)
	for _, u := range use {
		objects, bytes = objects+u.Objects, bytes+u.Bytes
	}
	f.Detail = fmt.Sprintf("%s, %d of %d MiB", agentlab.Plural(objects, "object"), bytes>>20, most>>20)
	if err := s.store.space.Keep(); err != nil {
		f.Level, f.Detail, f.Remedy = backend.LevelWarn, "nothing new is stored: "+err.Error(), "agentlab cache clear, or "+agentlab.HintOf(err)
	}
	return []backend.Finding{f}
}

// Clear removes the objects of a kind, "" means all, and returns what it removed.
// Downloads that run are not stored afterwards.
func (s *Service) Clear(kind Kind) (Usage, error) {
	if s == nil {
		return Usage{}, agentlab.Errorf(agentlab.CodeUnsupported, "the registry cache is off").WithHint("set cache.enabled: true in config.yaml, and restart the daemon")
	}
	return s.store.clear(kind)
}
