package fake

import (
	"context"
	"maps"
	"net"
	"strings"
	"sync"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/reconcile"
)

// record is the stored state of an instance.
type record struct {
	Spec   backend.Spec       `json:"spec"`
	Power  backend.PowerState `json:"power"`
	Reason string             `json:"reason,omitempty"`
	Guest  guestRecord        `json:"guest"`

	Disk    map[string]string `json:"disk,omitempty"`    // files that the guest wrote
	Fork    *guestRecord      `json:"fork,omitempty"`    // memory with which the first start continues
	Restore *snapshot         `json:"restore,omitempty"` // of an interrupted RestoreSnapshot

	Network *agentlab.Network `json:"network,omitempty"` // of UpdateNetwork; nil means that of Spec

	Lease time.Time `json:"lease,omitzero"` // of SetDeadline
	Ends  time.Time `json:"ends,omitzero"`  // when that powers it off

	Egress *egressLog `json:"egress_log,omitempty"` // nil while it is empty

	OnDisk        bool `json:"on_disk,omitempty"` // suspended to disk: it survives a restart of the host
	Forked        bool `json:"forked,omitempty"`  // the guest continues with the memory of Fork
	Lost          bool `json:"lost,omitempty"`    // that memory is lost: it crashed before it had its identity
	Expired       bool `json:"expired,omitempty"`
	HostRestarted bool `json:"host_restarted,omitempty"`
	GuestRebooted bool `json:"guest_rebooted,omitempty"`
}

// savedRecord is the file of an instance.
type savedRecord struct {
	record
	Console string `json:"console,omitempty"`
}

// guestRecord is the memory of a running guest; a power cut deletes it.
type guestRecord struct {
	BootID    string              `json:"boot_id,omitempty"`
	StartedAt time.Time           `json:"started_at,omitzero"`
	Identity  string              `json:"identity,omitempty"`
	Nested    string              `json:"nested,omitempty"`
	Hostname  string              `json:"hostname,omitempty"`
	Damaged   bool                `json:"damaged,omitempty"` // it started with the file damagedDisk
	Bootstrap *guestapi.Bootstrap `json:"bootstrap,omitempty"`
	Runner    *runnerRecord       `json:"runner,omitempty"`
}

// instance is one sandbox on the host.
type instance struct {
	h       *Host
	console console

	mu       sync.Mutex
	rec      record        // Spec never changes
	spec     *backend.Spec // Spec with the current network policy, shared by all views; nil after a change of the policy
	guest    *guest        // nil unless Power is running or suspended
	listener *listener
	deadline reconcile.Entry[*instance] // queued while Power is running and there is a deadline
}

func (in *instance) view() backend.Instance {
	in.mu.Lock()
	defer in.mu.Unlock()
	ref := backend.Ref{UID: in.rec.Spec.UID, Handle: "fake-" + in.rec.Spec.UID}
	v := backend.Instance{Ref: ref, VMID: in.rec.Spec.VMID, Name: in.rec.Spec.Name, Power: in.rec.Power, Reason: in.rec.Reason, Expired: in.rec.Expired}
	v.Spec = &in.rec.Spec
	if in.rec.Network != nil {
		if in.spec == nil {
			spec := in.rec.Spec
			spec.Network = *in.rec.Network
			in.spec = &spec
		}
		v.Spec = in.spec
	}
	v.HostRestarted = in.rec.HostRestarted && v.Power == backend.PowerCrashed
	v.GuestRebooted = in.rec.GuestRebooted && v.Power == backend.PowerCrashed
	if v.Power == backend.PowerRunning {
		v.IP, v.Copied = "10.77.0.2", in.rec.Forked
	}
	return v
}

// save writes the record. The caller holds in.mu, or in is not shared yet.
func (in *instance) save() error {
	file := in.h.file(in.rec.Spec)
	if file == "" {
		return nil
	}
	if err := replaceJSON(file, savedRecord{in.rec, in.console.text()}); err != nil {
		return agentlab.Errorf(agentlab.CodeUnavailable, "keep an instance: %w", err)
	}
	return nil
}

// complete completes a partial instance, which starts from a snapshot unless from
// is nil.
func (in *instance) complete(from *snapshot) error {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.rec.Power != backend.PowerPartial {
		return nil
	}
	in.rec.Power, in.rec.Reason = backend.PowerStopped, ""
	switch s := in.rec.Restore; {
	case s != nil:
		in.rec.Disk, in.rec.Fork, in.rec.Restore = maps.Clone(s.Disk), nil, nil
		if s.Guest != nil {
			in.rec.Power, in.rec.Guest = backend.PowerSuspended, *s.Guest
			in.boot()
		}
	case from != nil:
		in.rec.Disk = maps.Clone(from.Disk)
		if from.Guest != nil && !in.h.cfg.NoForks {
			fork := *from.Guest
			fork.Bootstrap, fork.Runner = nil, nil // a new identity ends the runner
			in.rec.Fork = &fork
		}
	}
	return in.save()
}

