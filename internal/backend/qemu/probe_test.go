package qemu

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/durable"
	"github.com/agentlab-vm/agentlab/test/guard"
)

// TestProbeKernel runs the probe's kernel where it is known to work.
func TestProbeKernel(t *testing.T) {
	kernel := filepath.Join(t.TempDir(), "kernel")
	if err := os.WriteFile(kernel, probeKernel(), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := runProbe(guard.Context(t), defaultQEMU, kernel, AccelTCG); err != nil {
		t.Fatal(err)
	}
	// A sum of other numbers must not pass.
	numbers := []byte{0xb9, 0x06, 0x2d, 0x31, 0x01} // mov $20000006, %ecx
	b := bytes.Replace(probeKernel(), numbers, []byte{0xb9, 0x07, 0x2d, 0x31, 0x01}, 1)
	if bytes.Equal(b, probeKernel()) {
		t.Fatal("the kernel does not count")
	}
	if err := os.WriteFile(kernel, b, 0o600); err != nil {
		t.Fatal(err)
	}
	short, cancel := context.WithTimeout(t.Context(), 3*time.Second)
	defer cancel()
	if err := runProbe(short, defaultQEMU, kernel, AccelTCG); err == nil {
		t.Error("a broken kernel passes")
	}
}

// TestProbeListing assembles the listing again.
func TestProbeListing(t *testing.T) {
	for _, tool := range []string{"as", "objcopy"} {
		if _, err := exec.LookPath(tool); err != nil || runtime.GOARCH != "amd64" {
			t.Skipf("skipped: this needs %s (binutils) for amd64", tool)
		}
	}
	dir := t.TempDir()
	for _, args := range [][]string{
		{"as", "--64", "-o", dir + "/k.o", "probekernel.asm.txt"},
		{"objcopy", "-O", "binary", "-j", ".text", dir + "/k.o", dir + "/k.bin"},
	} {
		if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%s: %v\n%s", args, err, out)
		}
	}
	b, err := os.ReadFile(dir + "/k.bin")
	if err != nil || hex.EncodeToString(b) != probeText {
		t.Errorf("the listing gives %x, %v", b, err)
	}
}

// TestVerdict counts how often the probe runs.
func TestVerdict(t *testing.T) {
	runs := 0
	var result error
	p := prober{
		dir: t.TempDir(), log: slog.New(slog.DiscardHandler), deadline: 100 * time.Millisecond,
		run: func(ctx context.Context, _, kernel string, a Accel) error {
			runs++
			if _, err := os.Stat(kernel); err != nil || a != AccelKVM {
				t.Error(kernel, a, err)
			}
			if errors.Is(result, context.DeadlineExceeded) {
				<-ctx.Done()
			}
			return result
		},
	}
	ask := func(key string, wantWorks bool, wantRuns int) verdict {
		t.Helper()
		v, err := p.verdict(t.Context(), "/qemu", key)
		if err != nil || v.Works != wantWorks || runs != wantRuns {
			t.Fatalf("%+v, %v after %d runs, want %v after %d", v, err, runs, wantWorks, wantRuns)
		}
		if !v.Works && (v.Why == "" || v.Remedy == "") {
			t.Errorf("a no without reason or remedy: %+v", v)
		}
		return v
	}
	ask("a", true, 1)
	ask("a", true, 1) // from the cache
	result = errors.New("no\x1b[2J")
	if v := ask("b", false, 2); strings.ContainsRune(v.Why, 0x1b) {
		t.Errorf("%q", v.Why)
	}
	ask("b", false, 2)
	if err := durable.ReplaceJSON(filepath.Join(p.dir, fileVerdict), verdict{Key: "b", Why: "x", Remedy: "x", Boot: "before"}, durable.None); err != nil {
		t.Fatal(err)
	}
	ask("b", false, 3) // a no of another start of the host
	result = context.DeadlineExceeded
	if v := ask("c", false, 4); !strings.Contains(v.Why, "100ms") {
		t.Errorf("%q", v.Why)
	}
	if err := os.WriteFile(filepath.Join(p.dir, fileVerdict), []byte("{half"), 0o600); err != nil {
		t.Fatal(err)
	}
	result = nil
	ask("c", true, 5) // a damaged cache
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := p.verdict(ctx, "/qemu", "d"); agentlab.CodeOf(err) != agentlab.CodeUnavailable {
		t.Errorf("cancelled: %v", err)
	}
	entries, _ := os.ReadDir(p.dir)
	if len(entries) != 2 {
		t.Errorf("probes left more than kernel and verdict: %v", entries)
	}
}

