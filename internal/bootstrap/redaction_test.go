package bootstrap_test

import (
	"context"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
)

// The sandbox of an attempt continues a prepared sandbox, with the secrets that
// this one has received. They are redacted while the attempt is still QUEUED.
func TestQueuedAttemptIsRedacted(t *testing.T) {
	inWorld(t, true, func(w *world) {
		ctx := context.Background()
		const value = "git-token-of-the-owner"
		text := "guest kernel panic: " + value
		if got := w.svc.RedactFunc(ctx, w.sb.JobID)(text); got != text {
			t.Errorf("before: %q", got)
		}
		prep := agentlab.Sandbox{UID: agentlab.NewUID()}
		if err := w.vault.SaveDelivered(ctx, prep.UID, []string{value}); err != nil {
			t.Fatal(err)
		}
		if some, err := w.svc.Inherit(ctx, prep, w.sb); !some || err != nil {
			t.Fatal(some, err)
		}
		if got := w.svc.RedactFunc(ctx, w.sb.JobID)(text); strings.Contains(got, value) {
			t.Errorf("after: %q", got)
		}
	})
}