func (in *instance) start() error {
	in.mu.Lock()
	defer in.mu.Unlock()
	switch in.rec.Power {
	case backend.PowerRunning:
		return nil
	case backend.PowerSuspended:
		return agentlab.Errorf(agentlab.CodeConflict, "sandbox %d is suspended", in.rec.Spec.VMID).WithHint("resume the sandbox first")
	case backend.PowerPartial:
		return agentlab.Errorf(agentlab.CodeInvalid, "sandbox %d is half made", in.rec.Spec.VMID).WithHint("create it again, or destroy it")
	}
	if in.rec.Lost {
		return agentlab.Errorf(agentlab.CodeConflict, "sandbox %d has lost its saved memory", in.rec.Spec.VMID).WithHint("stop it first")
	}
	if in.rec.Spec.Resources.Nested == agentlab.NestedOn {
		if err := in.h.nested(); err != nil {
			return err
		}
	}
	in.rec.Power, in.rec.Reason, in.rec.Expired, in.rec.HostRestarted, in.rec.GuestRebooted = backend.PowerRunning, "", false, false, false
	_, damaged := in.rec.Disk[damagedDisk]
	in.rec.Guest = guestRecord{BootID: agentlab.NewUID(), StartedAt: in.h.cfg.Clock().UTC(), Damaged: damaged}
	if in.rec.Forked = in.rec.Fork != nil; in.rec.Forked {
		in.rec.Guest, in.rec.Fork = *in.rec.Fork, nil
	}
	in.console.line("[fake] " + in.rec.Spec.Name + " powered on")
	if err := in.save(); err != nil {
		return err
	}
	in.boot()
	return nil
}

// hangs reports whether the guest does not answer now, because of its name.
func (in *instance) hangs() bool {
	in.mu.Lock()
	defer in.mu.Unlock()
	return strings.HasPrefix(in.rec.Spec.Name, "never-boots") || in.crashBoots()
}

// damagedDisk is a file of a guest. The guest crashes while it boots with it.
const damagedDisk = "/damaged"

// crashBoots reports whether the guest crashes while it boots. The caller holds in.mu.
func (in *instance) crashBoots() bool {
	return strings.HasPrefix(in.rec.Spec.Name, "crash-boots") || in.rec.Guest.Damaged
}

// boot starts the guest in this process. The caller holds in.mu.
func (in *instance) boot() {
	in.guest = newGuest(in)
	in.watchDeadline()
	if in.crashBoots() {
		in.h.spawn(func() { _ = in.crash("kernel panic - not syncing: no working init found") })
	}
	if in.rec.Guest.Bootstrap != nil && !strings.HasPrefix(in.rec.Spec.Name, "no-runner") {
		in.guest.startRunner()
	}
}

// resume continues the guest of an earlier process.
func (in *instance) resume() {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.rec.Power == backend.PowerRunning || in.rec.Power == backend.PowerSuspended {
		in.boot()
	}
}

// leave ends the guest in this process and keeps its state on disk.
func (in *instance) leave() {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.unwatchDeadline()
	if in.guest != nil {
		in.guest.stop()
		in.guest = nil
	}
	in.console.close()
	in.closeListener()
}

// running returns the guest if it can answer, otherwise nil.
func (in *instance) running() *guest {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.rec.Power == backend.PowerSuspended {
		return nil
	}
	return in.guest
}

// freeze changes a running instance to suspended, or a suspended one to
// running.
func (in *instance) freeze(from, to backend.PowerState) error {
	in.mu.Lock()
	defer in.mu.Unlock()
	switch in.rec.Power {
	case to:
		return nil
	case from:
		in.rec.Power, in.rec.OnDisk = to, false
		in.watchDeadline()
		return in.save()
	}
	return agentlab.Errorf(agentlab.CodeConflict, "sandbox %d is %s", in.rec.Spec.VMID, in.rec.Power)
}

// freezeToDisk suspends a running or suspended instance to disk.
func (in *instance) freezeToDisk() error {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.rec.Power != backend.PowerRunning && in.rec.Power != backend.PowerSuspended {
		return agentlab.Errorf(agentlab.CodeConflict, "sandbox %d is %s", in.rec.Spec.VMID, in.rec.Power)
	}
	in.unwatchDeadline()
	in.rec.Power, in.rec.OnDisk = backend.PowerSuspended, true
	return in.save()
}

