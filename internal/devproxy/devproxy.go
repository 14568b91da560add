// Package devproxy makes the TCP ports on which processes of guests listen available on
// the loopback of this machine, as http://PROJECT.sandbox.localhost:PORT. A project is a
// session, or a sandbox without one.
//
// There is one listener for each number of a port, which all sandboxes share: the name
// in the Host header selects the sandbox. A guest chooses only numbers. It gets no
// privileged port and none that is in use, in which case a free one is chosen, and
// limited numbers of them; and only its own name leads to it.
package devproxy

import (
	"context"
	"log/slog"
	"net"
	"net/http"
	"net/http/httputil"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/reconcile"
)

// Limits and times.
const (
	// maxOfProject is the maximum number of ports of one project.
	maxOfProject = 16
	// maxFronts is the maximum number of ports of this machine.
	maxFronts = 512
	// listWait is how long a guest waits for a change of its listeners.
	listWait = guestapi.MaxListenersSeconds * time.Second
	// maxHeld is the maximum number of guests that wait with their answers at the same
	// time, and crowdRate how many of the others are asked in a second: a question that
	// is held needs memory, and each one processor time.
	maxHeld, crowdRate = 256, 10
	// defaultFirst is the default of Config.First.
	defaultFirst = 3 * time.Second
	// minPause is the pause between two questions to one guest. It grows to maxPause
	// while the guest fails, and to quickPause while it answers within quickAnswer each
	// time.
	minPause, maxPause      = 500 * time.Millisecond, time.Minute
	quickAnswer, quickPause = 2 * time.Second, 5 * time.Second
	// refreshPause is the minimum time between two reads of the sandboxes, and
	// refreshShare how many times as long as a read it is at least.
	refreshPause, refreshShare = 200 * time.Millisecond, 20
	// retryAfter is the time between two attempts to open ports that other programs have,
	// and to read sandboxes that could not be read. checkAfter is the time between two
	// reads of sandboxes of which no change is known.
	retryAfter, checkAfter = time.Minute, 20 * time.Minute
	// refreshPage is how many sandboxes are read at a time: there may be thousands.
	refreshPage = 500
	// linger is how long a port stays open after its last listener has ended, for the
	// page that says so.
	linger = time.Hour
)

// Sandboxes is the sandbox service; *sandbox.Service implements it.
type Sandboxes interface {
	List(ctx context.Context, f agentlab.SandboxFilter) ([]agentlab.Sandbox, error)
	Listeners(ctx context.Context, vmid int, state string, wait time.Duration) (guestapi.Listeners, error)
	DialGuest(ctx context.Context, vmid int, port uint16) (net.Conn, error)
	DialLocal(ctx context.Context, vmid int, port uint16) (net.Conn, error)
}

// Sessions is the session service; *session.Service implements it.
type Sessions interface {
	List(ctx context.Context) ([]agentlab.Session, error)
}

// Commits are the changes of the database; *store.Store implements it.
type Commits interface {
	Subscribe(fn func(agentlab.Commit))
}

// Config is the configuration of a Service. Sandboxes, Sessions and Logger are
// required.
type Config struct {
	Sandboxes Sandboxes
	Sessions  Sessions
	Commits   Commits // nil: changes are noticed by looking only
	Off       bool    // serve nothing
	File      string  // where the ports are recorded; "" is nowhere
	// First is how long after a guest was found it is asked for the first time, so that
	// the processor of one that has just started is left to its user; 0 is 3 seconds.
	First  time.Duration
	Clock  func() time.Time
	Logger *slog.Logger
}

// Service serves the ports. Its methods are safe for concurrent use.
type Service struct {
	cfg   Config
	log   *slog.Logger
	wake  chan struct{}
	stale atomic.Bool // the sandboxes must be read again
	http  *http.Server
	proxy *httputil.ReverseProxy
	plain transports
	wg    sync.WaitGroup // watchers, and servers of listeners

	mu        sync.Mutex
	closed    bool
	byLabel   map[string]*project
	byID      map[string]*project
	watchers  map[string]*watcher       // by the UID of the sandbox
	questions reconcile.Queue[*watcher] // planned ones
	timer     *time.Timer               // of the first question; nil until there was one
	maxHeld   int
	holding   int               // guests that wait with their answers
	fronts    map[uint16]*front // by the port of guests
	hostPort  map[uint16]uint16 // ports of this machine by those of guests, also of closed fronts
	seen      map[seenKey]time.Time
	dns       *dnsServer
	dnsPort   uint16 // 0: no responder is wanted

	saveMu sync.Mutex
	saved  string // content of the file
}

