package pve_test

import (
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/proxmox/pve"
	"github.com/agentlab-vm/agentlab/test/pvenode"
)

// Trap 33: deleting a volume needs Datastore.Allocate, and does not check any
// configuration. A client that deletes by its own list can delete the disk of
// a stopped VM.
func TestTrap33(t *testing.T) {
	b := newBench(t, pvenode.Config{Waits: pvenode.ShortWaits()})
	b.clone(101)
	tr := b.token(true, map[string][]string{"/storage/local-zfs": {"Datastore.AllocateSpace", "Datastore.Audit"}, "/vms/101": {"VM.Audit", "VM.Config.Disk"}})
	c := pve.New(tr).WithPoll(quickPoll)
	vols, err := c.Content(b.ctx(), "pve", "local-zfs", "images", 101)
	if err != nil {
		t.Fatal(err)
	}
	i := slices.IndexFunc(vols, func(v pve.Volume) bool { return strings.HasSuffix(v.VolID, "vm-101-disk-0") })
	if i < 0 || vols[i].VMID != 101 {
		t.Fatalf("%+v", vols)
	}
	_, err = c.DeleteContent(b.ctx(), "pve", vols[i].VolID)
	b.code(err, agentlab.CodeDenied)
	if !strings.Contains(err.Error(), "Datastore.Allocate") {
		t.Error(err)
	}
	b.do(b.c.DeleteContent(b.ctx(), "pve", vols[i].VolID))
	cfg, err := b.c.Config(b.ctx(), "pve", 101)
	if err != nil || !strings.Contains(cfg["scsi0"], "vm-101-disk-0") {
		t.Errorf("%v %v", cfg, err)
	}
	left, err := b.c.Content(b.ctx(), "pve", "local-zfs", "images", 101)
	if err != nil || slices.ContainsFunc(left, func(v pve.Volume) bool { return v.VolID == vols[i].VolID }) {
		t.Errorf("%+v %v: it was refused after all", left, err)
	}
}

// Trap 34: a disk that cannot be freed does not fail the destruction of its
// VM. A client that relies on the task leaves disks, and they fill the
// storage. A token does not see them in the storage's list, because the VM is
// no longer in the pool.
func TestTrap34(t *testing.T) {
	for _, version := range []string{"8.4", "9.2"} {
		b := newBench(t, pvenode.Config{Version: version, Waits: pvenode.ShortWaits()})
		b.AddPool("agentlab")
		need := pve.Needs{Templates: []int{9000}, Pool: "agentlab", Storages: []string{"local-zfs"}, Bridges: []string{"vmbr1"}}
		v, err := b.c.Version(b.ctx())
		if err != nil {
			t.Fatal(err)
		}
		grants := map[string][]string{}
		for _, g := range need.Grants(v) {
			grants[g.Path] = append(grants[g.Path], g.Privileges...)
		}
		c := pve.New(b.token(true, grants)).WithPoll(quickPoll)
		u, err := c.Clone(b.ctx(), "pve", 9000, pve.CloneOptions{NewID: 101, Pool: "agentlab"})
		b.do(u, err)
		if vols, err := c.Content(b.ctx(), "pve", "local-zfs", "images", 101); err != nil || len(vols) != 2 {
			t.Errorf("%s: while it is there: %+v %v", version, vols, err)
		}
		disarm := b.Fail("free", pvenode.Fault{Error: "zfs error: cannot destroy 'rpool/data/vm-101-disk-0': dataset is busy", Times: -1})
		u, err = c.Destroy(b.ctx(), "pve", 101, false)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := c.Wait(b.ctx(), u); err != nil {
			t.Errorf("%s: %v", version, err)
		}
		_, err = b.c.Config(b.ctx(), "pve", 101)
		b.code(err, agentlab.CodeNotFound)
		_, err = c.Config(b.ctx(), "pve", 101) // it may not even know that
		b.code(err, agentlab.CodeDenied)
		if free, err := c.Free(b.ctx(), 101); err != nil || !free {
			t.Errorf("%s: free %v, %v", version, free, err)
		}
		if vols, err := c.Content(b.ctx(), "pve", "local-zfs", "images", 101); err != nil || len(vols) != 0 {
			t.Errorf("%s: the token sees %+v %v", version, vols, err)
		}
		left, err := c.NotRemoved(b.ctx(), u)
		all, aerr := b.c.Content(b.ctx(), "pve", "local-zfs", "images", 101)
		if err != nil || aerr != nil || len(left) == 0 || len(left) != len(all) {
			t.Errorf("%s: the log tells of %q, there are %+v (%v, %v)", version, left, all, err, aerr)
		}
		disarm()
		for _, v := range left {
			_, err := c.DeleteContent(b.ctx(), "pve", v)
			b.code(err, agentlab.CodeDenied)
			u, err := b.c.DeleteContent(b.ctx(), "pve", v)
			b.do(u, err)
		}
		if all, err = b.c.Content(b.ctx(), "pve", "local-zfs", "images", 101); err != nil || len(all) != 0 {
			t.Errorf("%s: %v %v", version, all, err)
		}
	}
}

