//go:build tools

// Package module pins the version of limactl that tests build.
package module

import _ "github.com/lima-vm/lima/cmd/limactl"
