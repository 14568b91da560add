package sandbox_test

import (
	"context"
	"testing"

	"github.com/agentlab-vm/agentlab"
)

// A sandbox whose image cannot be built says what to do about it.
func TestImageThatCannotBeBuilt(t *testing.T) {
	inWorld(t, func(w *world) {
		w.images.build = func(context.Context, string, func(string)) error {
			return agentlab.Errorf(agentlab.CodeUnavailable, "a tool is missing").WithHint("install it")
		}
		sb := w.create(agentlab.SandboxRequest{})
		sb = w.until(sb.VMID, agentlab.SandboxFailed)
		if sb.Reason != "image base: a tool is missing (install it)" {
			w.Errorf("reason %q", sb.Reason)
		}
	})
}
