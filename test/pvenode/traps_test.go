package pvenode_test

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab/test/pvenode"
)

// The traps of Proxmox VE, as the fake node has them: by the number of the
// list that they stand in. Each comment says what would go wrong for whom who
// did not know.

// onBoth runs a trap on both versions, with the template and two linked
// clones of it, 101 and 102. Waits are short: what takes long there is tested
// by the order of things, not by the clock.
func onBoth(t *testing.T, trap func(r *replay)) {
	t.Helper()
	for _, version := range []string{"8.4", "9.2"} {
		t.Run(version, func(t *testing.T) {
			t.Parallel()
			r := newReplay(t, version, "trap")
			template(r)
			clones(r, 101, 102)
			trap(r)
		})
	}
}

// contents are the volume ids of a storage.
func (r *replay) contents(storage string) string {
	out := r.sh("pvesm", "list", storage)
	var ids []string
	for _, l := range lines(out)[1:] {
		ids = append(ids, strings.Fields(l)[0])
	}
	return strings.Join(ids, " ")
}

func (r *replay) has(storage, volume string) bool {
	return strings.Contains(" "+r.contents(storage)+" ", volume)
}

// configOf is what qm config prints.
func (r *replay) configOf(vmid int) string { return r.sh("qm", "config", fmt.Sprint(vmid)) }

func (r *replay) wantVolume(volume string, there bool) {
	r.t.Helper()
	if r.has("local-zfs", volume) != there {
		r.t.Errorf("volume %s: there is %v, want %v; all: %s", volume, !there, there, r.contents("local-zfs"))
	}
}

func (r *replay) wantConfig(vmid int, line string, there bool) {
	r.t.Helper()
	if c := r.configOf(vmid); strings.Contains("\n"+c, "\n"+line) != there {
		r.t.Errorf("config of %d: line %q there is %v, want %v:\n%s", vmid, line, !there, there, c)
	}
}

// fails runs a command that must fail with a text on stderr.
func (r *replay) fails(text string, args ...string) {
	r.t.Helper()
	if len(args) == 1 {
		args = strings.Split(args[0], " ")
	}
	out, errs, rc := r.run(args)
	if rc == 0 || !strings.Contains(errs, text) {
		r.t.Errorf("%s: exit %d, stdout %q, stderr %q; want a failure with %q", strings.Join(args, " "), rc, out, errs, text)
	}
}

// says runs a command that exits with 0 though it says something on stderr.
func (r *replay) says(text string, args ...string) (stdout string) {
	r.t.Helper()
	if len(args) == 1 {
		args = strings.Split(args[0], " ")
	}
	out, errs, rc := r.run(args)
	if rc != 0 || !strings.Contains(errs, text) {
		r.t.Errorf("%s: exit %d, stderr %q; want exit 0 and %q", strings.Join(args, " "), rc, errs, text)
	}
	return out
}

// A workspace whose volume is named after a sandbox would be destroyed with
// that sandbox, detached or not.
func TestTrap01OwnershipIsTheNumberInTheName(t *testing.T) {
	t.Parallel()
	onBoth(t, func(r *replay) {
		r.sh("pvesm alloc local-zfs 101 vm-101-work 64M")
		r.sh("qm set 101 --scsi1 local-zfs:vm-101-work")
		r.sh("qm set 101 --delete scsi1") // becomes unused0
		volumes(r, "vm-9999-work 64M")
		r.sh("qm set 101 --scsi1 local-zfs:vm-9999-work")
		r.sh("qm destroy 101")
		r.wantVolume("local-zfs:vm-101-work", false)
		r.wantVolume("local-zfs:vm-9999-work", true)
	})
}

// Volumes kept under a number that has no VM would go when that number, which
// nextid hands out, is used and destroyed with its unreferenced disks.
func TestTrap02UnreferencedDisksGoByName(t *testing.T) {
	t.Parallel()
	onBoth(t, func(r *replay) {
		r.sh("pvesm alloc local-zfs 100 vm-100-work 64M")
		r.sh("pvesm alloc local 100 vm-100-work.qcow2 64M")
		if id := strings.TrimSpace(r.sh("pvesh get /cluster/nextid")); id != "100" {
			r.t.Errorf("nextid %s: a number with volumes but no VM is free", id)
		}
		clones(r, 100)
		r.sh("qm destroy 100") // only what its config names
		r.wantVolume("local-zfs:vm-100-work", true)
		clones(r, 100)
		r.sh("qm destroy 100 --destroy-unreferenced-disks 1")
		r.wantVolume("local-zfs:vm-100-work", false)
		if r.has("local", "local:100/vm-100-work.qcow2") {
			r.t.Error("the volume on the other storage is still there")
		}
	})
}

