//go:build !linux

package runner

import "errors"

// Guests run Linux: without these calls the runner runs no job.

func lowPriority() error              { return errors.ErrUnsupported }
func isInMemory(string) (bool, error) { return false, errors.ErrUnsupported }
func exchange(string, string) error   { return errors.ErrUnsupported }
