// Package fleet has the backends of a daemon, by the names that rows have. It is the only
// place that asks a driver for its groups of methods.
package fleet

import (
	"context"
	"errors"
	"net"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

// Backend is one backend: its driver, and the groups of methods that the driver supports;
// a group that is nil is not supported.
type Backend struct {
	backend.Driver
	backend.Groups
	Images  Images // of its sandboxes
	name    string
	missing error
	drained atomic.Bool
	watch   *watch // nil if the daemon does not have it
}

// Images are the images that sandboxes boot.
type Images interface {
	// Check returns code not_found if there is no image of that name and none
	// can be built.
	Check(name string) error
	// Ensure builds the image if it is missing and returns its reference
	// name@digest. progress gets one line at a time.
	Ensure(ctx context.Context, name string, progress func(string)) (ref string, err error)
	// Current returns the reference that Ensure would return, and builds nothing:
	// not_found if the image must be built first.
	Current(ctx context.Context, name string) (ref string, err error)
}

// Of returns the backend with that name, driver and images. The calls of the driver are
// bounded, and are refused while the backend does not answer.
func Of(name string, d backend.Driver, images Images) *Backend {
	w := &watch{name: name}
	b := &Backend{Driver: driver{d, w}, Images: images, name: name, watch: w}
	g := backend.GroupsOf(d)
	if g.Power != nil {
		b.Power = power{g.Power, w}
	}
	if g.Net != nil {
		b.Net = network{g.Net, w}
	}
	if g.Console != nil {
		b.Console = console{g.Console, w}
	}
	if g.Snapshots != nil {
		b.Snapshots = snapshots{g.Snapshots, w}
	}
	if g.Templates != nil {
		b.Templates = templates{g.Templates, w}
	}
	if g.Volumes != nil {
		b.Volumes = volumes{g.Volumes, w}
	}
	if g.Host != nil {
		b.Host = host{g.Host, w}
	}
	return b
}

// Name returns the name of the backend, which the rows of its sandboxes have.
func (b *Backend) Name() string { return b.name }

// Can returns the capabilities of the driver.
func (b *Backend) Can() backend.Capabilities { return b.Info().Capabilities }

// Missing returns nil if the daemon has this backend. Otherwise the error has code conflict
// and a hint, and all methods of the backend return it.
func (b *Backend) Missing() error { return b.missing }

// SetDrained drains the backend, or ends that: while it is drained, nothing new is made on it.
func (b *Backend) SetDrained(drained bool) { b.drained.Store(drained) }

// Drained reports whether the backend is drained.
func (b *Backend) Drained() bool { return b.drained.Load() }

// Admits returns nil if sandboxes and workspaces may be made on the backend. While it is
// drained, the error has code busy.
func (b *Backend) Admits() error {
	if !b.Drained() {
		return b.missing
	}
	return agentlab.Errorf(agentlab.CodeBusy, "backend %s is drained: nothing new is made on it", b.name).
		WithHint("end that with 'agentlab backend undrain %s', or use another backend: --backend NAME", b.name)
}

// Without returns the error for a request that the backend does not support, such as
// "has no workspaces".
func (b *Backend) Without(what string) *agentlab.Error {
	return agentlab.Errorf(agentlab.CodeUnsupported, "backend %s %s", b.name, what)
}

// NeedSnapshots returns the group Snapshots, or an error with code unsupported.
func (b *Backend) NeedSnapshots() (backend.Snapshots, error) {
	if b.Snapshots == nil {
		return nil, b.lacks("has no snapshots")
	}
	return b.Snapshots, nil
}

// NeedVolumes returns the group Volumes, or an error with code unsupported.
func (b *Backend) NeedVolumes() (backend.Volumes, error) {
	if b.Volumes == nil {
		return nil, b.lacks("has no workspaces")
	}
	return b.Volumes, nil
}

// NeedTemplates returns the group Templates, or an error with code unsupported.
func (b *Backend) NeedTemplates() (backend.Templates, error) {
	if b.Templates == nil {
		if b.missing != nil {
			return nil, b.missing
		}
		return nil, b.Without("does not start sandboxes from templates").
			WithHint("no command is needed: its sandboxes start as fast as this backend can")
	}
	return b.Templates, nil
}

func (b *Backend) lacks(what string) error {
	if b.missing != nil {
		return b.missing
	}
	return b.Without(what)
}

// Instance is a VM, and the name of its backend.
type Instance struct {
	backend.Instance
	Backend string
}

// Template is a template, and the name of its backend.
type Template struct {
	backend.Template
	Backend string
}

// Fleet has the backends of a daemon.
type Fleet struct {
	list []*Backend
}

// New returns a fleet. The first backend is the default; there is at least one.
func New(list ...*Backend) *Fleet { return &Fleet{list: list} }

// Single returns a fleet with one driver, under its own name.
func Single(d backend.Driver, images Images) *Fleet { return New(Of(d.Info().Name, d, images)) }

// Default returns the backend of new sandboxes and workspaces.
func (f *Fleet) Default() *Backend { return f.list[0] }

// Observe sets what observes the calls of all backends, and returns f. Call it before the
// first of them.
func (f *Fleet) Observe(o Observer) *Fleet {
	o.Backends(f.Names())
	for _, b := range f.list {
		b.watch.observer = o
	}
	return f
}

// Names returns the names of all backends, the default first.
func (f *Fleet) Names() (names []string) {
	for _, b := range f.list {
		names = append(names, b.name)
	}
	return names
}

// All returns all backends, the default first.
func (f *Fleet) All() []*Backend { return slices.Clone(f.list) }

// Of returns the backend with that name. If the daemon does not have it, the methods of the
// result return an error (Backend.Missing): a VM on it may be running, and nothing may be
// concluded about it.
func (f *Fleet) Of(name string) *Backend {
	for _, b := range f.list {
		if b.name == name {
			return b
		}
	}
	err := agentlab.Errorf(agentlab.CodeConflict, "it belongs to backend %s, and the daemon has only %s", name, strings.Join(f.Names(), ", ")).
		WithHint("add backend %s to config.yaml and restart agentlabd", name)
	return &Backend{Driver: absent{name, err}, Images: noImages{err}, name: name, missing: err}
}

// Choose returns the backend with the name in a request, for "" the default. The error has
// code invalid, and the names of all backends.
func (f *Fleet) Choose(name string) (*Backend, error) {
	if name == "" {
		return f.Default(), nil
	}
	if b := f.Of(name); b.missing == nil {
		return b, nil
	}
	return nil, agentlab.Errorf(agentlab.CodeInvalid, "there is no backend %q", name).WithField("backend").
		WithHint("use one of %s, or add it to config.yaml and restart agentlabd", strings.Join(f.Names(), ", "))
}

// Supported adds to an error with code unsupported, of the backend with the name not, the
// names of the other backends for which supports returns nil.
func (f *Fleet) Supported(err error, not string, supports func(*Backend) error) error {
	e, ok := errors.AsType[*agentlab.Error](err)
	if !ok || e.Code != agentlab.CodeUnsupported {
		return err
	}
	var names []string
	for _, b := range f.list {
		if b.name != not && supports(b) == nil {
			names = append(names, b.name)
		}
	}
	if len(names) == 0 {
		return err
	}
	hint := "use a backend that supports it: --backend " + strings.Join(names, " or ")
	if e.Hint != "" {
		hint = e.Hint + "; or " + hint
	}
	return agentlab.Errorf(e.Code, "%w", err).WithField(e.Field).WithHint("%s", hint)
}

// Info describes the driver of the backend with that name.
func (f *Fleet) Info(name string) backend.Info { return f.Of(name).Info() }

// Answering reports for each backend, by name, whether it answers, as far as is known.
func (f *Fleet) Answering() map[string]bool {
	out := map[string]bool{}
	for _, b := range f.list {
		out[b.name] = b.Down() == nil
	}
	return out
}

// Infos describe the drivers of all backends, the default first.
func (f *Fleet) Infos() (out []backend.Info) {
	for _, b := range f.list {
		out = append(out, b.Info())
	}
	return out
}

// Logs reports whether the backend with that name has egress logs.
func (f *Fleet) Logs(name string) bool { return f.Of(name).Net != nil }

// EgressLog reads the egress log of a sandbox on the backend with that name; see backend.Net.
func (f *Fleet) EgressLog(ctx context.Context, name string, ref backend.Ref, after int64, limit int) ([]agentlab.EgressRecord, error) {
	b := f.Of(name)
	if b.Net == nil {
		return nil, b.lacks("has no egress log")
	}
	return b.Net.EgressLog(ctx, ref, after, limit)
}

// RecordEgress appends a record to the egress log of a sandbox. The error has code
// unsupported if the backend has no such log.
func (f *Fleet) RecordEgress(ctx context.Context, sb agentlab.Sandbox, r agentlab.EgressRecord) error {
	b := f.Of(sb.Backend)
	if b.Net == nil {
		return b.lacks("has no egress log")
	}
	return b.Net.RecordEgress(ctx, backend.RefOf(sb), r)
}

// absent is the driver of a backend that the daemon does not have.
type absent struct {
	name string
	err  error
}

func (a absent) Info() backend.Info                                     { return backend.Info{Name: a.name} }
func (a absent) Check(context.Context) []backend.Finding                { return nil }
func (a absent) Validate(backend.Spec) error                            { return a.err }
func (a absent) Create(context.Context, backend.Spec) error             { return a.err }
func (a absent) Start(context.Context, backend.Ref) error               { return a.err }
func (a absent) Stop(context.Context, backend.Ref, time.Duration) error { return a.err }
func (a absent) Destroy(context.Context, backend.Ref) error             { return a.err }
func (a absent) Inspect(context.Context, backend.Ref) (backend.Instance, error) {
	return backend.Instance{}, a.err
}
func (a absent) List(context.Context) ([]backend.Instance, error)                 { return nil, a.err }
func (a absent) DialControl(context.Context, backend.Ref) (net.Conn, error)       { return nil, a.err }
func (a absent) DialGuest(context.Context, backend.Ref, uint16) (net.Conn, error) { return nil, a.err }
func (a absent) ListenGuest(context.Context, backend.Ref) (net.Listener, error)   { return nil, a.err }
func (a absent) Close() error                                                     { return nil }

// noImages are the images of a backend that the daemon does not have.
type noImages struct{ err error }

func (n noImages) Check(string) error                                           { return n.err }
func (n noImages) Ensure(context.Context, string, func(string)) (string, error) { return "", n.err }
func (n noImages) Current(context.Context, string) (string, error)              { return "", n.err }
