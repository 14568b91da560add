//go:build !linux

package e2e

import "errors"

const envConfine = "AGENTLAB_E2E_CONFINE"

func confine(string, []string) error { return errors.ErrUnsupported }
