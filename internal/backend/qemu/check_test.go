package qemu

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/qemuvm"
	"github.com/agentlab-vm/agentlab/internal/vmdir"
)

// TestProbeDeadline runs the real probe: it ends in time whatever KVM does
// here, and leaves no process.
func TestProbeDeadline(t *testing.T) {
	f := fixed{StateDir: t.TempDir(), CacheDir: t.TempDir(), Runner: "/nonexistent"}
	d, err := f.open()
	if err != nil {
		t.Fatal(err)
	}
	if kvm, err := os.OpenFile("/dev/kvm", os.O_RDWR, 0); err != nil {
		t.Skipf("skipped: %s", err)
	} else if err := kvm.Close(); err != nil {
		t.Error(err)
	}
	v, err := d.host.KVM(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("KVM works: %v (%s)", v.Works, v.Why)
	cmdlines, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, path := range cmdlines {
		if b, _ := os.ReadFile(path); bytes.Contains(b, []byte(f.CacheDir)) {
			t.Errorf("%s is left: %q", path, b)
		}
	}
}

// script makes a program of a few lines.
func script(t *testing.T, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte("#!/bin/sh\n"+text+"\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestCheck(t *testing.T) {
	good, img := script(t, "qemu", "echo QEMU emulator version 9.1.0 '(Debian)'"), script(t, "qemu-img", "exit 0")
	for _, test := range []struct {
		name   string
		change func(*Config)
		arch   string
		want   map[string]backend.Level
		code   agentlab.Code
	}{
		{"good", func(*Config) {}, "amd64", map[string]backend.Level{"arch": "ok", "qemu": "ok", "qemu-img": "ok", "agent-runner": "ok", "kvm": "warn"}, ""},
		{"no QEMU", func(c *Config) { c.QEMU = "/nonexistent/qemu" }, "amd64", map[string]backend.Level{"qemu": "error"}, agentlab.CodeUnavailable},
		{"old QEMU", func(c *Config) { c.QEMU = script(t, "old", "echo QEMU emulator version 6.2.0") }, "amd64", map[string]backend.Level{"qemu": "error"}, agentlab.CodeUnavailable},
		{"not QEMU", func(c *Config) { c.QEMU = script(t, "not", "echo hello") }, "amd64", map[string]backend.Level{"qemu": "error"}, agentlab.CodeUnavailable},
		{"no qemu-img", func(c *Config) { c.QEMUImg = "/nonexistent/qemu-img" }, "amd64", map[string]backend.Level{"qemu-img": "error"}, agentlab.CodeUnavailable},
		{"no runner", func(c *Config) { c.Runner = "/nonexistent" }, "amd64", map[string]backend.Level{"agent-runner": "error"}, ""},
		{"arm", func(*Config) {}, "arm64", map[string]backend.Level{"arch": "error"}, agentlab.CodeUnsupported},
	} {
		t.Run(test.name, func(t *testing.T) {
			cfg := Config{
				StateDir: t.TempDir(), CacheDir: t.TempDir(), Runner: good, QEMU: good, QEMUImg: img, Accel: qemuvm.AccelTCG,
				Images: func(context.Context, string) (vmdir.ImageFiles, error) {
					return vmdir.ImageFiles{}, agentlab.Errorf(agentlab.CodeNotFound, "no image")
				},
			}
			test.change(&cfg)
			d, err := New(cfg)
			if err != nil {
				t.Fatal(err)
			}
			rehost(d, func(h *qemuvm.HostConfig) { h.Arch = test.arch })
			found := map[string]backend.Finding{}
			for _, f := range d.Check(t.Context()) {
				found[f.Name] = f
				if (f.Level == backend.LevelOK) != (f.Remedy == "") {
					t.Errorf("%+v", f)
				}
			}
			for name, level := range test.want {
				if found[name].Level != level {
					t.Errorf("%s: %+v, want %s", name, found[name], level)
				}
			}
			err = d.host.Ready(t.Context())
			if agentlab.CodeOf(err) != test.code || (err != nil && agentlab.HintOf(err) == "") {
				t.Errorf("ready: %v, want code %q", err, test.code)
			}
			if test.code == "" {
				return
			}
			sp := fixed{Image: vmdir.ImageFiles{Ref: "base@0"}}.spec(1)
			if err := d.Create(t.Context(), sp); agentlab.CodeOf(err) != test.code {
				t.Errorf("Create: %v, want code %s", err, test.code)
			}
			if left, _ := os.ReadDir(d.sandboxes()); len(left) != 0 {
				t.Errorf("a refused Create left %v", left)
			}
		})
	}
}