// Trap 35: the guest agent. exec takes a list, a missing program may answer
// 596, an end can be read once, MACs are in lower case, an agent that is not
// there takes 3 s to find out.
func TestTrap35(t *testing.T) {
	both(t, pvenode.Config{Waits: pvenode.ShortWaits()}, func(t *testing.T, b *bench) {
		b.clone(101)
		b.code(b.c.AgentPing(b.ctx(), "pve", 101), agentlab.CodeConflict)
		b.do(b.c.Start(b.ctx(), "pve", 101))
		if err := b.c.AgentPing(b.ctx(), "pve", 101); err != nil {
			t.Error(err)
		}
		ifs, err := b.c.AgentInterfaces(b.ctx(), "pve", 101)
		cfg, cerr := b.c.Config(b.ctx(), "pve", 101)
		if err != nil || cerr != nil {
			t.Fatal(err, cerr)
		}
		mac, _ := pve.ParseProps(cfg["net0"]).Get("virtio")
		if mac != strings.ToUpper(mac) || !slices.ContainsFunc(ifs, func(i pve.Interface) bool { return i.MAC.String() == strings.ToLower(mac) }) {
			t.Errorf("%s is not among %+v", mac, ifs)
		}
		pid, err := b.c.AgentExec(b.ctx(), "pve", 101, []string{"/bin/true"}, nil)
		if err != nil || pid == 0 {
			t.Fatal(pid, err)
		}
		for {
			r, err := b.c.AgentExecStatus(b.ctx(), "pve", 101, pid)
			if err != nil {
				t.Fatal(err)
			}
			if r.Exited {
				break
			}
		}
		if _, err := b.c.AgentExecStatus(b.ctx(), "pve", 101, pid); err == nil || agentlab.CodeOf(err) == agentlab.CodeNotFound {
			t.Errorf("an end that was read: %v", err)
		}
		_, err = b.c.AgentExec(b.ctx(), "pve", 101, []string{"/nosuch"}, nil)
		want := agentlab.CodeUnknownOutcome
		if b.c.Root() != nil {
			want = agentlab.CodeInternal // the command line tells
		}
		b.code(err, want)
		if err := b.c.AgentFileWrite(b.ctx(), "pve", 101, "/etc/agentlab/control.json", []byte("{}\n")); err != nil {
			t.Error(err)
		}
		b.AddForeignVM(t, 102, "other", true, nil)
		b.code(b.c.AgentPing(b.ctx(), "pve", 102), agentlab.CodeUnavailable)
	})
}

// Trap 37: truth values are 1 and 0, and the unit of a size depends on the
// call. "true" is refused, and without the G a disk is resized to that number
// of bytes.
func TestTrap37(t *testing.T) {
	both(t, pvenode.Config{Waits: pvenode.ShortWaits()}, func(t *testing.T, b *bench) {
		b.clone(101)
		for _, v := range []string{"true", "false", "yes", "no", "on", "off"} {
			want := agentlab.CodeInvalid
			if b.c.Root() != nil {
				want = "" // the command line takes them
			}
			b.code(b.c.Set(b.ctx(), "pve", 101, pve.Changes{Set: map[string]string{"onboot": v}}), want)
		}
		for _, v := range []string{"1", "0"} {
			if err := b.c.Set(b.ctx(), "pve", 101, pve.Changes{Set: map[string]string{"onboot": v}}); err != nil {
				t.Error(err)
			}
		}
		b.do(b.c.Resize(b.ctx(), "pve", 101, "scsi0", "3G"))
		cfg, err := b.c.Config(b.ctx(), "pve", 101)
		if size, _ := pve.ParseProps(cfg["scsi0"]).Get("size"); err != nil || size != "3G" {
			t.Errorf("%q %v", cfg["scsi0"], err)
		}
		// The refusal of a smaller size is the task's.
		u, err := b.c.Resize(b.ctx(), "pve", 101, "scsi0", "1G")
		if err != nil {
			t.Fatal(err)
		}
		_, err = b.c.Wait(b.ctx(), u)
		if err == nil || !strings.Contains(err.Error(), "shrinking disks is not supported") {
			t.Error(err)
		}
	})
}

// token makes agentlab@pve!ctl with privileges by path, given to the user, and
// with both also to the token.
func (b *bench) token(both bool, grants map[string][]string) pve.Transport {
	b.t.Helper()
	header := b.AddUser(pvenode.User{ID: "agentlab@pve", Tokens: []pvenode.Token{{ID: "ctl", Privsep: true}}})[0]
	b.grant(both, grants)
	id, secret, _ := strings.Cut(strings.TrimPrefix(header, "PVEAPIToken="), "=")
	return b.rest(id, secret)
}

