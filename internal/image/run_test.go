package image

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/test/guard"
)

func testOutput() (*output, *bytes.Buffer, *[]string) {
	var log bytes.Buffer
	var progress []string
	return &output{log: &log, progress: func(s string) { progress = append(progress, s) }}, &log, &progress
}

func TestRun(t *testing.T) {
	out, log, progress := testOutput()
	err := run(t.Context(), out, nil, "/bin/sh", "-c", `echo "I: step"; echo noise; echo "I: success in 3 seconds"; printf 'no end of line'; head -c 10000 /dev/zero | tr '\0' x`)
	if err != nil {
		t.Fatal(err)
	}
	if got := strings.Join(*progress, "|"); got != "step" {
		t.Errorf("progress is %q", got)
	}
	if !strings.Contains(log.String(), "noise\n") || !strings.Contains(log.String(), "no end of line") {
		t.Errorf("log is %q", log.String()[:100])
	}
}

func TestRunFails(t *testing.T) {
	for _, tc := range []struct{ script, want string }{
		{`echo "I: x"; echo "E: first reason"; echo "E: mmdebstrap failed to run"; exit 1`, "sh: first reason"},
		{`echo "npm error code ETARGET"; echo "npm error notarget No matching version found for codex@9"; exit 1`, "npm: notarget No matching version"},
		{`echo "last words"; exit 3`, "sh: exit status 3: last words"},
		{`exit 3`, "sh: exit status 3"},
	} {
		out, _, _ := testOutput()
		if err := run(t.Context(), out, nil, "/bin/sh", "-c", tc.script); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %v, want %q", tc.script, err, tc.want)
		}
	}
	out, _, _ := testOutput()
	if err := run(t.Context(), out, nil, "/nonexistent/program"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a program that is not there: %v", err)
	}
}

// Cancelling ends what a command started too, also what left its group.
func TestRunIsCancelled(t *testing.T) {
	if err := checkNamespaces(t.Context()); err != nil {
		t.Skipf("no namespaces here: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	sleep := fmt.Sprintf("%d.78", 100_000+os.Getpid())
	out := &output{log: io.Discard, progress: func(string) { cancel() }}
	err := run(ctx, out, os.Environ(), isolated("sh", "-c", "setsid sleep "+sleep+" & echo 'I: up'; sleep "+sleep)...)
	if !errors.Is(err, context.Canceled) {
		t.Errorf("error is %v", err)
	}
	guard.Until(t, "its children are dead", func() bool { return !running(t, sleep) })
}

func TestClassify(t *testing.T) {
	if err := classify("step", nil, "log"); err != nil {
		t.Errorf("no error becomes %v", err)
	}
	ours := agentlab.Errorf(agentlab.CodeLimit, "ours")
	for _, tc := range []struct {
		err  error
		code agentlab.Code
		hint string
	}{
		{commandSaid("E: Unable to locate package gitt"), agentlab.CodeInvalid, "packages of the recipe"},
		{commandSaid("cp: error writing 'x': No space left on device"), agentlab.CodeNoSpace, "image rm"},
		{commandSaid("E: Failed to fetch http://m/  Could not connect to m:80"), agentlab.CodeUnavailable, "proxy"},
		{commandSaid("W: GPG error: NO_PUBKEY 0E98404D386FA1D9"), agentlab.CodeDenied, "keyring"},
		{commandSaid("npm error code ETARGET"), agentlab.CodeInvalid, "npm packages"},
		{commandSaid("npm error code ENOTFOUND"), agentlab.CodeUnavailable, "npm"},
		{commandSaid("something else"), agentlab.CodeInternal, "the.log"},
		{fmt.Errorf("write: %w", unix.ENOSPC), agentlab.CodeNoSpace, "image rm"},
		{errors.New("plain"), agentlab.CodeInternal, ""},
		{ours, agentlab.CodeLimit, ""},
	} {
		err := classify("step", tc.err, "the.log")
		if agentlab.CodeOf(err) != tc.code || !strings.Contains(agentlab.HintOf(err), tc.hint) {
			t.Errorf("%v becomes %v (%s), hint %q", tc.err, err, agentlab.CodeOf(err), agentlab.HintOf(err))
		}
	}
	if err := classify("step", context.Canceled, ""); !errors.Is(err, context.Canceled) || agentlab.CodeOf(err) != agentlab.CodeInternal {
		t.Errorf("the end of the caller's context becomes %v", err)
	}
}

func commandSaid(lines ...string) error {
	return &commandError{name: "x", err: errors.New("exit status 1"), tail: lines}
}

// Untrusted programs print as much as they like.
func TestOutputIsBounded(t *testing.T) {
	out, log, _ := testOutput()
	line := strings.Repeat("x", 4095)
	for range maxLog/len(line) + 100 {
		out.line(line)
	}
	if log.Len() > maxLog+4096 || !strings.HasSuffix(log.String(), "[the log ends here: it has 64 MB]\n") {
		t.Errorf("the log has %d bytes", log.Len())
	}
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(file, 1<<30); err != nil {
		t.Fatal(err)
	}
	if n := len(readTrimmed(file)); n > maxRead {
		t.Errorf("%d bytes are read", n)
	}
}