// A disk that is reassigned has another id and another owner: the id that was
// written down names nothing, and the new owner's destroy takes the disk.
func TestTrap03ReassignRenames(t *testing.T) {
	t.Parallel()
	onBoth(t, func(r *replay) {
		volumes(r, "vm-9999-work 64M")
		r.sh("qm set 101 --scsi1 local-zfs:vm-9999-work,serial=work")
		r.sh("qm disk move 101 scsi1 --target-vmid 102 --target-disk scsi1")
		r.wantVolume("local-zfs:vm-9999-work", false)
		r.wantConfig(102, "scsi1: local-zfs:vm-102-disk-1,", true)
		r.sh("qm destroy 102")
		r.wantVolume("local-zfs:vm-102-disk-1", false)
	})
}

// After a detach there is no unusedN for a foreign disk, and deleting unusedN
// of an own disk destroys its data.
func TestTrap04DetachOfOwnAndForeign(t *testing.T) {
	t.Parallel()
	onBoth(t, func(r *replay) {
		volumes(r, "vm-9999-work 64M")
		r.sh("qm set 101 --scsi1 local-zfs:vm-9999-work --scsi2 local-zfs:1")
		r.sh("qm set 101 --delete scsi1,scsi2")
		r.wantConfig(101, "unused0: local-zfs:vm-101-disk-1", true)
		r.wantConfig(101, "unused1:", false)
		r.wantVolume("local-zfs:vm-9999-work", true)
		r.sh("qm set 101 --delete unused0")
		r.wantVolume("local-zfs:vm-101-disk-1", false)
	})
}

// A snapshot of a sandbox would hold the workspace attached to it, and its
// rollback would undo the workspace's work and attach it again, though another
// VM has it now.
func TestTrap05RollbackTakesTheWorkspaceAlong(t *testing.T) {
	t.Parallel()
	onBoth(t, func(r *replay) {
		volumes(r, "vm-9999-work 64M")
		r.sh("qm set 101 --scsi1 local-zfs:vm-9999-work")
		r.sh("qm snapshot 101 s1")
		r.sh("qm set 101 --delete scsi1")
		r.sh("qm set 102 --scsi1 local-zfs:vm-9999-work")
		r.sh("qm rollback 101 s1")
		r.wantConfig(101, "scsi1: local-zfs:vm-9999-work", true)
		r.wantConfig(102, "scsi1: local-zfs:vm-9999-work", true)
	})
}

// A workspace turns up as unusedN of a sandbox that let it go, and keeps a
// snapshot of a sandbox that is gone: on ZFS that snapshot blocks things.
func TestTrap06SnapshotsOfForeignVolumesStay(t *testing.T) {
	t.Parallel()
	onBoth(t, func(r *replay) {
		volumes(r, "vm-9999-work 64M")
		r.sh("qm set 101 --scsi1 local-zfs:vm-9999-work")
		r.sh("qm snapshot 101 s1")
		r.sh("qm set 101 --delete scsi1")
		r.sh("qm delsnapshot 101 s1")
		r.wantConfig(101, "unused1: local-zfs:vm-9999-work", true)
		r.sh("qm set 101 --delete unused1") // only the line goes
		r.wantVolume("local-zfs:vm-9999-work", true)

		r.sh("qm set 101 --scsi1 local-zfs:vm-9999-work")
		r.sh("qm snapshot 101 s2")
		r.sh("qm destroy 101")
		if s := r.n.ZFSSnapshots("local-zfs:vm-9999-work"); len(s) != 1 || !strings.HasSuffix(s[0], "@s2") {
			r.t.Errorf("snapshots left on the workspace: %v, want @s2", s)
		}
	})
}

