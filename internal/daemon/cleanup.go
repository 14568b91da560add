package daemon

import "errors"

// cleanup is a list of functions to undo setup steps, run in reverse order.
type cleanup []func() error

func (c *cleanup) add(f func() error) { *c = append(*c, f) }

// run runs all functions once.
func (c *cleanup) run() error {
	var errs []error
	for i := len(*c) - 1; i >= 0; i-- {
		errs = append(errs, (*c)[i]())
	}
	*c = nil
	return errors.Join(errs...)
}
