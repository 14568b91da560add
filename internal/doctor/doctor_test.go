package doctor

import (
	"context"
	"io"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agentlab-vm/agentlab/internal/fleet"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/image"
)

// host is a driver with findings that the test sets.
type host struct {
	backend.Driver
	mu     sync.Mutex
	found  []backend.Finding
	checks int
	block  chan struct{} // a check waits for it, when set
	limit  time.Duration
}

func (h *host) Info() backend.Info { return backend.Info{Name: "host", CheckLimit: h.limit} }

func (h *host) Check(ctx context.Context) []backend.Finding {
	h.mu.Lock()
	h.checks++
	found, block := h.found, h.block
	h.mu.Unlock()
	if block != nil {
		select {
		case <-block:
		case <-ctx.Done():
		}
	}
	return found
}

func (h *host) set(found ...backend.Finding) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.found = found
}

func (h *host) count() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.checks
}

// rows counts one sandbox that is gone and one that is not.
type rows struct{}

func (rows) CountSandboxes(context.Context) (map[agentlab.SandboxState]int, error) {
	return map[agentlab.SandboxState]int{agentlab.SandboxReady: 1, agentlab.SandboxDestroyed: 1}, nil
}

func (rows) CountJobs(context.Context) (map[agentlab.JobStatus]int, error) {
	return map[agentlab.JobStatus]int{agentlab.JobRunning: 2}, nil
}

func (rows) Fact(context.Context, string) (string, error)  { return "", nil }
func (rows) SetFact(context.Context, string, string) error { return nil }

// reporter is a service with one finding.
type reporter backend.Finding

func (r reporter) Findings() []backend.Finding { return []backend.Finding{backend.Finding(r)} }

func newDoctor(t *testing.T, h *host, change func(*Config)) *Service {
	t.Helper()
	dir := t.TempDir()
	cfg := Config{Store: rows{}, Fleet: fleet.Single(h, nil), Space: NewSpace(dir, dir, filepath.Join(dir, "reserve"), 0, slog.New(slog.NewTextHandler(io.Discard, nil)))}
	cfg.Space.MakeReserve()
	if change != nil {
		change(&cfg)
	}
	return New(cfg)
}

var broken = backend.Finding{Name: "kvm", Level: backend.LevelError, Detail: "it is missing", Remedy: "load it"}

// An error of the backend refuses sandboxes with the remedy. As soon as it is
// fixed they are accepted again, without a wait for the next periodic check.
func TestUsable(t *testing.T) {
	h := &host{found: []backend.Finding{broken, {Name: "disk", Level: backend.LevelWarn}}}
	s := newDoctor(t, h, nil)
	err := s.Usable("host")
	if agentlab.CodeOf(err) != agentlab.CodeUnavailable || !strings.Contains(err.Error(), "kvm: it is missing") || agentlab.HintOf(err) != "load it" {
		t.Fatalf("%v (%s)", err, agentlab.HintOf(err))
	}
	h.set(backend.Finding{Name: "disk", Level: backend.LevelWarn})
	if err := s.Usable("host"); err != nil {
		t.Errorf("after it was fixed: %v", err)
	}
	h.set(broken)
	before := h.count()
	if err := s.Usable("host"); err != nil || h.count() != before {
		t.Errorf("the finding is fresh: %v, %d checks", err, h.count()-before)
	}
}

