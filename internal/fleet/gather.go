package fleet

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/agentlab-vm/agentlab"
)

// gatherLimit is how long Gather waits for each of several backends.
const gatherLimit = 20 * time.Second

// Gather returns what list returns for each backend, in their order. It asks them at the
// same time, so that a backend that hangs delays the others by at most gatherLimit. missing
// has an error for each backend that did not answer: what is on it is not in all. If none
// answered, Gather returns the error of the first.
func Gather[T any](ctx context.Context, backends []*Backend, list func(context.Context, *Backend) ([]T, error)) (all []T, missing []error, err error) {
	inner := ctx
	if len(backends) > 1 {
		var cancel context.CancelFunc
		inner, cancel = context.WithTimeout(ctx, gatherLimit)
		defer cancel()
	}
	got, errs := make([][]T, len(backends)), make([]error, len(backends))
	var wait sync.WaitGroup
	for i, b := range backends {
		wait.Go(func() { got[i], errs[i] = list(inner, b) })
	}
	wait.Wait()
	if ctx.Err() != nil {
		return nil, nil, ctx.Err()
	}
	for i, b := range backends {
		if errs[i] == nil {
			all = append(all, got[i]...)
			continue
		}
		if errors.Is(errs[i], context.DeadlineExceeded) && inner.Err() != nil {
			errs[i] = agentlab.Errorf(agentlab.CodeUnavailable, "backend %s did not answer within %s", b.name, gatherLimit).
				WithHint("see 'agentlab backend check %s'", b.name)
		}
		missing = append(missing, errs[i])
	}
	if len(missing) > 0 && len(missing) == len(backends) {
		return nil, nil, missing[0]
	}
	return all, missing, nil
}
