package daemon

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/config"
	"github.com/agentlab-vm/agentlab/internal/version"
)

// The maximum age of the findings of the backend's check before a status
// request starts the next check, and how long the first status request waits
// for them.
const (
	findingsAge  = time.Minute
	firstFinding = 2 * time.Second
)

// statusView is the status of the daemon and of its host.
type statusView struct {
	d        *Daemon
	settings config.Config

	again sync.Mutex // held while an error is checked again

	mu       sync.Mutex
	findings []backend.Finding
	images   []backend.Finding // of the default images of sandboxes
	checked  time.Time         // when findings were found; zero before
	checking chan struct{}     // closed when the running check has ended; nil if none runs
}

func newStatusView(d *Daemon, settings config.Config) *statusView {
	return &statusView{d: d, settings: settings}
}

// Health does no I/O.
func (v *statusView) Health() api.Health {
	h := api.Health{Status: "ok", Version: version.Get().Version}
	select {
	case <-v.d.stopping:
		h.Status = "stopping"
	default:
	}
	return h
}

// Stop ends the daemon.
func (v *statusView) Stop() { v.d.Stop() }

// Backup copies the database.
func (v *statusView) Backup(ctx context.Context) (api.Backup, error) {
	return v.d.services.backups.make(ctx)
}

// ConfirmClock accepts the clock of the host as right.
func (v *statusView) ConfirmClock(ctx context.Context) (api.Clock, error) {
	return v.d.services.clock.Confirm(ctx)
}

// Status returns counts and the findings of the backend's last check.
func (v *statusView) Status(ctx context.Context) (api.Status, error) {
	info := version.Get()
	s := api.Status{
		Version: info.Version, Commit: info.Commit, PID: os.Getpid(), StartedAt: v.d.started.UTC(),
		Backend: v.d.services.driver.Info().Name, Home: v.d.cfg.Paths.Home,
		Sandboxes: map[string]int{}, Jobs: map[string]int{}, Findings: []api.Finding{},
	}
	if a := v.d.TCPAddr(); a != nil {
		s.Listen = a.String()
	}
	sandboxes, err := v.d.services.store.CountSandboxes(ctx)
	if err != nil {
		return s, err
	}
	for state, n := range sandboxes {
		if state != agentlab.SandboxDestroyed {
			s.Sandboxes[string(state)] = n
		}
	}
	jobs, err := v.d.services.store.CountJobs(ctx)
	if err != nil {
		return s, err
	}
	for status, n := range jobs {
		s.Jobs[string(status)] = n
	}
	for _, f := range slices.Concat(v.own(), v.check(ctx), v.imageFindings()) {
		if f.Level != backend.LevelOK {
			s.Findings = append(s.Findings, told(f))
		}
	}
	if a, ok := v.d.services.driver.(backend.Accelerator); ok {
		s.Accel = a.Accel(ctx)
	}
	return s, nil
}

// checkLimit is the time limit of a check that a client waits for.
const checkLimit = 30 * time.Second

// Checks checks the host now, and returns all findings.
func (v *statusView) Checks(ctx context.Context) (api.HostChecks, error) {
	ctx, cancel := context.WithTimeout(ctx, checkLimit)
	defer cancel()
	info := v.d.services.driver.Info()
	out := api.HostChecks{Backend: info.Name, Bridge: info.Addresses != nil, Checks: []api.Finding{}}
	own := append(v.own(), v.lookAtImages(ctx)...)
	found := v.d.services.driver.Check(ctx)
	if err := ctx.Err(); err != nil {
		return out, agentlab.Errorf(agentlab.CodeTimeout, "the backend did not answer within %s", checkLimit).WithHint("see 'agentlab daemon logs'")
	}
	v.keep(found)
	for _, f := range append(own, found...) {
		out.Checks = append(out.Checks, told(f))
	}
	return out, nil
}

// own returns the findings of the daemon itself.
func (v *statusView) own() []backend.Finding {
	out := append(v.d.services.spaceFindings(), v.d.services.backups.finding(), v.d.services.clock.Finding())
	if lost := v.d.services.sandboxes.Orphaned(); len(lost) > 0 {
		first := slices.MinFunc(lost, func(a, b backend.Instance) int { return cmp.Compare(a.VMID, b.VMID) })
		out = append(out, backend.Finding{
			Name: "orphans", Level: backend.LevelWarn,
			Detail: fmt.Sprintf("the backend has %d virtual machines with AgentLab's mark that belong to no sandbox, for example VMID %d (%s)", len(lost), first.VMID, first.Ref.UID),
			Remedy: "look at them with 'agentlab sandbox list --orphans', then 'agentlab sandbox destroy --orphan UID'",
		})
	}
	return out
}

// lookAtImages reports and stores whether this machine has the default images
// or can build them.
func (v *statusView) lookAtImages(ctx context.Context) []backend.Finding {
	f, ok := v.d.services.bootable.(imageFinder)
	if !ok {
		return nil
	}
	found := f.findings(ctx, v.settings.Images.Base, v.settings.Images.Agents)
	v.mu.Lock()
	defer v.mu.Unlock()
	v.images = found
	return found
}

func (v *statusView) imageFindings() []backend.Finding {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.images
}

// told converts a finding to the type of the API.
func told(f backend.Finding) api.Finding {
	return api.Finding{Name: f.Name, Level: string(f.Level), Detail: f.Detail, Remedy: f.Remedy}
}

// keep stores the findings of a check of the backend.
func (v *statusView) keep(found []backend.Finding) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.findings, v.checked = found, v.d.cfg.Clock()
}

// check returns the newest findings, and starts a new check of the backend in
// the background if they are old. It waits only if there are none yet.
func (v *statusView) check(ctx context.Context) []backend.Finding {
	v.mu.Lock()
	if v.checking == nil && v.d.cfg.Clock().Sub(v.checked) > findingsAge {
		v.checking = make(chan struct{})
		go v.look(context.WithoutCancel(ctx), v.checking)
	}
	running, first := v.checking, v.checked.IsZero()
	v.mu.Unlock()
	if first && running != nil {
		select {
		case <-running:
		case <-ctx.Done():
		case <-time.After(firstFinding):
		}
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.findings
}

// look runs one check. The daemon does not wait for it at its end, because it
// changes nothing.
func (v *statusView) look(ctx context.Context, done chan struct{}) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	v.lookAtImages(ctx)
	v.keep(v.d.services.driver.Check(ctx))
	v.mu.Lock()
	defer v.mu.Unlock()
	v.checking = nil
	close(done)
}

// usable returns why the backend cannot start any sandbox. If the last check
// found an error, it checks again, because the user may have fixed the error.
func (v *statusView) usable() error {
	ctx := context.Background()
	asked := v.d.cfg.Clock()
	if firstError(v.check(ctx)) == nil {
		return nil
	}
	v.again.Lock() // concurrent callers share one check
	defer v.again.Unlock()
	v.mu.Lock()
	found, fresh := v.findings, v.checked.After(asked)
	v.mu.Unlock()
	if fresh && firstError(found) == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, firstFinding)
	defer cancel()
	found = v.d.services.driver.Check(ctx)
	v.keep(found)
	if f := firstError(found); f != nil {
		return agentlab.Errorf(agentlab.CodeUnavailable, "the backend cannot start sandboxes: %s: %s", f.Name, f.Detail).WithHint("%s", f.Remedy)
	}
	return nil
}

func firstError(found []backend.Finding) *backend.Finding {
	for i := range found {
		if found[i].Level == backend.LevelError {
			return &found[i]
		}
	}
	return nil
}