// Requests at the same time are all accepted when the error was fixed before.
func TestUsableForMany(t *testing.T) {
	h := &host{found: []backend.Finding{broken}}
	s := newDoctor(t, h, nil)
	if s.Usable("host") == nil {
		t.Fatal("it is usable")
	}
	h.set()
	var all sync.WaitGroup
	for range 50 {
		all.Go(func() {
			if err := s.Usable("host"); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
}

func names(t *testing.T, s *Service) []string {
	t.Helper()
	st, err := s.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, f := range st.Findings {
		out = append(out, f.Name)
	}
	return out
}

// A status has the counts, and the findings that are not OK: those of services,
// of the backend and of the images. A host check has all.
func TestStatusAndChecks(t *testing.T) {
	t.Setenv("PATH", t.TempDir()) // nothing can be built
	h := &host{found: []backend.Finding{broken, {Name: "fine", Level: backend.LevelOK}}}
	s := newDoctor(t, h, func(c *Config) {
		c.Images, c.ImageNames = image.NewStore(t.TempDir(), image.Options{}), []string{"base"}
	})
	s.Add(reporter{Name: "clock", Level: backend.LevelWarn}, reporter{Name: "backup", Level: backend.LevelOK})
	st, err := s.Status(t.Context())
	if err != nil || st.Backend != "host" || len(st.Sandboxes) != 1 || st.Sandboxes["READY"] != 1 || st.Jobs["RUNNING"] != 2 {
		t.Errorf("%+v, %v", st, err)
	}
	if got := names(t, s); !slices.Equal(got, []string{"clock", "kvm", "image base"}) {
		t.Errorf("findings %q", got)
	}
	checks, err := s.Checks(t.Context())
	if err != nil || checks.Backend != "host" || checks.Bridge {
		t.Errorf("%+v, %v", checks, err)
	}
	var all []string
	for _, f := range checks.Checks {
		all = append(all, f.Name)
	}
	if !slices.Equal(all, []string{"disk space", "clock", "backup", "image base", "kvm", "fine"}) {
		t.Errorf("checks %q", all)
	}
}

// A check that does not end within the limit of its backend shows what it has found until
// then, and says that the rest is not known.
func TestCheckThatTakesTooLong(t *testing.T) {
	for limit, want := range map[time.Duration]time.Duration{0: 30 * time.Second, 3 * time.Minute: 3 * time.Minute} {
		synctest.Test(t, func(t *testing.T) {
			h := &host{found: []backend.Finding{broken}, block: make(chan struct{}), limit: limit}
			s := newDoctor(t, h, nil)
			began := time.Now()
			checks, err := s.Checks(t.Context())
			last := len(checks.Checks) - 1
			if err != nil || last < 1 || checks.Checks[last-1].Name != broken.Name || !strings.Contains(checks.Checks[last].Detail, "did not end within "+want.String()) {
				t.Errorf("%+v, %v", checks, err)
			}
			if took := time.Since(began); took != want {
				t.Errorf("it took %s, want %s", took, want)
			}
		})
	}
}

// A status waits a moment for the first check and never for a later one: the
// findings of the one before are shown until it ends.
func TestStatusDoesNotWaitForLaterChecks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := &host{found: []backend.Finding{broken}}
		s := newDoctor(t, h, nil)
		if got := names(t, s); !slices.Equal(got, []string{"kvm"}) {
			t.Fatalf("findings %q", got)
		}
		block := make(chan struct{})
		h.mu.Lock()
		h.block, h.found = block, nil
		h.mu.Unlock()
		time.Sleep(2 * findingsAge)
		begin := time.Now()
		if got := names(t, s); !slices.Equal(got, []string{"kvm"}) {
			t.Errorf("findings %q while a check runs", got)
		}
		if took := time.Since(begin); took != 0 {
			t.Errorf("it waited %s for the check", took)
		}
		close(block)
		synctest.Wait()
		if got := names(t, s); len(got) != 0 {
			t.Errorf("findings %q after it", got)
		}
	})
}

// A machine that cannot build images reports that with the remedy: as an error
// for the image that sandboxes boot by default.
func TestImageFindings(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	images := image.NewStore(t.TempDir(), image.Options{})
	found := imageFindings(t.Context(), images, "base", "agents")
	if len(found) != 2 {
		t.Fatalf("%+v", found)
	}
	for i, want := range []backend.Finding{{Name: "image base", Level: backend.LevelError}, {Name: "image agents", Level: backend.LevelWarn}} {
		f := found[i]
		if f.Name != want.Name || f.Level != want.Level || !strings.Contains(f.Detail, "mmdebstrap") || !strings.Contains(f.Remedy, "apt-get install mmdebstrap") {
			t.Errorf("%+v", f)
		}
	}
	if all := imageFindings(t.Context(), images, "base", "base"); len(all) != 1 {
		t.Errorf("one image is checked twice: %+v", all)
	}
}
