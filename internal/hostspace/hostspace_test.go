package hostspace_test

import (
	"errors"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/hostspace"
)

const mib = 1 << 20

func TestGuard(t *testing.T) {
	now := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	free, looks := int64(2000*mib), 0
	var fault error
	g := hostspace.New("/state", 1000*mib, func(dir string) (int64, error) {
		if dir != "/state" {
			t.Errorf("looked at %s", dir)
		}
		looks++
		return free, fault
	}, func() time.Time { return now })
	for _, test := range []struct {
		free        int64 // MiB
		fault       error
		start, keep agentlab.Code
	}{
		{2000, nil, "", ""},
		{1000, nil, "", ""},
		{999, nil, agentlab.CodeNoSpace, ""},
		{250, nil, agentlab.CodeNoSpace, ""},
		{249, nil, agentlab.CodeNoSpace, agentlab.CodeNoSpace},
		{0, errors.New("not mounted"), "", ""},
		{5000, nil, "", ""},
	} {
		free, fault = test.free*mib, test.fault
		now = now.Add(time.Second)
		if got := agentlab.CodeOf(g.Start()); got != test.start {
			t.Errorf("%d MiB, %v: start %q, want %q", test.free, test.fault, got, test.start)
		}
		if got := agentlab.CodeOf(g.Keep()); got != test.keep {
			t.Errorf("%d MiB, %v: keep %q, want %q", test.free, test.fault, got, test.keep)
		}
	}
	before := looks
	for range 1000 {
		_ = g.Keep()
	}
	if looks != before {
		t.Errorf("%d looks in no time", looks-before)
	}
	var none *hostspace.Guard
	if none.Start() != nil || none.Keep() != nil {
		t.Error("no guard refuses")
	}
}

func TestRealFileSystem(t *testing.T) {
	if n, err := hostspace.New(t.TempDir(), 0, nil, nil).Free(); err != nil || n <= 0 {
		t.Errorf("%d, %v", n, err)
	}
	if err := hostspace.New(t.TempDir(), 1<<62, nil, nil).Start(); agentlab.CodeOf(err) != agentlab.CodeNoSpace {
		t.Errorf("%v", err)
	}
	if err := hostspace.New("/does/not/exist", 1<<62, nil, nil).Start(); err != nil {
		t.Errorf("%v", err)
	}
}
