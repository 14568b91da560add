package proxmox

import (
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/proxmox/pve"
)

// After its node was restarted, a sandbox that ran is distinguished from one
// that crashed, also if Proxmox stopped it in order during the shutdown.
func TestNodeRestarted(t *testing.T) {
	both(t, func(t *testing.T, shell bool) {
		boot := "one"
		w := newWorld(t, worldConfig{shell: shell, alter: func(c *Config) { c.BootID = func() string { return boot } }})
		spec := w.create(t, 1)
		ref := spec.Ref()
		look := func(what string, restarted bool) {
			t.Helper()
			w.open()
			in := w.inspect(t, ref)
			if in.Power != backend.PowerCrashed || in.HostRestarted != restarted || strings.Contains(in.Reason, "was restarted") != restarted {
				t.Errorf("%s: %+v", what, in)
			}
			if l := w.listed(t, ref); l == nil || l.HostRestarted != restarted {
				t.Errorf("%s: listed %+v", what, l)
			}
		}
		ok(t, "Start", w.driver.Start(t.Context(), ref))
		w.node.Restart() // as if its QEMU was killed
		look("same boot", false)

		ok(t, "Start", w.driver.Start(t.Context(), ref))
		w.node.Restart()
		boot = "two"
		look("power failure", true)

		ok(t, "Start", w.driver.Start(t.Context(), ref)) // with the new boot noted
		w.node.Restart()
		look("same boot again", false)

		ok(t, "Start", w.driver.Start(t.Context(), ref))
		ok(t, "the node stops its VMs", w.admin(t, pve.Post, w.vmPath(spec.VMID)+"/status/stop", nil))
		boot = "three"
		look("restart in good order", true)

		ok(t, "Start", w.driver.Start(t.Context(), ref))
		ok(t, "Stop", w.driver.Stop(t.Context(), ref, 0))
		boot = "four"
		w.open()
		if in := w.inspect(t, ref); in.Power != backend.PowerStopped || in.HostRestarted {
			t.Errorf("one that was off: %+v", in)
		}
		ok(t, "Destroy", w.driver.Destroy(t.Context(), ref))
	})
}