// On ZFS an older snapshot cannot be gone back to, a snapshot of one's own
// blocks the node's, and is gone with the volume.
func TestTrap07OnlyTheNewestSnapshot(t *testing.T) {
	t.Parallel()
	onBoth(t, func(r *replay) {
		r.sh("qm snapshot 101 s1")
		r.sh("qm snapshot 101 s2")
		r.fails("can't rollback, 's1' is not most recent snapshot on", "qm rollback 101 s1")
		r.n.ZFSSnapshot("local-zfs:vm-101-disk-0", "own")
		r.fails("can't rollback, 's2' is not most recent snapshot on", "qm rollback 101 s2")
		r.sh("qm destroy 101")
		r.wantVolume("vm-101-disk-0", false)
	})
}

// A volume that two configs name is not told, not even when both VMs run.
func TestTrap08OneVolumeInTwoConfigs(t *testing.T) {
	t.Parallel()
	onBoth(t, func(r *replay) {
		volumes(r, "vm-9999-work 64M")
		r.sh("qm set 101 --scsi1 local-zfs:vm-9999-work")
		r.sh("qm set 102 --scsi1 local-zfs:vm-9999-work")
		r.sh("qm start 101")
		r.sh("qm start 102")
	})
}

// By their exit codes these failures look like successes.
func TestTrap09ExitCodesOfFailures(t *testing.T) {
	t.Parallel()
	onBoth(t, func(r *replay) {
		r.says("you can't start a vm if it's a template", "pvesh create /nodes/pve/qemu/9000/status/start")
		r.says("shrinking disks is not supported", "qm resize 101 scsi0 1M")
		r.says("base volume 'base-9000-disk-0' is still in use by linked clones", "pvesm free local-zfs:base-9000-disk-0")
		r.sh("qm snapshot 102 s1")
		if _, errs, _ := r.run([]string{"qm", "template", "102"}); !strings.Contains(errs, "contains snapshots") {
			r.t.Errorf("qm template: %q", errs)
		}
		r.fails("does not exist", "qm config 777")
		r.fails("is still in use by linked cloned", "qm destroy 9000")
	})
}

// A number from nextid may be given to someone else before it is used: the
// loser hears of it from its task, not from the call.
func TestTrap16NextidDoesNotReserve(t *testing.T) {
	t.Parallel()
	onBoth(t, func(r *replay) {
		for range 2 {
			if id := strings.TrimSpace(r.sh("pvesh get /cluster/nextid")); id != "100" {
				r.t.Fatalf("nextid %s, want 100 each time", id)
			}
		}
		// The first one is held after its early checks, before it takes the number.
		hold := make(chan struct{})
		reached := make(chan struct{})
		r.n.Fail("qmclone", pvenode.Fault{VMID: 100, Hold: hold, Reached: func() { close(reached) }})
		first := r.call(http.MethodPost, "/nodes/pve/qemu/9000/clone", [][2]string{{"newid", "100"}})
		<-reached
		second := r.call(http.MethodPost, "/nodes/pve/qemu/9000/clone", [][2]string{{"newid", "100"}})
		if end := r.waitTask(upidOf(second.body)); !strings.Contains(end, `"OK"`) {
			r.t.Errorf("the second: %s", end)
		}
		close(hold)
		if end := r.waitTask(upidOf(first.body)); !strings.Contains(end, "unable to create VM 100: config file already exists") {
			r.t.Errorf("the first, which came last: %s", end)
		}
		r.wantConfig(100, "scsi0: local-zfs:base-9000-disk-0/vm-100-disk-0", true)
	})
}

// Who changes the template while sandboxes are made makes their clones fail.
func TestTrap17CloneWaitsBrieflyForTheTemplate(t *testing.T) {
	t.Parallel()
	onBoth(t, func(r *replay) {
		release := r.n.HoldLock("/var/lock/qemu-server/lock-9000.conf")
		r.fails("can't lock file '/var/lock/qemu-server/lock-9000.conf' - got timeout", "qm clone 9000 103")
		release()
		clones(r, 103)
	})
}

