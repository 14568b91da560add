package proxmox

import (
	"context"
	"net"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/proxmox/pve"
	"github.com/agentlab-vm/agentlab/internal/control"
)

// from creates the nth sandbox from a snapshot.
func (w *world) from(t testing.TB, n int, of backend.Spec, snapshot int) backend.Spec {
	t.Helper()
	spec, ref := w.spec(n), refTo(of, snapshot)
	spec.From, spec.Resources, spec.Options = &ref, of.Resources, of.Options
	ok(t, "Create from a snapshot", w.driver.Create(t.Context(), spec))
	return spec
}

// answers connects to the guest control of a sandbox.
func (w *world) answers(t testing.TB, spec backend.Spec) {
	t.Helper()
	_, err := control.New(func(ctx context.Context) (net.Conn, error) { return w.driver.DialControl(ctx, spec.Ref()) }).Health(t.Context())
	ok(t, "Health of "+spec.Name, err)
}

// A sandbox from a snapshot has nothing of the one that was saved but its disk:
// another MAC address, mark, machine ID, seed and port.
func TestFromSnapshot(t *testing.T) {
	both(t, func(t *testing.T, shell bool) {
		w := newWorld(t, worldConfig{shell: shell, storage: "lvmthin"})
		w.firewall(t, "agents")
		spec := w.spec(1)
		spec.Options, spec.Resources.RootSizeGB = `{"firewall_group":"agents"}`, 2
		ok(t, "Create", w.driver.Create(t.Context(), spec))
		ok(t, "Start", w.driver.Start(t.Context(), spec.Ref()))
		w.answers(t, spec)
		w.saveSnapshot(t, spec, 1)

		first := w.from(t, 2, spec, 1)
		ok(t, "Start", w.driver.Start(t.Context(), first.Ref()))
		w.answers(t, first)
		w.saveSnapshot(t, first, 2)
		second := w.from(t, 3, first, 2) // a copy of a copy
		ok(t, "Destroy", w.driver.Destroy(t.Context(), spec.Ref()))
		ok(t, "Destroy", w.driver.Destroy(t.Context(), first.Ref()))
		ok(t, "Start", w.driver.Start(t.Context(), second.Ref()))
		w.answers(t, second)

		h, err := w.driver.readHandle(second.Ref())
		ok(t, "read", err)
		cfg := pve.Config(w.node.Config(second.VMID))
		ok(t, "audit", audit(withoutDigest(cfg), w.driver.wanted(h), second.VMID))
		if !w.driver.ours(cfg, idOf(second), second.Name) || !strings.Contains(strings.ToLower(cfg["net0"]), h.MAC) || !strings.Contains(cfg["net0"], "firewall=1") {
			t.Errorf("%v", cfg)
		}
		if rules := w.node.FirewallFile(strconv.Itoa(second.VMID)); strings.Count(rules, "GROUP agents") != 1 {
			t.Errorf("the firewall of the copy is\n%s", rules)
		}
		if driveSize(cfg["scsi0"]) != 2<<30 {
			t.Errorf("its disk is %s", cfg["scsi0"])
		}
		if shell != (h.ControlUID == "") {
			t.Errorf("its guest obeys the key of %q", h.ControlUID)
		}
	})
}

func withoutDigest(cfg pve.Config) pve.Config {
	delete(cfg, "digest")
	return cfg
}

// A storage that cannot copy a snapshot leaves nothing behind. Another one copies it
// also while its VM runs.
func TestFromSnapshotRefused(t *testing.T) {
	both(t, func(t *testing.T, shell bool) {
		for _, storage := range []string{"zfspool", "dir"} {
			w := newWorld(t, worldConfig{shell: shell, storage: storage})
			spec := w.running(t, 1)
			w.saveSnapshot(t, spec, 1)
			copied, ref := w.spec(2), refTo(spec, 1)
			copied.From = &ref
			before := w.left(t)
			err := w.driver.Create(t.Context(), copied)
			if storage == "dir" {
				ok(t, "Create", err)
				continue
			}
			wantCode(t, "Create on "+storage, err, agentlab.CodeUnsupported)
			if agentlab.HintOf(err) == "" {
				t.Error(err)
			}
			if left := w.left(t); !slices.Equal(left, before) {
				t.Errorf("left: %q", left)
			}
		}
	})
}
