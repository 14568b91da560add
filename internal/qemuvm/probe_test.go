package qemuvm

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
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/durable"
	"github.com/agentlab-vm/agentlab/test/guard"
)

// TestProbeKernel runs the probe's kernel where it is known to work.
func TestProbeKernel(t *testing.T) {
	kernel := filepath.Join(t.TempDir(), "kernel")
	if err := os.WriteFile(kernel, probeKernel(), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := runProbe(guard.Context(t), DefaultQEMU, kernel, Machine{Accel: AccelTCG}.Args()); err != nil {
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
	if err := runProbe(short, DefaultQEMU, kernel, Machine{Accel: AccelTCG}.Args()); err == nil {
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
		run: func(ctx context.Context, _, kernel string, machine []string) error {
			runs++
			if _, err := os.Stat(kernel); err != nil || !slices.Equal(machine, Machine{Accel: AccelKVM}.Args()) {
				t.Error(kernel, machine, err)
			}
			if errors.Is(result, context.DeadlineExceeded) {
				<-ctx.Done()
			}
			return result
		},
	}
	ask := func(key string, wantWorks bool, wantRuns int) Verdict {
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
	if err := durable.ReplaceJSON(filepath.Join(p.dir, fileVerdict), Verdict{Key: "b", Why: "x", Remedy: "x", Boot: "before"}, durable.None); err != nil {
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
	h := NewHost(HostConfig{})
	a, _, err := h.TSC(t.Context())
	if err != nil || a < 500_000 || a > 10_000_000 {
		t.Fatalf("this host's TSC: %d kHz, %v", a, err)
	}
	b, _, err := NewHost(HostConfig{}).TSC(t.Context())
	if diff := float64(a-b) / float64(a); err != nil || diff > 1e-3 || diff < -1e-3 {
		t.Errorf("measured twice: %d and %d kHz, %v", a, b, err)
	}
}