// A sandbox of a protected template cannot be destroyed; one of a template
// that starts with the node starts with it; and so on.
func TestTrap18WhatACloneInherits(t *testing.T) {
	t.Parallel()
	onBoth(t, func(r *replay) {
		r.writeFile("/var/lib/vz/snippets/hook.sh", 0o755, "#!/bin/sh\n")
		r.sh("qm set 9000 --protection 1 --hookscript local:snippets/hook.sh --cicustom user=local:snippets/x.yaml --args -S --affinity 0-1 --startup order=1")
		r.call(http.MethodPost, "/nodes/pve/qemu/9000/firewall/rules", [][2]string{{"type", "in"}, {"action", "ACCEPT"}})
		clones(r, 103)
		for _, line := range []string{"protection: 1", "onboot: 1", "tags: tpl", "description: golden image", "hookscript: ",
			"cicustom: ", "args: -S", "affinity: 0-1", "startup: order=1"} {
			r.wantConfig(103, line, true)
		}
		if r.n.FirewallFile("103") == "" {
			r.t.Error("the firewall's file was not copied")
		}
		r.fails("can't remove VM 103 - protection mode enabled", "qm destroy 103")
		r.sh("qm set 103 --protection 0")
		r.sh("qm destroy 103")
		if r.n.FirewallFile("103") != "" {
			r.t.Error("the firewall's file stays after destroy")
		}
	})
}

// Linked clones live where the template does, take no storage or format, and
// keep the template from being destroyed, but on LVM-thin.
func TestTrap19LinkedClones(t *testing.T) {
	t.Parallel()
	onBoth(t, func(r *replay) {
		r.fails("parameter 'storage' not allowed for linked clones", "qm clone 9000 103 --storage local-zfs")
		r.fails("parameter 'format' not allowed for linked clones", "qm clone 9000 103 --format raw")
		r.fails("is still in use by linked cloned", "qm destroy 9000")
		r.wantConfig(9000, "template: 1", true)
	})
	t.Run("lvmthin", func(t *testing.T) {
		t.Parallel()
		r := newReplayOn(t, "8.4", "trap", pvenode.Config{Waits: pvenode.ShortWaits(), Storages: []pvenode.Storage{
			{ID: "local-lvm", Type: pvenode.LVMThin}, {ID: "local", Type: pvenode.Dir}}})
		files(r)
		r.sh("qm create 9000 --name tmpl --scsi0 local-lvm:0,import-from=/root/cloud.img")
		r.sh("qm template 9000")
		r.sh("qm clone 9000 103")
		r.wantConfig(103, "scsi0: local-lvm:vm-103-disk-0,", true) // no parent in its name
		r.sh("qm destroy 9000")
		if !r.has("local-lvm", "local-lvm:vm-103-disk-0") {
			r.t.Error("the thin clone did not survive its origin")
		}
	})
}

// A change that failed makes every later one fail, and the disk that was to
// be deleted is out of the boot order though it is still there.
func TestTrap28PoisonedPendingChange(t *testing.T) {
	t.Parallel()
	onBoth(t, func(r *replay) {
		r.sh("qm snapshot 101 s1")
		r.fails("volume is still in use (snapshot?)", "qm unlink 101 --idlist scsi0 --force 1")
		r.fails("unable to apply pending change scsi0", "qm set 101 --name other")
		r.wantConfig(101, "name: other", true) // and yet it was done
		r.wantConfig(101, "scsi0:", false)
		r.wantConfig(101, "boot: order=scsi0", false)
		r.sh("qm set 101 --revert scsi0")
		r.wantConfig(101, "scsi0: local-zfs:base-9000-disk-0/vm-101-disk-0", true)
		r.wantConfig(101, "boot: order=scsi0", false)
		r.sh("qm set 101 --boot order=scsi0")
		r.wantConfig(101, "boot: order=scsi0", true)
	})
}

// Who reads the config of a running VM sees what it will have, not what it
// has.
func TestTrap29PendingLooksLikeCurrent(t *testing.T) {
	t.Parallel()
	onBoth(t, func(r *replay) {
		r.sh("qm start 101")
		r.sh("qm set 101 --cores 2 --memory 512")
		r.wantConfig(101, "cores: 2", true)
		if now := r.sh("qm config 101 --current 1"); !strings.Contains(now, "cores: 1\n") || !strings.Contains(now, "memory: 256\n") {
			r.t.Errorf("in force: %s", now)
		}
		if p := r.sh("qm pending 101"); !strings.Contains(p, "cur cores: 1\nnew cores: 2\n") {
			r.t.Errorf("pending: %s", p)
		}
		r.sh("qm stop 101")
		r.sh("qm start 101")
		if now := r.sh("qm config 101 --current 1"); !strings.Contains(now, "cores: 2\n") {
			r.t.Errorf("after a cold start: %s", now)
		}
	})
}

