package qemu

import (
	"path/filepath"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend/registry"
	"github.com/agentlab-vm/agentlab/internal/config"
	"github.com/agentlab-vm/agentlab/internal/hostspace"
	"github.com/agentlab-vm/agentlab/internal/qemuvm"
)

// Backend is the backend of virtual machines on this host.
var Backend = registry.Backend{Name: Name, Section: newSettings, Options: profileOptions, Open: open, VM: openVM}

// Settings is the section qemu of config.yaml.
type Settings struct {
	Binary string `yaml:"binary" doctor:"show" doc:"Path of the QEMU system emulator; empty looks for the one of this machine's architecture in PATH."`
	Accel  string `yaml:"accel" doctor:"show" doc:"auto (KVM where it works, else emulation), kvm or tcg."`

	Nested bool `yaml:"nested" doc:"Permit profiles to provide hardware virtualization to guests (resources.nested). With false no sandbox that is started from now on has it."`

	TemplateCacheGB int `yaml:"template_cache_gb" doc:"Space for templates, in GiB: booted guests from which sandboxes start without a boot. The least recently used are removed. With 0 every sandbox boots."`
}

func newSettings() config.Section {
	return &Settings{Accel: string(qemuvm.AccelAuto), Nested: true, TemplateCacheGB: 4}
}

// Validate implements config.Section.
func (s *Settings) Validate(config.Config, bool) error {
	if strings.Contains(s.Binary, "/") && !filepath.IsAbs(s.Binary) {
		return agentlab.Errorf(agentlab.CodeInvalid, "%q is neither a name to look for in PATH nor an absolute path", s.Binary).WithField("qemu.binary")
	}
	if s.TemplateCacheGB < 0 || s.TemplateCacheGB > 1<<20 {
		return agentlab.Errorf(agentlab.CodeInvalid, "%d is not between 0 and %d", s.TemplateCacheGB, 1<<20).WithField("qemu.template_cache_gb")
	}
	return config.OneOf("qemu.accel", s.Accel, []string{string(qemuvm.AccelAuto), string(qemuvm.AccelKVM), string(qemuvm.AccelTCG)})
}

func open(env registry.Env) (registry.Opened, error) {
	s := env.Section.(*Settings)
	runner, err := config.FindProgram("agent-runner")
	if err != nil {
		return registry.Opened{}, err
	}
	upstream, err := registry.UpstreamProxy(env.Config)
	if err != nil {
		return registry.Opened{}, err
	}
	d, err := New(Config{
		StateDir:   env.State,
		CacheDir:   env.Cache,
		Runner:     runner,
		Images:     env.ImageFiles,
		PauseBelow: uint64(hostspace.PauseBelow(int64(env.Config.Limits.MinFreeMB) << 20)),
		Accel:      qemuvm.Accel(s.Accel),
		NoNested:   !s.Nested,

		TemplateBytes: int64(s.TemplateCacheGB) << 30,

		QEMU:     s.Binary,
		Reserved: env.Config.APIPorts(),
		Logger:   env.Log,

		UpstreamProxy: upstream,
	})
	if err != nil {
		return registry.Opened{}, err
	}
	return registry.Opened{Driver: d}, nil
}
