package server

import (
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
)

// A daemon that builds an image does not stop, unless the request says that it may
// interrupt the build.
func TestStopInterruptsNoBuild(t *testing.T) {
	h := start(t, nil)
	h.stub.building = map[string]time.Time{"dev": time.Now().Add(-12 * time.Minute)}
	err := h.client.StopDaemon(t.Context(), false)
	if agentlab.CodeOf(err) != agentlab.CodeBusy || !strings.Contains(err.Error(), "building the image dev for 12m0s") || !strings.Contains(agentlab.HintOf(err), "daemon stop --force") {
		t.Errorf("%v (%s)", err, agentlab.HintOf(err))
	}
	if len(h.stub.stops) != 0 {
		t.Error("it stops")
	}
	if err := h.client.StopDaemon(t.Context(), true); err != nil || len(h.stub.stops) != 1 {
		t.Errorf("with force: %v, %d stops", err, len(h.stub.stops))
	}
}
