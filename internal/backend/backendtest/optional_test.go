package backendtest

import (
	"context"
	"io"
	"testing"

	"github.com/agentlab-vm/agentlab/internal/backend"
)

// thin wraps a driver by its interface, and so hides optional interfaces.
type thin struct{ backend.Driver }

func (thin) ConsoleLog(context.Context, backend.Ref, bool) (io.ReadCloser, error) { return nil, nil }

func TestHiddenInterfacesAreFound(t *testing.T) {
	for _, tc := range []struct {
		want []string
		ok   bool
	}{
		{[]string{"ConsoleLogger"}, true}, {[]string{"Suspender", "ConsoleLogger"}, false}, {nil, false}, {[]string{"ConsoleLoger"}, false},
	} {
		if err := checkOptional(thin{}, tc.want); (err == nil) != tc.ok {
			t.Errorf("%q: %v", tc.want, err)
		}
	}
}
