package fake

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

// Config is the configuration of a Host. The zero value is a Host in memory
// whose guests answer at once.
type Config struct {
	Name      string           // of the driver; default "fake"
	Dir       string           // directory of the instances; "" keeps them in memory
	BootDelay time.Duration    // from Start until guest control answers
	Clock     func() time.Time // default time.Now; pauses use the time package
	Logger    *slog.Logger     // default: discards
	// They remove the capabilities of these names.
	NoForks, NoKeptSnapshots, NoVolumeHotplug, NoAttachedVolumeSnapshots, NoNested bool
	// Programs are further programs of guests, by name. They get the UID of the volume that
	// the guest has, "" for none.
	Programs map[string]Program
	// AnySpec makes Create return a sandbox that exists with another specification.
	AnySpec bool
}

// Program is a program of guests. It returns its exit code.
type Program func(volume string, args []string, in io.Reader, out, errOut io.Writer) int

// Host is the machine on which the fake's VMs run.
type Host struct {
	cfg     Config
	log     *slog.Logger
	control *http.Server
	faults  faults
	wg      sync.WaitGroup // goroutines of guests

	deadlines deadlines // its lock is taken after those of instances

	volMu sync.Mutex // guards store; taken before mu and those of instances
	store store

	mu        sync.Mutex
	instances map[string]*instance // by UID
	snapshots map[string]*snapshot // by UID
	foreign   map[int]bool         // numbers taken by foreign objects
	templates map[string]backend.Template
	setup     string // of SetSetup
	closed    bool
}

// NewHost returns a Host with the instances in Config.Dir. VMs that were
// running continue.
func NewHost(cfg Config) (*Host, error) {
	cfg.Name = cmp.Or(cfg.Name, "fake")
	if cfg.Clock == nil {
		cfg.Clock = time.Now
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	h := &Host{cfg: cfg, log: cfg.Logger, control: newControlServer()}
	h.instances, h.snapshots, h.foreign, h.templates = map[string]*instance{}, map[string]*snapshot{}, map[int]bool{}, map[string]backend.Template{}
	h.store = store{volumes: map[string]*volume{}, saved: map[string]*savedVolume{}, foreign: map[string]bool{}}
	if cfg.Dir == "" {
		return h, nil
	}
	if err := os.MkdirAll(filepath.Dir(h.snapshotFile("")), 0o700); err != nil {
		return nil, agentlab.Errorf(agentlab.CodeUnavailable, "the state directory of the fake backend: %w", err)
	}
	return h, h.load()
}

func (h *Host) load() error {
	err := readAll(filepath.Join(h.cfg.Dir, "*.json"), func(r savedRecord) {
		in := h.newInstance(r.record)
		in.console.restore(r.Console)
		h.instances[r.Spec.UID] = in
	})
	if err == nil {
		err = readAll(h.snapshotFile("*"), func(s snapshot) { h.snapshots[s.UID] = &s })
	}
	if err == nil {
		err = readAll(filepath.Join(h.cfg.Dir, fileTemplates), func(all map[string]backend.Template) { h.templates = all })
	}
	if err == nil {
		err = h.loadVolumes()
	}
	if err != nil {
		return err
	}
	for _, in := range h.instances {
		in.resume()
	}
	return nil
}

// readAll reads all files that match a pattern.
func readAll[T any](pattern string, take func(T)) error {
	files, err := filepath.Glob(pattern)
	if err != nil {
		return err
	}
	for _, f := range files {
		data, err := os.ReadFile(f)
		if err != nil {
			return agentlab.Errorf(agentlab.CodeUnavailable, "read %s: %w", f, err)
		}
		var v T
		if err := json.Unmarshal(data, &v); err != nil {
			return agentlab.Errorf(agentlab.CodeInternal, "%s: %w", f, err)
		}
		take(v)
	}
	return nil
}

// Close ends every guest in this process. With Config.Dir the next Host
// continues them.
func (h *Host) Close() error {
	h.mu.Lock()
	h.closed = true
	all := h.all()
	h.mu.Unlock()
	for _, in := range all {
		in.leave()
	}
	h.deadlines.stop()
	h.wg.Wait()
	return h.control.Close()
}

// PutForeign takes a number for an object without AgentLab's mark.
func (h *Host) PutForeign(vmid int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.foreign[vmid] = true
}

// Foreign reports whether the object of PutForeign still exists.
func (h *Host) Foreign(vmid int) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.foreign[vmid]
}

// CrashVM makes a running VM crash.
func (h *Host) CrashVM(ref backend.Ref, reason string) error {
	in, err := h.find(ref)
	if err != nil {
		return err
	}
	return in.crash(reason)
}

// Restart simulates a restart of the host: all running VMs stop.
func (h *Host) Restart() error {
	for _, in := range h.all() {
		if err := in.crashBy("the host was restarted", &in.rec.HostRestarted); err != nil {
			return err
		}
	}
	return nil
}

