//go:build mutation

package egress

import (
	"os"
	"strings"
	"sync/atomic"
)

// DropRuleFile is the path of the file with the name of the rule to drop; ""
// drops none. A name that ends in * drops every rule with that prefix. It is
// set before the first New.
var DropRuleFile string

var droppedRule atomic.Pointer[string]

// Dropped reports whether the rule of that name is disabled, so that it denies
// nothing. The file is read at each New.
func Dropped(rule string) bool {
	d := droppedRule.Load()
	if d == nil || *d == "" {
		return false
	}
	if head, ok := strings.CutSuffix(*d, "*"); ok {
		return strings.HasPrefix(rule, head)
	}
	return rule == *d
}

func readDropped() {
	name := ""
	if DropRuleFile != "" {
		data, err := os.ReadFile(DropRuleFile)
		if err == nil {
			name = strings.TrimSpace(string(data))
		}
	}
	droppedRule.Store(&name)
}
