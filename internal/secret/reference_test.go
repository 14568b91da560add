package secret

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"syscall"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/test/guard"
)

// script makes a program of a shell script and puts its folder first into the
// PATH.
func script(t *testing.T, name, text string) {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/sh\n"+text), 0o700); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
}

func TestReferences(t *testing.T) {
	// A strict stand-in for 1Password's program, which needs an account.
	script(t, "op", `[ "$#" = 3 ] && [ "$1" = read ] && [ "$2" = --no-newline ] && [ "$3" = "op://agents/open ai/key" ] || exit 64
printf %s value-of-op`)
	t.Setenv("AGENTLAB_TEST_VALUE", "value-of-env")
	file := filepath.Join(t.TempDir(), "value")
	if err := os.WriteFile(file, []byte("value-of-file\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	v := vault(t)
	set(t, v, "b", "env.LITERAL", "cmd:echo no")
	for key, ref := range map[string]string{
		"env.OP": "op://agents/open ai/key", "env.E": "env:AGENTLAB_TEST_VALUE", "env.FILE": "file:" + file,
		"env.CMD": `cmd:sh -c 'printf "%s|" "$@"; echo' x "a b" 'c"d' e\ f $HOME *`, "git.ssh_known_hosts": "cmd:echo host key",
	} {
		if err := v.Set(t.Context(), "b", key, strings.NewReader(ref), true); err != nil {
			t.Fatal(err)
		}
	}
	got, err := v.Deliver(t.Context(), "b", nil)
	want := Bundle{Git: Git{SSHKnownHosts: "host key\n"}, Env: map[string]string{
		"LITERAL": "cmd:echo no", "OP": "value-of-op", "E": "value-of-env", "FILE": "value-of-file", "CMD": `a b|c"d|e f|$HOME|*|`,
	}}
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v, %v\nwant %+v", got, err, want)
	}
	entries, err := v.Entries(t.Context(), "b", true)
	if err != nil || len(entries) != 6 {
		t.Fatalf("%+v, %v", entries, err)
	}
	for _, e := range entries {
		if strings.Contains(e.Value+e.Reference, "value-of-") || (e.Key == "env.LITERAL") != (e.Value == "cmd:echo no") {
			t.Errorf("%+v", e)
		}
	}
}

// What a reference gives when it gives no value: which code, and nothing of
// what the source said.
func TestReferenceFaults(t *testing.T) {
	dir := t.TempDir()
	write := func(name string, mode os.FileMode, text string) string {
		p := filepath.Join(dir, name)
		if err := os.WriteFile(p, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(p, mode); err != nil {
			t.Fatal(err)
		}
		return "file:" + p
	}
	fifo := filepath.Join(dir, "fifo")
	if err := syscall.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	script(t, "op", "echo s3cret; echo s3cret >&2; exit 1")
	for _, tc := range []struct {
		key, ref string
		code     agentlab.Code
	}{
		{"env.A", "env:AGENTLAB_TEST_UNSET", agentlab.CodeNotFound},
		{"env.A", "file:/nowhere", agentlab.CodeNotFound},
		{"env.A", "file:" + dir, agentlab.CodeInvalid},
		{"env.A", "file:" + fifo, agentlab.CodeInvalid},
		{"env.A", "file:/dev/zero", agentlab.CodeInvalid},
		{"env.A", write("open", 0o604, "s3cret"), agentlab.CodeDenied},
		{"env.A", write("writable", 0o620, "s3cret"), agentlab.CodeDenied},
		{"env.A", write("large", 0o600, strings.Repeat("s3cret", MaxValueBytes)), agentlab.CodeInvalid},
		{"env.A", write("empty", 0o600, "\n"), agentlab.CodeInvalid},
		{"env.A", write("nul", 0o600, "s3\x00cret"), agentlab.CodeInvalid},
		{"git.token", write("lines", 0o600, "s3cret\ns3cret\n"), agentlab.CodeInvalid},
		{"git.ssh_private_key", write("nokey", 0o600, "s3cret\n"), agentlab.CodeInvalid},
		{"env.A", "cmd:no-such-program-here", agentlab.CodeNotFound},
		{"env.A", "cmd:sh -c 'echo s3cret; echo s3cret >&2; exit 1'", agentlab.CodeUnavailable},
		{"env.A", "cmd:sh -c 'echo s3cret; kill -9 $$'", agentlab.CodeUnavailable},
		{"env.A", "cmd:yes s3cret", agentlab.CodeInvalid},
		{"env.A", "op://v/i/f", agentlab.CodeUnavailable},
	} {
		var b Bundle
		b.put(tc.key, tc.ref)
		_, err := resolve(t.Context(), b)
		wantCode(t, err, tc.code)
		said := strings.ReplaceAll(fmt.Sprint(err, agentlab.HintOf(err)), "echo s3cret", "")
		if strings.Contains(strings.ReplaceAll(said, "yes s3cret", ""), "s3cret") || !strings.Contains(said, tc.key) {
			t.Errorf("%s: %v", tc.ref, err)
		}
	}
}

// A program that does not end, and what it leaves behind, is cut off.
func TestReferenceTimeLimit(t *testing.T) {
	pidFile := filepath.Join(t.TempDir(), "pid")
	var text []byte
	for limit := 100 * time.Millisecond; len(text) == 0; limit *= 2 { // until the machine starts the program in time
		ctx, cancel := context.WithTimeout(t.Context(), limit)
		_, err := resolve(ctx, Bundle{Env: map[string]string{"A": "cmd:sh -c 'sleep 1000 & echo $! > " + pidFile + "; wait'"}})
		cancel()
		wantCode(t, err, agentlab.CodeTimeout)
		text, _ = os.ReadFile(pidFile)
	}
	stat := func() string {
		p, _ := os.ReadFile("/proc/" + strings.TrimSpace(string(text)) + "/stat")
		_, rest, _ := strings.Cut(string(p), ") ")
		return rest
	}
	guard.Until(t, "the child is dead", func() bool { is := stat(); return is == "" || strings.HasPrefix(is, "Z") })
}

// References that all wait are cut off together, before their runner stops
// waiting for its answer.
func TestResolveIsBounded(t *testing.T) {
	if refTimeout >= 30*time.Second {
		t.Errorf("a runner waits 30 s, references %s", refTimeout)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	env := map[string]string{}
	for i := range 3 * refAtOnce {
		env[fmt.Sprintf("V%d", i)] = "cmd:sleep 1000"
	}
	_, err := resolve(ctx, Bundle{Env: env})
	wantCode(t, err, agentlab.CodeTimeout)
}

func TestReferenceForm(t *testing.T) {
	for ref, good := range map[string]bool{
		"op://v/i/f": true, "op://v/i/s/f": true, "op://v/i": false, "op://": false, "op://v//f": false, "op:///i/f": false,
		"env:A": true, "env:": false, "env:A B": false, "env:A=B": false,
		"file:/a": true, "file:a": false, "file:~/a": false, "file:": false,
		"cmd:a": true, "cmd:/a b": true, "cmd:": false, "cmd: ": false, "cmd:./a": false, "cmd:a 'b": false, "cmd:a\nb": false,
		"cmd:a " + strings.Repeat("x", maxRefBytes): false,
	} {
		if err := checkReference("env.A", ref); (err == nil) != good {
			t.Errorf("%.40q: %v", ref, err)
		}
	}
}

// Words that are quoted come back as they were.
func TestSplitWords(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		in := rapid.SliceOfN(rapid.StringMatching(`[a-z "'\\$*\t]{0,8}`), 1, 4).Draw(t, "words")
		var quoted []string
		for _, w := range in {
			quoted = append(quoted, "'"+strings.ReplaceAll(w, "'", `'\''`)+"'")
		}
		out, err := splitWords(strings.Join(quoted, " \t"))
		if err != nil || !reflect.DeepEqual(in, out) {
			t.Fatalf("%q became %q, %v", in, out, err)
		}
	})
}

// FuzzBundle: whatever a bundle's text is, reading it is quick and safe, and
// what is read can be written and read again.
func FuzzBundle(f *testing.F) {
	for _, s := range []string{"", "git:\n  token: x\n", "env:\n  A: |\n    b\n    c\n", "env: {A: 'cmd:x'}", "ssh_keys:\n  a.b: -PRIVATE KEY-----\n", "env: &a {A: *a}", "claude_settings_json: '{}'"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		b, err := parseBundle(text)
		if err != nil {
			if agentlab.CodeOf(err) != agentlab.CodeInvalid {
				t.Fatalf("%v", err)
			}
			return
		}
		out, err := b.marshal()
		if err != nil {
			return // not UTF-8
		}
		again, err := parseBundle(out)
		if err != nil || !reflect.DeepEqual(again.entries(), b.entries()) {
			t.Fatalf("%q became %q: %v", text, out, err)
		}
		for _, e := range b.entries() {
			_, _ = splitWords(strings.TrimPrefix(e.value, refCmd))
		}
	})
}
