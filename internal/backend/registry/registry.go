// Package registry describes a backend to the daemon: its name, its section of
// config.yaml, and how its driver is opened. Package backends lists the
// backends of the programs.
package registry

import (
	"context"
	"log/slog"
	"slices"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/config"
	"github.com/agentlab-vm/agentlab/internal/hostnet"
	"github.com/agentlab-vm/agentlab/internal/image"
	"github.com/agentlab-vm/agentlab/internal/supervisor"
)

// Backend is one backend.
type Backend struct {
	Name    string                // value of the key backend, and key of its section
	Section func() config.Section // returns the defaults of its section; nil means that it has none
	Options []backend.Option      // Info.Options of its driver
	Open    func(Env) (Opened, error)
	VM      supervisor.Kind // opens a supervised VM of its driver; nil means that it has none
}

// Env has the parameters for opening a driver.
type Env struct {
	Config  config.Config
	Section config.Section // what Section returned, with the values of config.yaml
	Paths   config.Paths
	Images  *image.Store
	Network *hostnet.Local // of this host; a driver that uses it claims it
	Getenv  func(string) string
	Log     *slog.Logger
}

// Opened is an open backend.
type Opened struct {
	Driver backend.Driver
	Images Images // images of sandboxes; nil means Env.Images
}

// Images are the images that sandboxes boot.
type Images interface {
	// Check returns code not_found if there is no image of that name and none
	// can be built.
	Check(name string) error
	// Ensure builds the image if it is missing and returns its reference
	// name@digest. progress gets one line at a time.
	Ensure(ctx context.Context, name string, progress func(string)) (ref string, err error)
	// Current returns the reference that Ensure would return, and builds nothing.
	Current(ctx context.Context, name string) (ref string, err error)
}

// List is a list of backends. The first is the default.
type List []Backend

// Load reads the config.yaml at path, as config.Load does.
func (l List) Load(path string) (config.Config, error) { return config.Load(path, l.Known()...) }

// Known returns the backends for package config.
func (l List) Known() []config.Backend {
	var out []config.Backend
	for _, b := range l {
		out = append(out, config.Backend{Name: b.Name, Section: b.Section})
	}
	return out
}

// Options returns the profile keys that only some backends have, by the name of
// the backend.
func (l List) Options() map[string][]backend.Option {
	out := map[string][]backend.Option{}
	for _, b := range l {
		out[b.Name] = b.Options
	}
	return out
}

// Open opens the backend that the configuration names.
func (l List) Open(env Env) (Opened, error) {
	b, err := l.named(env.Config.Backend)
	if err != nil {
		return Opened{}, err
	}
	env.Section = env.Config.Section(b.Name)
	return b.Open(env)
}

// VM returns the Kind of a backend's supervised VMs; "" means the default
// backend.
func (l List) VM(name string) (supervisor.Kind, error) {
	if name == "" {
		name = l[0].Name
	}
	b, err := l.named(name)
	if err == nil && b.VM == nil {
		err = agentlab.Errorf(agentlab.CodeUnsupported, "the backend %q has no supervised VMs", name)
	}
	return b.VM, err
}

func (l List) named(name string) (Backend, error) {
	i := slices.IndexFunc(l, func(b Backend) bool { return b.Name == name })
	if i < 0 {
		return Backend{}, agentlab.Errorf(agentlab.CodeInvalid, "there is no backend %q", name).WithField("backend")
	}
	return l[i], nil
}
