// Package version returns which build of AgentLab is running.
//
// The Makefile sets the variables with -ldflags -X; a binary of plain 'go
// build' or 'go install' falls back to the build information of the Go
// toolchain.
package version

import (
	"cmp"
	"fmt"
	"runtime/debug"
	"sync"
)

// Set by -ldflags "-X github.com/agentlab-vm/agentlab/internal/version.Version=…".
// They are variables because the linker can set only variables; no code assigns
// them.
var (
	Version string // semantic version without "v"
	Commit  string // full git commit id, with "-dirty" appended for a modified tree
	Date    string // commit date, RFC 3339 UTC
)

// Info identifies a build. No field is empty.
type Info struct {
	Version, Commit, Date string
}

// Get returns the linked values, otherwise those of the Go build information,
// otherwise "dev" and "unknown".
func Get() Info { return get() }

var get = sync.OnceValue(func() Info {
	bi, _ := debug.ReadBuildInfo()
	return resolve(Info{Version, Commit, Date}, bi)
})

func resolve(linked Info, bi *debug.BuildInfo) Info {
	var built Info
	if bi != nil {
		if v := bi.Main.Version; v != "" && v != "(devel)" {
			built.Version = v
		}
		dirty := ""
		for _, s := range bi.Settings {
			switch s.Key {
			case "vcs.revision":
				built.Commit = s.Value
			case "vcs.time":
				built.Date = s.Value
			case "vcs.modified":
				if s.Value == "true" {
					dirty = "-dirty"
				}
			}
		}
		if built.Commit != "" {
			built.Commit += dirty
		}
	}
	return Info{
		Version: cmp.Or(linked.Version, built.Version, "dev"),
		Commit:  cmp.Or(linked.Commit, built.Commit, "unknown"),
		Date:    cmp.Or(linked.Date, built.Date, "unknown"),
	}
}

// String returns "VERSION (commit COMMIT, DATE)", what --version prints after
// the program's name.
func (i Info) String() string {
	return fmt.Sprintf("%s (commit %s, %s)", i.Version, i.Commit, i.Date)
}

// String returns Get().String().
func String() string { return Get().String() }
