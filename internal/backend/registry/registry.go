// Package registry describes a backend to the daemon: its name, its section of
// config.yaml, and how its driver is opened. Package backends lists the
// backends of the programs.
package registry

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"slices"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/config"
	"github.com/agentlab-vm/agentlab/internal/egress/gate"
	"github.com/agentlab-vm/agentlab/internal/fleet"
	"github.com/agentlab-vm/agentlab/internal/hostnet"
	"github.com/agentlab-vm/agentlab/internal/image"
	"github.com/agentlab-vm/agentlab/internal/supervisor"
	"github.com/agentlab-vm/agentlab/internal/vmdir"
)

// Backend is one backend.
type Backend struct {
	Name    string                // value of the key backend, and key of its section
	Section func() config.Section // returns the defaults of its section; nil means that it has none
	Options []backend.Option      // Info.Options of its driver
	Open    func(Env) (Opened, error)
	VM      supervisor.Kind // opens a supervised VM of its driver; nil means that it has none
	// Helper is a program that other programs start for the driver ("agentlabd helper
	// NAME"), with their arguments; nil means that there is none.
	Helper func(args []string) error
}

// Env has the parameters for opening a driver.
type Env struct {
	Config  config.Config
	Section config.Section // what Section returned, with the values of config.yaml
	State   string         // directory of its state
	Cache   string         // directory of files that the driver can make again
	Images  *image.Store
	Network *hostnet.Local // of this host; a driver that uses it claims it
	Getenv  func(string) string
	Log     *slog.Logger
}

// ImageFiles returns the files of an image, for drivers with supervised VMs.
func (e Env) ImageFiles(ctx context.Context, ref string) (vmdir.ImageFiles, error) {
	img, err := e.Images.Resolve(ctx, ref)
	if err != nil {
		return vmdir.ImageFiles{}, err
	}
	return vmdir.ImageFiles{Ref: img.Ref(), RootDisk: img.RootDisk(), Kernel: img.Kernel(), Modules: img.Modules()}, nil
}

// Opened is an open backend.
type Opened struct {
	Driver backend.Driver
	Images fleet.Images // images of sandboxes; nil means Env.Images
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

// Open opens a backend of the configuration in env. The directories of one with the name of
// its driver are those of a daemon with one backend.
func (l List) Open(in config.Instance, paths config.Paths, env Env) (*fleet.Backend, error) {
	b, err := l.named(in.Driver)
	if err != nil {
		return nil, err
	}
	env.Section = in.Section
	env.State, env.Cache = paths.State, filepath.Join(paths.Cache, in.Driver)
	if !in.Own() {
		env.State, env.Cache = filepath.Join(paths.State, "backends", in.Name), filepath.Join(paths.Cache, "backends", in.Name)
		if err := os.MkdirAll(env.State, 0o700); err != nil {
			return nil, agentlab.Errorf(agentlab.CodeUnavailable, "cannot create the directory of backend %s: %w", in.Name, err)
		}
	}
	opened, err := b.Open(env)
	if err != nil {
		return nil, err
	}
	images := opened.Images
	if images == nil {
		images = image.Bootable{Store: env.Images}
	}
	return fleet.Of(in.Name, opened.Driver, images), nil
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

// Process runs a process of a driver: "vmm" and the directory of a VM is its supervisor,
// "helper" and the name of a backend is its helper.
func (l List) Process(ctx context.Context, verb string, args []string) error {
	if verb == "vmm" {
		return supervisor.Run(ctx, args[0], l.VM, supervisor.Options{})
	}
	b, err := l.named(args[0])
	if err == nil && b.Helper == nil {
		err = agentlab.Errorf(agentlab.CodeUnsupported, "the backend %q has no helper", args[0])
	}
	if err != nil {
		return err
	}
	return b.Helper(args[1:])
}

func (l List) named(name string) (Backend, error) {
	i := slices.IndexFunc(l, func(b Backend) bool { return b.Name == name })
	if i < 0 {
		return Backend{}, agentlab.Errorf(agentlab.CodeInvalid, "there is no backend %q", name).WithField("backend")
	}
	return l[i], nil
}

// UpstreamProxy returns the proxy that the configuration names, after it has
// read its files; nil means none.
func UpstreamProxy(c config.Config) (*gate.ProxyConfig, error) {
	if c.UpstreamProxy.URL == "" {
		return nil, nil
	}
	p := gate.ProxyConfig(c.UpstreamProxy)
	_, err := gate.NewProxyDialer(p)
	return &p, err
}
