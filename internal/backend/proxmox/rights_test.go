package proxmox

import (
	"context"
	"errors"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/proxmox/pve"
	"github.com/agentlab-vm/agentlab/internal/control"
	"github.com/agentlab-vm/agentlab/test/pvenode"
)

// unfelt are rights whose lack no call of a sandbox's life fails for.
var unfelt = []string{
	// Without it the lists of volumes leave out, silently, what is there.
	"Datastore.Audit",
	// Where guests ask for their address: TestDHCP.
	"VM.GuestAgent.Audit",
}

// Trap 40: a token has what it and its user both have. With the rights that
// Check asks for a sandbox lives, and without any one of them it does not: they
// are the smallest.
func TestTrap40SmallestRights(t *testing.T) {
	for _, version := range []string{"8.4", "9.2"} {
		t.Run(version, func(t *testing.T) {
			w := newWorld(t, worldConfig{version: version, storage: "lvmthin"}) // which can copy snapshots
			if err := w.life(t.Context(), 1); err != nil {
				t.Fatalf("with all of them: %v", err)
			}
			v, err := pve.New(w.root).Version(t.Context())
			ok(t, "version", err)
			needs := pve.Needs{Pool: pool, Templates: []int{templateVMID}, Storages: []string{"local-lvm"}, Bridges: []string{"vmbr1"}}
			n := 2
			for i, g := range needs.Grants(v) {
				for _, without := range g.Privileges {
					if slices.Contains(unfelt, without) {
						continue
					}
					rest := slices.DeleteFunc(slices.Clone(g.Privileges), func(p string) bool { return p == without })
					ok(t, "role", w.node.AddRole(roleOf(i), rest...))
					w.open()
					err := w.life(t.Context(), n)
					if !denied(err) {
						t.Errorf("a sandbox lives without %s on %s: %v", without, g.Path, err)
					}
					ok(t, "role", w.node.AddRole(roleOf(i), g.Privileges...))
					n++
				}
			}
		})
	}
}

func denied(err error) bool {
	return err != nil && (agentlab.CodeOf(err) == agentlab.CodeDenied || strings.Contains(err.Error(), "Permission check failed"))
}

// life takes a sandbox from its beginning to its end, until something fails.
func (w *world) life(ctx context.Context, n int) error {
	d, spec := w.driver, w.spec(n)
	spec.Resources.RootSizeGB = 2
	ref := spec.Ref()
	copied := w.spec(n + 100)
	copied.Resources, copied.From = spec.Resources, &backend.SnapshotRef{UID: snapUID(n), Of: ref}
	if _, err := d.Templates().Ensure(ctx, templateImage(templateVMID), nil); err != nil {
		return err
	}
	for _, step := range []func() error{
		func() error { return d.Create(ctx, spec) },
		func() error { return d.Start(ctx, ref) },
		func() error {
			_, err := control.New(func(ctx context.Context) (net.Conn, error) { return d.DialControl(ctx, ref) }).Health(ctx)
			return err
		},
		func() error { _, err := d.SaveSnapshot(ctx, ref, snapUID(n)); return err },
		func() error { return d.RestoreSnapshot(ctx, refTo(spec, n)) },
		func() error { return d.Create(ctx, copied) },
		func() error { return d.DeleteSnapshot(ctx, refTo(spec, n)) },
		func() error { return d.Destroy(ctx, copied.Ref()) },
		func() error { return d.Suspend(ctx, ref) },
		func() error { return d.Resume(ctx, ref) },
		func() error { return d.Stop(ctx, ref, time.Second) },
		func() error { return d.Destroy(ctx, ref) },
	} {
		if err := step(); err != nil {
			return err
		}
	}
	if left := w.left(w.t); n == 1 && len(left) > 0 {
		return errors.New("left: " + strings.Join(left, ", "))
	}
	return nil
}