// linger waits for the delay that the sandbox's name requests.
func (in *instance) linger(ctx context.Context) error {
	if !strings.HasSuffix(in.rec.Spec.Name, "-slow") {
		return nil
	}
	if err := sleep(ctx, time.Second); err != nil {
		return cancelled(err)
	}
	return nil
}

// shutdown asks the guest to power off and waits for that, up to grace.
func (in *instance) shutdown(ctx context.Context, grace time.Duration) error {
	if in.running() == nil || !strings.HasPrefix(in.rec.Spec.Name, "never-stops") {
		return nil // the guest powers off at once
	}
	if err := sleep(ctx, grace); err != nil {
		return cancelled(err)
	}
	return nil
}

// crash stops a running VM like a crash.
func (in *instance) crash(reason string) error {
	return in.powerOff(backend.PowerCrashed, reason, true)
}

// crashBy makes the VM crash, if it runs, and sets by, a field of in.rec.
func (in *instance) crashBy(reason string, by *bool) error {
	in.mu.Lock() // the crash is not seen without its field
	defer in.mu.Unlock()
	if err := in.powerOffLocked(backend.PowerCrashed, reason, true); err != nil {
		return err
	}
	*by = in.rec.Power == backend.PowerCrashed
	return in.save()
}

// cut stops the VM, if it runs, and leaves the instance in the given state.
func (in *instance) cut(power backend.PowerState, reason string) error {
	return in.powerOff(power, reason, false)
}

func (in *instance) powerOff(power backend.PowerState, reason string, onlyRunning bool) error {
	in.mu.Lock()
	defer in.mu.Unlock()
	return in.powerOffLocked(power, reason, onlyRunning)
}

// powerOffLocked is powerOff for a caller that holds in.mu.
func (in *instance) powerOffLocked(power backend.PowerState, reason string, onlyRunning bool) error {
	if in.rec.Power == power {
		in.rec.Expired, in.rec.Fork = false, nil // this caller stops it
		return in.save()
	}
	if onlyRunning && in.rec.OnDisk {
		return nil
	}
	if onlyRunning && in.rec.Power != backend.PowerRunning && in.rec.Power != backend.PowerSuspended {
		return nil
	}
	if in.rec.Power == backend.PowerPartial && power == backend.PowerStopped {
		return nil // a partial instance is not running
	}
	in.rec.Expired = false
	return in.off(power, reason)
}

// off ends the guest. The caller holds in.mu.
func (in *instance) off(power backend.PowerState, reason string) error {
	in.unwatchDeadline()
	if in.guest != nil {
		in.guest.stop()
		in.guest = nil
		in.console.line("[fake] power off " + reason)
	}
	in.rec.Lost = power == backend.PowerCrashed && in.rec.Forked && in.rec.Guest.Identity != in.rec.Spec.UID
	if in.rec.Lost {
		reason = "its saved memory is lost: " + reason
	}
	in.rec.Power, in.rec.Reason, in.rec.Guest, in.rec.Fork, in.rec.OnDisk = power, reason, guestRecord{}, nil, false
	return in.save()
}

// reboot restarts the guest without a change of the power state.
func (in *instance) reboot() error {
	if err := in.powerOff(backend.PowerStopped, "", true); err != nil {
		return err
	}
	return in.start()
}

// close closes the resources of an instance that is being removed.
func (in *instance) close() {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.console.close()
	in.closeListener()
}

func (in *instance) closeListener() {
	if in.listener != nil {
		in.listener.shut()
		in.listener = nil
	}
}

// listen returns a new listener of d, which gets the guest's connections from
// now on.
func (in *instance) listen(d *Driver) net.Listener {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.closeListener()
	in.listener = &listener{owner: d}
	return in.listener
}

func (in *instance) dropDriver(d *Driver) {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.listener != nil && in.listener.owner == d {
		in.closeListener()
	}
	if in.guest != nil {
		in.guest.conns.closeOf(d)
	}
}

// files changes or reads the files of the guest's disk.
func (in *instance) files(fn func(map[string]string)) {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.rec.Disk == nil {
		in.rec.Disk = map[string]string{}
	}
	fn(in.rec.Disk)
	if err := in.save(); err != nil {
		in.h.log.Error("fake guest", "vmid", in.rec.Spec.VMID, "err", err)
	}
}

// update changes and stores the guest's memory. It returns false if g no
// longer runs.
func (in *instance) update(g *guest, fn func(*guestRecord)) bool {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.guest != g {
		return false
	}
	fn(&in.rec.Guest)
	if err := in.save(); err != nil {
		in.h.log.Error("fake guest", "vmid", in.rec.Spec.VMID, "err", err)
	}
	return true
}

func (in *instance) memory(g *guest) (guestRecord, bool) {
	in.mu.Lock()
	defer in.mu.Unlock()
	return in.rec.Guest, in.guest == g
}
