package backendtest

import (
	"fmt"
	"slices"

	"github.com/agentlab-vm/agentlab/internal/backend"
)

// optional are the optional interfaces of package backend.
var optional = []struct { //nolint:gochecknoglobals // a constant table
	name        string
	implemented func(backend.Driver) bool
}{
	{"Accelerator", implements[backend.Accelerator]},
	{"ConsoleLogger", implements[backend.ConsoleLogger]},
	{"DeadlineSetter", implements[backend.DeadlineSetter]},
	{"DiskSuspender", implements[backend.DiskSuspender]},
	{"EgressLogger", implements[backend.EgressLogger]},
	{"EgressRecorder", implements[backend.EgressRecorder]},
	{"MemoryReporter", implements[backend.MemoryReporter]},
	{"NestedChecker", implements[backend.NestedChecker]},
	{"NetworkUpdater", implements[backend.NetworkUpdater]},
	{"NumberChecker", implements[backend.NumberChecker]},
	{"RoomChecker", implements[backend.RoomChecker]},
	{"Snapshotter", implements[backend.Snapshotter]},
	{"Suspender", implements[backend.Suspender]},
	{"Templates", implements[backend.Templates]},
	{"VolumeSnapshotter", implements[backend.VolumeSnapshotter]},
	{"Volumes", implements[backend.Volumes]},
}

func implements[T any](d backend.Driver) bool { _, ok := d.(T); return ok }

// checkOptional returns an error if a driver does not implement exactly the
// optional interfaces with these names. Otherwise a wrapper that hides one would
// pass, because the tests of the interface are skipped.
func checkOptional(d backend.Driver, want []string) error {
	var got []string
	for _, o := range optional {
		if o.implemented(d) {
			got = append(got, o.name)
		}
	}
	if want = slices.Sorted(slices.Values(want)); !slices.Equal(got, want) {
		return fmt.Errorf("the driver implements %q, and its harness lists %q", got, want)
	}
	return nil
}