// A POST that attaches a zvol that is not there holds the VM's lock for five
// minutes: nothing else can be done with the VM meanwhile.
func TestTrap30MissingZvolHoldsTheLock(t *testing.T) {
	t.Parallel()
	onBoth(t, func(r *replay) {
		waits, hold := make(chan struct{}), make(chan struct{})
		r.n.Fail("zvol.wait", pvenode.Fault{VMID: 101, Reached: func() { close(waits) }, Hold: hold})
		a := r.call(http.MethodPost, "/nodes/pve/qemu/101/config", [][2]string{{"scsi1", "local-zfs:vm-9999-nosuch"}})
		<-waits
		r.fails("can't lock file '/var/lock/qemu-server/lock-101.conf' - got timeout", "qm set 101 --name x")
		close(hold)
		if end := r.waitTask(upidOf(a.body)); !strings.Contains(end, "timeout: no zvol device link for 'vm-9999-nosuch' found after 300 sec.") {
			r.t.Errorf("task: %s", end)
		}
		r.sh("qm set 101 --name x")
	})
}

// A stop that is sent while a shutdown waits for the guest fails, unless it
// overrules it; of a VM that is stopped already both succeed.
func TestTrap31StopDuringShutdown(t *testing.T) {
	t.Parallel()
	onBoth(t, func(r *replay) {
		r.guest(101).deaf()
		r.sh("qm stop 101")
		r.says("not running", "qm shutdown 101 --timeout 1")
		r.sh("qm start 101")
		a := r.call(http.MethodPost, "/nodes/pve/qemu/101/status/shutdown", [][2]string{{"timeout", "100"}})
		r.waitFor("the lock of 101", func() bool { return r.n.Locked("/var/lock/qemu-server/lock-101.conf") })
		r.fails("got timeout", "qm stop 101")
		r.sh("qm stop 101 --overrule-shutdown 1")
		if end := r.waitTask(upidOf(a.body)); strings.Contains(end, `"OK"`) {
			r.t.Errorf("the shutdown was not aborted: %s", end)
		}
		if s := r.sh("qm status 101"); s != "status: stopped\n" {
			r.t.Error(s)
		}
	})
}

// A suspend to disk that fails leaves a lock that only root at the node's
// command line can take away: the API can neither stop nor destroy the VM.
func TestTrap32FailedSuspendLeavesItsLock(t *testing.T) {
	t.Parallel()
	onBoth(t, func(r *replay) {
		r.sh("qm start 101")
		r.n.Fail("suspend.state", pvenode.Fault{Error: "no space"})
		r.fails("no space", "qm suspend 101 --todisk 1")
		a := r.call(http.MethodPost, "/nodes/pve/qemu/101/status/stop", nil)
		if end := r.waitTask(upidOf(a.body)); !strings.Contains(end, "VM is locked (suspending)") {
			r.t.Errorf("stop: %s", end)
		}
		r.sh("qm unlock 101")
		r.sh("qm stop 101")
		// Room for twice the memory and 500 MiB is taken.
		r.n.Fill("local-zfs", true)
		r.sh("qm start 101")
		r.fails("out of space", "qm suspend 101 --todisk 1")
	})
}

// Names that are not as Proxmox wants them are refused, or come back changed.
func TestTrap36Names(t *testing.T) {
	t.Parallel()
	onBoth(t, func(r *replay) {
		for _, bad := range []string{"x", "1bad", strings.Repeat("s", 41)} {
			r.fails("snapname: ", "qm snapshot 101 "+bad)
		}
		r.sh("qm snapshot 101 " + strings.Repeat("s", 40))
		r.fails("reserved name", "qm snapshot 101 current")
		r.fails("does not look like a valid DNS name", "qm set 101 --name under_score")
		r.sh("qm set 101 --tags Zed;a;B;a")
		r.wantConfig(101, "tags: a;b;zed", true)
		r.fails("invalid characters in tag", "qm", "set", "101", "--tags", "x!")
		group := r.call(http.MethodPost, "/cluster/firewall/groups", [][2]string{{"group", strings.Repeat("g", 19)}})
		if !strings.HasPrefix(group.status, "400") {
			r.t.Errorf("group of 19 characters: %s", group.status)
		}
	})
}

