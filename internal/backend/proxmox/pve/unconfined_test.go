package pve

import (
	"context"
	"os"
	"path/filepath"
	"testing"
)

// A prefix gets the program and all of its arguments, and passes its output
// and its exit code on.
func TestPrefix(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) string {
		t.Helper()
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte("#!/bin/sh\n"+text), 0o700); err != nil {
			t.Fatal(err)
		}
		return path
	}
	write("pvesh", `printf '["%s"]\n' "$*"; case "$*" in *fails*) echo "it fails" >&2; exit 3;; esac`)
	prefix := write("outside", `echo "$@" >>`+filepath.Join(dir, "log")+`; shift; exec "$@"`)
	s := NewShell(ShellOptions{Bin: dir, Prefix: []string{prefix, "--"}})
	out, err := s.Call(context.Background(), Get, "/version", nil)
	if err != nil || string(out) != `["get /version --output-format json"]` {
		t.Errorf("%s, %v", out, err)
	}
	if _, err := s.Call(context.Background(), Get, "/fails", nil); err == nil {
		t.Error("a failure was not passed on")
	}
	log, err := os.ReadFile(filepath.Join(dir, "log"))
	if want := "-- " + filepath.Join(dir, "pvesh") + " get /version"; err != nil || len(log) < len(want) || string(log[:len(want)]) != want {
		t.Errorf("%s, %v", log, err)
	}
}

func TestUnconfined(t *testing.T) {
	if got := Unconfined(func(string) string { return "" }); got != nil {
		t.Errorf("outside of a service: %q", got)
	}
}