// RebootVM makes the guest of a running VM reboot, which ends the VM.
func (h *Host) RebootVM(ref backend.Ref) error {
	in, err := h.find(ref)
	if err != nil {
		return err
	}
	return in.crashBy("the guest rebooted itself", &in.rec.GuestRebooted)
}

// PauseVM makes the driver report that the host has paused the guest of a
// running VM; "" ends the pause. The guest itself keeps running.
func (h *Host) PauseVM(ref backend.Ref, why string) error {
	in, err := h.find(ref)
	if err != nil {
		return err
	}
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.rec.Power != backend.PowerRunning {
		return agentlab.Errorf(agentlab.CodeConflict, "the VM is %s", in.rec.Power)
	}
	in.rec.Reason = why
	return nil
}

// RemoveBehindBack deletes an instance without the driver, as an administrator
// could.
func (h *Host) RemoveBehindBack(ref backend.Ref) error {
	in, err := h.find(ref)
	if err != nil {
		return err
	}
	return errors.Join(in.cut(backend.PowerStopped, ""), h.remove(in))
}

// claim returns the existing instance of spec, or creates a partial one.
func (h *Host) claim(spec backend.Spec) (*instance, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.foreign[spec.VMID] {
		return nil, foreign(spec.VMID)
	}
	if in := h.instances[spec.UID]; in != nil {
		if !h.cfg.AnySpec && !sameMachine(in.rec.Spec, spec) {
			return nil, agentlab.Errorf(agentlab.CodeExists, "sandbox %d exists with another specification", spec.VMID)
		}
		return in, nil
	}
	in := h.newInstance(record{Spec: spec, Power: backend.PowerPartial, Reason: "its creation was interrupted"})
	if err := in.save(); err != nil {
		return nil, err
	}
	h.instances[spec.UID] = in
	return in, nil
}

// sameMachine reports whether two, as they are stored, differ at most in their name,
// their network, and the place of what they are created from.
func sameMachine(a, b backend.Spec) bool {
	var text [2][]byte
	for i, s := range []backend.Spec{a, b} {
		s.Name, s.Network = "", agentlab.Network{}
		if s.From != nil {
			s.From = &backend.SnapshotRef{UID: s.From.UID, Of: backend.Ref{UID: s.From.Of.UID}}
		}
		text[i], _ = json.Marshal(s) // it can be stored
	}
	return bytes.Equal(text[0], text[1])
}

// taken returns the numbers from first to last that are in use.
func (h *Host) taken(first, last int) []int {
	h.mu.Lock()
	defer h.mu.Unlock()
	var out []int
	add := func(n int) {
		if n >= first && n <= last {
			out = append(out, n)
		}
	}
	for n := range h.foreign {
		add(n)
	}
	for _, in := range h.instances {
		add(in.rec.Spec.VMID)
	}
	slices.Sort(out)
	return slices.Compact(out)
}

func (h *Host) newInstance(r record) *instance { return &instance{h: h, rec: r} }

// find returns the instance that ref identifies.
func (h *Host) find(ref backend.Ref) (*instance, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	in := h.instances[ref.UID]
	if in == nil {
		return nil, notFound(ref)
	}
	return in, nil
}

func (h *Host) remove(in *instance) error {
	in.close()
	if err := h.detachAll(in.rec.Spec.UID); err != nil {
		return err
	}
	if f := h.file(in.rec.Spec); f != "" {
		if err := os.Remove(f); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return agentlab.Errorf(agentlab.CodeUnavailable, "remove an instance: %w", err)
		}
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.instances[in.rec.Spec.UID] == in {
		delete(h.instances, in.rec.Spec.UID)
	}
	return nil
}

func (h *Host) file(spec backend.Spec) string {
	if h.cfg.Dir == "" {
		return ""
	}
	return filepath.Join(h.cfg.Dir, fmt.Sprintf("%d-%s.json", spec.VMID, strings.ReplaceAll(spec.UID, "/", "_")))
}

// all returns every instance by number. The caller holds h.mu.
func (h *Host) all() []*instance {
	out := make([]*instance, 0, len(h.instances))
	for _, in := range h.instances {
		out = append(out, in)
	}
	slices.SortFunc(out, func(a, b *instance) int { return cmp.Compare(a.rec.Spec.VMID, b.rec.Spec.VMID) })
	return out
}

func (h *Host) list() []backend.Instance {
	h.mu.Lock()
	all := h.all()
	h.mu.Unlock()
	out := make([]backend.Instance, len(all))
	for i, in := range all {
		out[i] = in.view()
	}
	return out
}

func (h *Host) dropListeners(d *Driver) {
	h.mu.Lock()
	all := h.all()
	h.mu.Unlock()
	for _, in := range all {
		in.dropDriver(d)
	}
}

// spawn runs fn in a goroutine that Close waits for; after Close it does
// nothing.
func (h *Host) spawn(fn func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.closed {
		h.wg.Go(fn)
	}
}