func (b *bench) grant(both bool, grants map[string][]string) {
	b.t.Helper()
	for path, privs := range grants {
		role := "R" + strings.NewReplacer("/", "-", ".", "-").Replace(path)
		if err := b.AddRole(role, privs...); err != nil {
			b.t.Fatal(err)
		}
		b.Grant(path, "agentlab@pve", role)
		if both {
			b.Grant(path, "agentlab@pve!ctl", role)
		}
	}
}

// Trap 40: a token with privilege separation has only what it and its user
// both have. A privilege for only one of them has no effect, and no message
// says which of the two lacks it.
func TestTrap40(t *testing.T) {
	for _, version := range []string{"8.4", "9.2"} {
		b := newBench(t, pvenode.Config{Version: version, Waits: pvenode.ShortWaits()})
		b.AddPool("agentlab")
		need := pve.Needs{TokenID: "agentlab@pve!ctl", Nodes: []string{"pve"}, Templates: []int{9000}, Pool: "agentlab", Storages: []string{"local-zfs"}, Bridges: []string{"vmbr1"}}
		v, err := b.c.Version(b.ctx())
		if err != nil {
			t.Fatal(err)
		}
		grants := map[string][]string{}
		for _, g := range need.Grants(v) {
			grants[g.Path] = append(grants[g.Path], g.Privileges...)
		}
		c := pve.New(b.token(false, grants)).WithPoll(quickPoll)
		errorsOf := func() (out []string) {
			for _, f := range c.Preflight(b.ctx(), need) {
				if f.Level == backend.LevelError {
					out = append(out, f.Detail)
				}
			}
			return out
		}
		if got := errorsOf(); len(got) != 4 {
			t.Errorf("%s, granted to the user alone: %q", version, got)
		}
		_, err = c.Clone(b.ctx(), "pve", 9000, pve.CloneOptions{NewID: 101, Pool: "agentlab"})
		b.code(err, agentlab.CodeDenied)

		// What each finding says is what makes it go away.
		for _, f := range c.Preflight(b.ctx(), need) {
			if f.Level == backend.LevelError {
				b.onNode(strings.TrimPrefix(f.Remedy, "on the node: "))
			}
		}
		if got := errorsOf(); got != nil {
			t.Errorf("%s, granted to both: %q", version, got)
		}
		b.smallestRole(c, v)
	}
}

// onNode runs a command line on the node.
func (b *bench) onNode(line string) {
	b.t.Helper()
	cmd := exec.CommandContext(b.ctx(), "/bin/sh", "-ec", line)
	cmd.Env = []string{"PATH=" + b.Bin() + ":/usr/bin:/bin"}
	if out, err := cmd.CombinedOutput(); err != nil {
		b.t.Errorf("%s: %v\n%s", line, err, out)
	}
}

// smallestRole does with the privileges of Needs.Grants what the driver does.
func (b *bench) smallestRole(c *pve.Client, v pve.Version) {
	b.t.Helper()
	ctx := b.ctx()
	u, err := c.Clone(ctx, "pve", 9000, pve.CloneOptions{NewID: 101, Name: "sb-101", Pool: "agentlab", Description: "x"})
	b.do(u, err)
	if err := c.Set(ctx, "pve", 101, pve.Changes{Set: map[string]string{
		"name": "sb-101", "description": "y", "tags": "agentlab", "cores": "2", "cpulimit": "2", "memory": "512", "balloon": "0", "net0": "virtio=BC:24:11:00:00:02,bridge=vmbr1",
		"ipconfig0": "ip=10.77.0.5/16,gw=10.77.0.1", "nameserver": "10.77.0.1", "onboot": "0", "protection": "0", "agent": "enabled=1", "ciuser": "agent", "ciupgrade": "0",
	}}); err != nil {
		b.t.Errorf("%s: %v", v, err)
	}
	u, err = c.Resize(ctx, "pve", 101, "scsi0", "2G")
	b.do(u, err)
	if err := c.DisableFirewall(ctx, "pve", 101); err != nil {
		b.t.Errorf("%s: %v", v, err)
	}
	u, err = c.Start(ctx, "pve", 101)
	b.do(u, err)
	if err := c.AgentPing(ctx, "pve", 101); err != nil {
		b.t.Errorf("%s: %v", v, err)
	}
	if _, err := c.AgentInterfaces(ctx, "pve", 101); err != nil {
		b.t.Errorf("%s: %v", v, err)
	}
	if err := c.AgentFileWrite(ctx, "pve", 101, "/etc/agentlab/control.json", []byte("{}")); err != nil {
		b.t.Errorf("%s: %v", v, err)
	}
	u, err = c.Stop(ctx, "pve", 101)
	b.do(u, err)
	u, err = c.Destroy(ctx, "pve", 101, false)
	b.do(u, err)
	if vols, err := c.Content(ctx, "pve", "local-zfs", "images", 101); err != nil || len(vols) != 0 {
		b.t.Errorf("%s: left %v %v", v, vols, err)
	}
}
