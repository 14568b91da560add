package lima

import (
	"path/filepath"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend/registry"
	"github.com/agentlab-vm/agentlab/internal/config"
	"github.com/agentlab-vm/agentlab/internal/hostspace"
	"github.com/agentlab-vm/agentlab/internal/qemuvm"
)

// Backend is the backend of Lima's instances on this host.
var Backend = registry.Backend{Name: Name, Section: newSettings, Open: open, VM: openVM, Helper: Helper}

// Settings is the section lima of config.yaml.
type Settings struct {
	Limactl string `yaml:"limactl" doctor:"show" doc:"Path of limactl; empty looks for it in PATH."`
	Binary  string `yaml:"binary" doctor:"show" doc:"Path of the QEMU system emulator; empty looks for qemu-system-x86_64 in PATH."`
	Accel   string `yaml:"accel" doctor:"show" doc:"auto (KVM where it works, else emulation), kvm or tcg."`
}

func newSettings() config.Section { return &Settings{Accel: string(qemuvm.AccelAuto)} }

// Validate implements config.Section.
func (s *Settings) Validate(config.Config, bool) error {
	for field, path := range map[string]string{"lima.limactl": s.Limactl, "lima.binary": s.Binary} {
		if strings.Contains(path, "/") && !filepath.IsAbs(path) {
			return agentlab.Errorf(agentlab.CodeInvalid, "%q is neither a name to look for in PATH nor an absolute path", path).WithField(field)
		}
	}
	return config.OneOf("lima.accel", s.Accel, []string{string(qemuvm.AccelAuto), string(qemuvm.AccelKVM), string(qemuvm.AccelTCG)})
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
		StateDir: env.State, CacheDir: env.Cache, Runner: runner,
		Images:  env.ImageFiles,
		Limactl: s.Limactl, QEMU: s.Binary, Accel: qemuvm.Accel(s.Accel),
		PauseBelow: uint64(hostspace.PauseBelow(int64(env.Config.Limits.MinFreeMB) << 20)),
		Reserved:   env.Config.APIPorts(), UpstreamProxy: upstream, Logger: env.Log,
	})
	return registry.Opened{Driver: d}, err
}
