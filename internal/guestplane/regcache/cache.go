// Package regcache is a read-through cache of package registries for sandboxes.
//
// Guests reach it on the controller's address, through the listener of their
// sandbox. So the sandbox of a request is known by the network. A request is
// answered only if the network policy of this sandbox allows a connection to the
// upstream, whether or not the object is stored, and is recorded in its egress log
// like a connection.
//
// The cache stores what never changes: objects with a digest, and URLs whose content
// stays the same (see rules). It downloads them itself, and shares one download among
// all guests that want the same object. Everything else is passed on. A guest sends
// nothing that is stored: it names an object of a configured upstream. Contents with a
// known digest are verified before the last byte is sent. An object is stored in one
// file, which gets its name when it is complete.
package regcache

import (
	"cmp"
	"fmt"
	"log/slog"
	"net/url"
	"sync"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/config"
	"github.com/agentlab-vm/agentlab/internal/guestplane/outside"
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

// Config is the configuration of a Service.
type Config struct {
	config.Cache        // the section of config.yaml, whose values were checked; Dir is set
	MaxBytes     int64  // of all objects; default MaxGB
	MinFree      int64  // bytes of the disk that stay free
	Base         string // URL of the controller for guests, without a path

	Outside  *outside.Outside
	Profiles Profiles
	Metrics  Metrics

	Limits Limits
	Logger *slog.Logger // nil means none
}

// Limits bound the work. Zero means the default.
type Limits struct {
	Stall  time.Duration // longest time without a byte to a guest; default 1 min
	Object int64         // maximum size of a stored object; default half of MaxBytes, at most 8 GiB
	Whole  int64         // maximum size of an index that is rewritten; default 32 MiB
}

const (
	maxRequests = 32        // of one sandbox at a time; more wait
	maxIndexes  = 2         // of Python, of one sandbox: each is in memory
	maxRewrites = 4         // of these indexes at a time
	maxFetches  = 64        // downloads that are stored, at a time; more wait
	maxIndex    = 128 << 20 // bytes of an index that is searched for a digest
)

// Service is the cache. Its methods may be called from any goroutine. A nil Service
// is a cache that is off.
type Service struct {
	cfg   Config
	log   *slog.Logger
	store *store

	upstreams  map[Kind]*url.URL // without those of apt; nil: the kind is off
	dockerAuth *url.URL          // where tokens for anonymous downloads come from
	mirrors    []*url.URL        // of apt; guests ask for the host and port of each

	slots    chan struct{}  // of downloads
	rewrites chan struct{}  // of indexes that are rewritten
	running  sync.WaitGroup // downloads

	mu      sync.Mutex
	flights map[string]*flight
	opted   map[string]optOut // by profile
	tokens  map[string]token  // by repository
}

// New opens the directory of the cache, and removes what a killed process left.
func New(cfg Config) (*Service, error) {
	cfg.MaxBytes = cmp.Or(cfg.MaxBytes, int64(cfg.MaxGB)<<30)
	cfg.Limits = Limits{
		Stall: cmp.Or(cfg.Limits.Stall, time.Minute), Object: cmp.Or(cfg.Limits.Object, min(cfg.MaxBytes/2, 8<<30)), Whole: cmp.Or(cfg.Limits.Whole, 32<<20),
	}
	parse := func(text string) *url.URL {
		u, _ := config.RegistryURL(text) // nil: the kind is off
		return u
	}
	st, err := openStore(cfg.Dir, cfg.MaxBytes, hostspace.New(cfg.Dir, cfg.MinFree, nil, nil))
	if err != nil {
		return nil, agentlab.Errorf(agentlab.CodeUnavailable, "cannot use the directory of the registry cache: %w", err).WithField("cache.dir").WithHint("%s", cmp.Or(agentlab.HintOf(err), "check the directory and its permissions"))
	}
	s := &Service{
		cfg: cfg, log: cmp.Or(cfg.Logger, slog.New(slog.DiscardHandler)), store: st,
		upstreams: map[Kind]*url.URL{NPM: parse(cfg.NPM), PyPI: parse(cfg.PyPI), Go: parse(cfg.Go), Docker: parse(cfg.Docker)}, dockerAuth: parse(cfg.DockerAuth),
		slots: make(chan struct{}, maxFetches), rewrites: make(chan struct{}, maxRewrites),
		flights: map[string]*flight{}, opted: map[string]optOut{}, tokens: map[string]token{},
	}
	for _, m := range cfg.Apt {
		s.mirrors = append(s.mirrors, parse(m))
	}
	return s, nil
}

// Close ends all downloads. Requests must have ended.
func (s *Service) Close() error {
	s.mu.Lock()
	for _, f := range s.flights {
		f.cancel()
	}
	s.mu.Unlock()
	s.running.Wait()
	return nil
}

// profileAge is how long the opt-out of a profile is used.
const profileAge = 5 * time.Second

type optOut struct {
	out   bool
	asked time.Time
}

// optedOut returns an error if a profile does not use the cache.
func (s *Service) optedOut(profile string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	have := s.opted[profile]
	if now := time.Now(); now.Sub(have.asked) > profileAge {
		p, err := s.cfg.Profiles.Use(profile)
		if err != nil && agentlab.CodeOf(err) != agentlab.CodeNotFound { // a profile may be removed while its sandboxes run
			return err
		}
		have = optOut{p.NoCache, now}
		s.opted[profile] = have
	}
	if have.out {
		return errOptOut
	}
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
		if u.Objects > 0 || s.upstreams[k] != nil || k == Apt && len(s.mirrors) > 0 {
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
	return s.store.clear(cmp.Or(kind, "*"))
}