// Over REST a template may not have what the token could not take away from
// its clones: they would fail each by itself, half made.
func TestTemplateOptionsThatNeedRoot(t *testing.T) {
	for option, value := range map[string]string{
		"startup": "order=3", "watchdog": "model=i6300esb", "audio0": "device=ich9-intel-hda", "args": "-version", "hookscript": "local:snippets/x", "serial1": "socket",
	} {
		w := newWorld(t, worldConfig{})
		w.makeTemplate(9100, storages["zfspool"], option, value)
		_, err := w.driver.Templates().Ensure(t.Context(), templateImage(9100), nil)
		if agentlab.CodeOf(err) == agentlab.CodeDenied { // the token's, of a template that it has no right on
			w.node.Grant("/vms/9100", "agentlab@pve", roleOf(1))
			w.node.Grant("/vms/9100", w.tokenID, roleOf(1))
			_, err = w.driver.Templates().Ensure(t.Context(), templateImage(9100), nil)
		}
		if agentlab.CodeOf(err) != agentlab.CodeUnsupported || !strings.Contains(err.Error(), option) {
			t.Errorf("%s: %v", option, err)
		}
	}
	// What the token can take away it does.
	w := newWorld(t, worldConfig{})
	w.node.AddTemplate(t, pvenode.Template{VMID: 9100, Options: map[string]string{
		"vcpus": "1", "cpuunits": "200", "shares": "500", "autostart": "1", "startdate": "now", "tags": "a;b", "searchdomain": "x.test", "cicustom": "vendor=local:snippets/v",
		"migrate_speed": "10", "ipconfig1": "ip=dhcp", "vmstatestorage": "local-zfs",
	}})
	w.node.Grant("/vms/9100", "agentlab@pve", roleOf(1))
	w.node.Grant("/vms/9100", w.tokenID, roleOf(1))
	ref, err := w.driver.Templates().Ensure(t.Context(), templateImage(9100), nil)
	ok(t, "Ensure", err)
	spec := w.spec(1)
	spec.Image = ref
	ok(t, "Create", w.driver.Create(t.Context(), spec))
	ok(t, "Start", w.driver.Start(t.Context(), spec.Ref()))
}

// Proxmox: a clone needs rights on the template's vmstatestorage, and with 9 on
// its custom CPU model. Check tests the first, and the error names the second.
func TestCloneOfTemplateRequiresMorePrivileges(t *testing.T) {
	w := newWorld(t, worldConfig{version: "9.2", alter: func(c *Config) {
		for i := range c.Nodes {
			c.Nodes[i].Templates = map[string]int{"base": 9100}
		}
	}})
	w.makeTemplate(9100, storages["zfspool"], "vmstatestorage", "local", "cpu", "custom-mine")
	w.node.Grant("/vms/9100", "agentlab@pve", roleOf(1))
	w.node.Grant("/vms/9100", w.tokenID, roleOf(1))
	if n := w.driver.needs(t.Context(), w.driver.nodePointers()); !slices.Contains(n.Storages, "local") {
		t.Errorf("Check asks for rights on %q", n.Storages)
	}
	ref, err := w.driver.Templates().Ensure(t.Context(), templateImage(9100), nil)
	ok(t, "Ensure", err)
	spec := w.spec(1)
	spec.Image = ref
	for _, missing := range []struct{ path, priv string }{{"/storage/local", "Datastore.AllocateSpace"}, {"/mapping/cpu/mine", "Mapping.Use"}} {
		err := w.driver.Create(t.Context(), spec)
		wantCode(t, "Create", err, agentlab.CodeDenied)
		if !strings.Contains(err.Error(), "("+missing.path+", "+missing.priv+")") {
			t.Errorf("%v", err)
		}
		ok(t, "role", w.node.AddRole("More", "Datastore.AllocateSpace", "Mapping.Use"))
		w.node.Grant(missing.path, "agentlab@pve", "More")
		w.node.Grant(missing.path, w.tokenID, "More")
	}
	ok(t, "Create", w.driver.Create(t.Context(), spec))
}
