package backendtest

import (
	"context"
	"io"
	"testing"

	"github.com/agentlab-vm/agentlab/internal/backend"
)

// thin wraps a driver by its interface, and so hides groups.
type thin struct{ backend.Driver }

func (thin) Info() backend.Info { return backend.Info{} }

func (thin) ConsoleLog(context.Context, backend.Ref, bool) (io.ReadCloser, error) { return nil, nil }
func (thin) ExportDisk(context.Context, backend.Ref, string) error                { return nil }

func TestHiddenGroupsAreFound(t *testing.T) {
	for _, tc := range []struct {
		want []string
		ok   bool
	}{
		{[]string{"Console"}, true}, {[]string{"Power", "Console"}, false}, {nil, false}, {[]string{"Consol"}, false}, {[]string{"Console", "Deadlines"}, false},
	} {
		if err := checkOptional(thin{}, tc.want); (err == nil) != tc.ok {
			t.Errorf("%q: %v", tc.want, err)
		}
	}
}
