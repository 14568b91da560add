package cli

import (
	"bytes"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/worktest"
)

// Packing shows what git itself says, and a short step shows nothing.
func TestMeterOfPacking(t *testing.T) {
	repo := worktest.Repo(t)
	src, err := findSource(t.Context(), repo, "")
	if err != nil {
		t.Fatal(err)
	}
	pack := func(now func() time.Time) string {
		t.Helper()
		var out bytes.Buffer
		m := work.NewMeter(&out, now, false)
		file, err := packBundle(t.Context(), t.TempDir(), src, &gitProgress{m: m, what: "packing"})
		if err != nil {
			t.Fatal(err)
		}
		_ = file.Close()
		return out.String()
	}
	hour := time.Unix(0, 0)
	if got := pack(func() time.Time { hour = hour.Add(time.Hour); return hour }); !strings.Contains(got, "packing: writing objects, 100% of 3") {
		t.Errorf("progress is %q", got)
	}
	if got := pack(func() time.Time { return time.Unix(0, 0) }); got != "" {
		t.Errorf("a step that takes no time shows %q", got)
	}
}

// Each command for the repository of a session says what it waits for.
func TestSlowCommandsSayWhatTheyWaitFor(t *testing.T) {
	a := &App{Stderr: io.Discard}
	var said []string
	ended := 0
	r := sessionRepo{sandbox: "1", slow: func(what string) func() {
		said = append(said, what)
		return func() { ended++ }
	}}
	r.c = commandClient(t, func(command []string, in []byte) ([]byte, string, int) {
		if verb := command[2]; verb == "receive" {
			return []byte(`{"errors":{}}`), "", 0
		}
		return nil, "", 0
	})
	for verb := range slowWork {
		if verb != "receive" {
			if err := r.call(t.Context(), nil, io.Discard, verb); err != nil {
				t.Error(verb, err)
			}
		}
	}
	bundle, err := os.Create(filepath.Join(t.TempDir(), "bundle"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = bundle.Close() }()
	if _, err := r.push(t.Context(), pushed{bundle: bundle}, nil, a.Meter()); err != nil {
		t.Error(err)
	}
	if slices.Sort(said); !slices.Equal(said, slices.Sorted(maps.Values(slowWork))) || ended < len(said) {
		t.Errorf("commands say %q, and %d have ended", said, ended)
	}
}
