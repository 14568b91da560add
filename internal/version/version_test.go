package version

import (
	"runtime/debug"
	"testing"
)

func TestResolve(t *testing.T) {
	bi := &debug.BuildInfo{
		Main: debug.Module{Version: "v1.2.3"},
		Settings: []debug.BuildSetting{
			{Key: "vcs.revision", Value: "abc"}, {Key: "vcs.time", Value: "2026-01-02T03:04:05Z"}, {Key: "vcs.modified", Value: "true"},
		},
	}
	for _, tc := range []struct {
		name   string
		linked Info
		bi     *debug.BuildInfo
		want   string
	}{
		{"linked wins", Info{"9.9.9", "fff", "2027-01-01T00:00:00Z"}, bi, "9.9.9 (commit fff, 2027-01-01T00:00:00Z)"},
		{"build info", Info{}, bi, "v1.2.3 (commit abc-dirty, 2026-01-02T03:04:05Z)"},
		{"mixed", Info{Version: "9.9.9"}, bi, "9.9.9 (commit abc-dirty, 2026-01-02T03:04:05Z)"},
		{"devel", Info{}, &debug.BuildInfo{Main: debug.Module{Version: "(devel)"}}, "dev (commit unknown, unknown)"},
		{"nothing", Info{}, nil, "dev (commit unknown, unknown)"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if got := resolve(tc.linked, tc.bi).String(); got != tc.want {
				t.Errorf("got %q, want %q", got, tc.want)
			}
		})
	}
}
