package daemon

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/test/smalldisk"
)

func (h *home) finding(t *testing.T, name string) *api.Finding {
	t.Helper()
	s, err := h.client.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range s.Findings {
		if f.Name == name {
			return &f
		}
	}
	return nil
}

// awaitSpaceEvent follows events until one about disk space has that in its
// message.
func (h *home) awaitSpaceEvent(t *testing.T, text string) {
	t.Helper()
	for e, err := range h.client.FollowEvents(t.Context(), client.EventQuery{}) {
		if err != nil {
			t.Fatal(err)
		}
		if e.Kind == agentlab.EventSpace && strings.Contains(e.Message, text) {
			return
		}
	}
}

// A daemon on a full disk ends sandboxes, is started again, and needs its
// reserve for both; without one it names what to do.
func TestFullDisk(t *testing.T) {
	smalldisk.Run(t, "256m", func(t *testing.T, dir string) {
		h := newHomeIn(t, dir)
		h.configure(t, "backend: fake\nlimits:\n  min_free_mb: 0\n")
		stop := h.start(t)
		sb, err := h.client.CreateSandbox(t.Context(), api.SandboxCreate{Name: "hog"})
		if err != nil {
			t.Fatal(err)
		}
		h.await(t, "hog", agentlab.SandboxReady)
		if f := h.finding(t, "disk reserve"); f != nil {
			t.Fatalf("%+v", f)
		}
		smalldisk.Fill(t, dir, 0)
		stop()
		smalldisk.Fill(t, dir, 0)

		stop = h.start(t)
		if f := h.finding(t, "disk reserve"); f == nil || f.Remedy == "" {
			t.Errorf("no finding about the reserve: %+v", f)
		}
		if _, err := h.client.DestroySandbox(t.Context(), "hog"); err != nil {
			t.Fatalf("on a full disk: %v", err)
		}
		h.await(t, strconv.Itoa(sb.VMID), agentlab.SandboxDestroyed)
		h.awaitSpaceEvent(t, "reserve was released")
		stop()

		smalldisk.Fill(t, dir, 0)
		h.start(t)() // with the next part of the reserve
		if err := os.Remove(h.paths.Reserve()); err != nil {
			t.Fatal(err)
		}
		smalldisk.Fill(t, dir, 0)
		_, err = h.open(t)
		if agentlab.CodeOf(err) != agentlab.CodeNoSpace || !strings.Contains(agentlab.HintOf(err), h.paths.Images()) {
			t.Errorf("without a reserve: %v (%s, %s)", err, agentlab.CodeOf(err), agentlab.HintOf(err))
		}

		if err := os.Remove(filepath.Join(dir, "fill")); err != nil {
			t.Fatal(err)
		}
		h.start(t)
		if f := h.finding(t, "disk reserve"); f != nil {
			t.Errorf("with room again: %+v", f)
		}
	})
}
