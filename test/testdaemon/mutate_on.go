//go:build mutation

package testdaemon

import (
	"path/filepath"

	"github.com/agentlab-vm/agentlab/internal/egress"
)

// DropRule is the name of a file in the home of the daemon. The file contains
// the name of the rule to drop.
const DropRule = "drop-rule"

func dropRuleIn(home string) { egress.DropRuleFile = filepath.Join(home, DropRule) }
