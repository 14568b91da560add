package cli

import (
	"time"

	"github.com/agentlab-vm/agentlab/internal/work"
)

// Meter returns a meter on standard error.
func (a *App) Meter() *work.Meter {
	_, tty := work.TerminalOf(a.Stderr)
	return work.NewMeter(a.Stderr, time.Now, tty)
}