// TestProbeDeadline runs the real probe: it ends in time whatever KVM does
// here, and leaves no process.
func TestProbeDeadline(t *testing.T) {
	f := fixed{StateDir: t.TempDir(), CacheDir: t.TempDir(), Runner: "/nonexistent"}
	d, err := f.open()
	if err != nil {
		t.Fatal(err)
	}
	if v, bad := kvmAccess("/dev/kvm"); bad {
		t.Skipf("skipped: %s", v.Why)
	}
	v, err := d.host.kvm(t.Context())
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

func TestProbeHangs(t *testing.T) {
	marker := fmt.Sprintf("%d.%d", 3000+os.Getpid()%1000, time.Now().Nanosecond())
	qemu := script(t, "qemu", "exec sleep "+marker)
	p := prober{dir: t.TempDir(), log: slog.New(slog.DiscardHandler), deadline: 300 * time.Millisecond, run: runProbe}
	v, err := p.verdict(t.Context(), qemu, "k")
	if err != nil || v.Works {
		t.Errorf("%+v, %v", v, err)
	}
	cmdlines, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, path := range cmdlines {
		if b, _ := os.ReadFile(path); bytes.Contains(b, []byte(marker)) {
			t.Errorf("%s is left: %q", path, b)
		}
	}
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
				StateDir: t.TempDir(), CacheDir: t.TempDir(), Runner: good, QEMU: good, QEMUImg: img, Accel: AccelTCG,
				Images: func(context.Context, string) (ImageFiles, error) {
					return ImageFiles{}, agentlab.Errorf(agentlab.CodeNotFound, "no image")
				},
			}
			test.change(&cfg)
			d, err := New(cfg)
			if err != nil {
				t.Fatal(err)
			}
			d.host.arch = test.arch
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
			err = d.host.ready(t.Context())
			if agentlab.CodeOf(err) != test.code || (err != nil && agentlab.HintOf(err) == "") {
				t.Errorf("ready: %v, want code %q", err, test.code)
			}
			if test.code == "" {
				return
			}
			sp := fixed{Image: ImageFiles{Ref: "base@0"}}.spec(1)
			if err := d.Create(t.Context(), sp); agentlab.CodeOf(err) != test.code {
				t.Errorf("Create: %v, want code %s", err, test.code)
			}
			if left, _ := os.ReadDir(d.sandboxes()); len(left) != 0 {
				t.Errorf("a refused Create left %v", left)
			}
		})
	}
}

func TestTSC(t *testing.T) {
	at := time.Unix(100, 0)
	if got := tscRate(tscSample{1000, at}, tscSample{1000 + 26_000_000, at.Add(10 * time.Millisecond)}); got != 2_600_000 {
		t.Errorf("%d kHz", got)
	}
	for _, b := range []tscSample{{}, {500, at.Add(time.Second)}, {2000, at}} {
		if got := tscRate(tscSample{1000, at}, b); got != 0 {
			t.Errorf("%+v: %d kHz", b, got)
		}
	}
	for text, want := range map[string]bool{
		"processor : 0\nflags\t\t: fpu constant_tsc x nonstop_tsc\n": true,
		"flags : fpu constant_tsc\n":                                 false,
		"flags : notconstant_tsc nonstop_tscx\n":                     false,
		"":                                                           false,
	} {
		if got := tscIsFixed(text); got != want {
			t.Errorf("%q: %v", text, got)
		}
	}
	if runtime.GOARCH != "amd64" {
		return
	}
	h := newHost(Config{})
	a, _, err := h.tsc(t.Context())
	if err != nil || a < 500_000 || a > 10_000_000 {
		t.Fatalf("this host's TSC: %d kHz, %v", a, err)
	}
	b, _, err := newHost(Config{}).tsc(t.Context())
	if diff := float64(a-b) / float64(a); err != nil || diff > 1e-3 || diff < -1e-3 {
		t.Errorf("measured twice: %d and %d kHz, %v", a, b, err)
	}
}