// seenKey is a port of a project on which something listened.
type seenKey struct {
	project string
	port    uint16
}

// New returns a Service. It opens no port.
func New(cfg Config) *Service {
	if cfg.Clock == nil {
		cfg.Clock = time.Now
	}
	if cfg.First == 0 {
		cfg.First = defaultFirst
	}
	s := &Service{
		cfg: cfg, log: cfg.Logger, wake: make(chan struct{}, 1),
		byLabel: map[string]*project{}, byID: map[string]*project{}, watchers: map[string]*watcher{}, maxHeld: maxHeld, fronts: map[uint16]*front{}, hostPort: map[uint16]uint16{}, seen: map[seenKey]time.Time{},
	}
	s.newProxy()
	s.load()
	if cfg.Commits != nil {
		cfg.Commits.Subscribe(func(c agentlab.Commit) {
			if len(c.Sandboxes) > 0 || slices.ContainsFunc(c.Events, func(e agentlab.Event) bool { return e.Kind == agentlab.EventSession }) {
				s.changed()
			}
		})
	}
	return s
}

// changed makes Run read the sandboxes and sessions again. It does not block.
func (s *Service) changed() {
	s.stale.Store(true)
	s.kick()
}

// kick makes Run select the guests that are held again, and write the file.
func (s *Service) kick() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// Run serves until ctx ends.
func (s *Service) Run(ctx context.Context) error {
	if s.cfg.Off {
		return nil
	}
	defer s.wg.Wait()
	defer s.close()
	s.newServer(ctx)
	s.resumeDNS()
	pause := time.NewTimer(0)
	defer pause.Stop()
	var read time.Time // when the sandboxes were last read
	for {
		begun := time.Now()
		if !s.stale.Swap(false) && begun.Sub(read) < checkAfter {
			s.mu.Lock()
			s.plan(ctx) // listeners may have changed
			s.reconcile(ctx)
			s.mu.Unlock()
		} else if err := s.refresh(ctx); err == nil {
			read = begun
		} else if ctx.Err() == nil {
			s.stale.Store(true)
			s.log.Warn("the sandboxes could not be listed for their ports", "err", err)
		}
		s.save()
		pause.Reset(max(refreshPause, refreshShare*time.Since(begun)))
		select {
		case <-pause.C:
		case <-ctx.Done():
			return nil
		}
		pause.Reset(retryAfter)
		select {
		case <-s.wake:
		case <-pause.C:
		case <-ctx.Done():
			return nil
		}
	}
}

func (s *Service) close() {
	s.save()
	s.mu.Lock()
	s.closed = true
	for _, w := range s.watchers {
		s.end(w)
	}
	for _, f := range s.fronts {
		f.close()
	}
	s.stopDNS()
	s.mu.Unlock()
	_ = s.http.Close() // the requests are those of browsers, which repeat them
	s.plain.close()
}

// refresh reads the sandboxes and sessions, and starts and ends watchers.
func (s *Service) refresh(ctx context.Context) error {
	var sandboxes []found
	for f := (agentlab.SandboxFilter{NoPooled: true, Limit: refreshPage}); ; {
		page, err := s.cfg.Sandboxes.List(ctx, f)
		if err != nil {
			return err
		}
		for _, sb := range page {
			sandboxes = append(sandboxes, foundOf(sb))
			f.AfterVMID = sb.VMID
		}
		if len(page) < refreshPage {
			break
		}
	}
	sessions, err := s.cfg.Sessions.List(ctx)
	if err != nil {
		return err
	}
	list := projectsOf(sessions, sandboxes)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.byLabel, s.byID = map[string]*project{}, map[string]*project{}
	live := map[string]bool{}
	for _, p := range list {
		s.byLabel[p.label], s.byID[p.id] = p, p
		if p.live() {
			live[p.sandbox.UID] = true
			s.watch(p)
		}
	}
	for uid, w := range s.watchers {
		if !live[uid] {
			s.end(w)
			s.forget(w)
			delete(s.watchers, uid)
		}
	}
	s.plan(ctx)
	s.reconcile(ctx)
	return nil
}