// The same number means other sizes in different calls, and a boolean is 1 or
// 0 over REST though the command line takes words.
func TestTrap37BooleansAndSizes(t *testing.T) {
	t.Parallel()
	onBoth(t, func(r *replay) {
		put := func(k, v string) string {
			return r.call(http.MethodPut, "/nodes/pve/qemu/101/config", [][2]string{{k, v}}).status[:3]
		}
		if put("onboot", "1") != "200" || put("onboot", "yes") != "400" || put("onboot", "true") != "400" {
			r.t.Error("a form's boolean is 1 or 0")
		}
		r.sh("qm set 101 --onboot yes")
		content := func(name, size string) string {
			return r.call(http.MethodPost, "/nodes/pve/storage/local-zfs/content",
				[][2]string{{"vmid", "9999"}, {"filename", name}, {"size", size}}).status[:3]
		}
		if content("vm-9999-kib", "65536") != "200" || content("vm-9999-t", "1T") != "400" {
			r.t.Error("content counts KiB and knows no T")
		}
		if out := r.sh("pvesm list local-zfs --vmid 9999"); !strings.Contains(out, "67108864") {
			r.t.Errorf("65536 is 64 MiB there: %s", out)
		}
		r.sh("qm set 101 --scsi1 local-zfs:1")
		r.wantConfig(101, "scsi1: local-zfs:vm-101-disk-1,size=1G", true)
		r.sh("qm resize 101 scsi1 1T")
		r.wantConfig(101, "scsi1: local-zfs:vm-101-disk-1,size=1T", true)
	})
}

// When a VM with an attached workspace becomes a template, the workspace
// becomes part of it: it is renamed, and its old id is invalid.
func TestTrap38TemplatesRenameForeignDisks(t *testing.T) {
	t.Parallel()
	onBoth(t, func(r *replay) {
		volumes(r, "vm-9999-disk-7 64M")
		r.sh("qm set 101 --scsi1 local-zfs:vm-9999-disk-7")
		r.sh("qm template 101")
		r.wantVolume("local-zfs:vm-9999-disk-7", false)
		r.wantVolume("local-zfs:base-9999-disk-7", true)
		r.wantConfig(101, "scsi1: local-zfs:base-9999-disk-7", true)
		r.sh("qm destroy 101")
		r.wantVolume("local-zfs:base-9999-disk-7", true)
	})
}

// One raw file among the disks makes the whole VM one that cannot be
// snapshotted.
func TestTrap39RawFilesHaveNoSnapshots(t *testing.T) {
	t.Parallel()
	onBoth(t, func(r *replay) {
		r.sh("qm set 101 --scsi1 local:1,format=raw")
		r.fails("snapshot feature is not available", "qm snapshot 101 s1")
		a := r.call(http.MethodGet, "/nodes/pve/qemu/101/feature", [][2]string{{"feature", "snapshot"}})
		if !strings.Contains(a.body, `"hasFeature":0`) {
			r.t.Errorf("feature: %s", a.body)
		}
		r.sh("qm set 101 --delete scsi1")
		r.sh("qm snapshot 101 s1")
	})
}

// A clone made beside Proxmox keeps its origin from being freed, and the
// reason is only in the log of the task: its status has the last line alone.
func TestTrap42OutsideCloneBlocksFree(t *testing.T) {
	t.Parallel()
	onBoth(t, func(r *replay) {
		volumes(r, "vm-9999-f 64M")
		r.n.ZFSSnapshot("local-zfs:vm-9999-f", "keep")
		r.n.ZFSClone("local-zfs:vm-9999-f", "keep", "local-zfs:vm-9999-fork")
		a := r.call(http.MethodDelete, "/nodes/pve/storage/local-zfs/content/vm-9999-f", nil)
		upid := upidOf(a.body)
		end := r.waitTask(upid)
		if !strings.Contains(end, `"zfs error: rpool/data/vm-9999-fork"`) || strings.Contains(end, "dependent clones") {
			r.t.Errorf("status: %s", end)
		}
		if log := strings.Join(r.taskLog(upid), "\n"); !strings.Contains(log, "filesystem has dependent clones") {
			r.t.Errorf("log: %s", log)
		}
		r.wantVolume("local-zfs:vm-9999-f", true)
	})
}
