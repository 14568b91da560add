package pvenode_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab/test/pvenode"
)

const stateVolume = "local-zfs:vm-101-state-s1"

// The memory of a VM is a volume of its own. A rollback starts the VM, with the
// configuration of the snapshot, in the same task.
func TestSnapshotWithMemory(t *testing.T) {
	t.Parallel()
	onBoth(t, func(r *replay) {
		r.sh("qm snapshot 101 stopped --vmstate 1")
		if slices.Contains(r.n.Volumes(101), "local-zfs:vm-101-state-stopped") {
			r.t.Error("a VM that does not run has no memory to save")
		}
		r.sh("qm set 101 --cores 2")
		r.sh("qm start 101")
		r.sh("qm snapshot 101 s1 --vmstate 1")
		if !slices.Contains(r.n.Volumes(101), stateVolume) || !r.n.Running(101) {
			r.t.Errorf("volumes %q", r.n.Volumes(101))
		}
		r.sh("qm stop 101")
		r.sh("qm set 101 --cores 1")
		r.sh("qm rollback 101 s1")
		if cfg := r.n.Config(101); !r.n.Running(101) || cfg["cores"] != "2" || cfg["runningcpu"] != "" || cfg["vmstate"] != "" {
			r.t.Errorf("running %v, %v", r.n.Running(101), cfg)
		}
		r.sh("qm delsnapshot 101 s1")
		if slices.Contains(r.n.Volumes(101), stateVolume) {
			r.t.Error("the memory stays")
		}
		r.sh("qm snapshot 101 s1 --vmstate 1")
		r.sh("qm stop 101")
		r.sh("qm destroy 101")
		if left := r.n.Volumes(101); len(left) > 0 {
			r.t.Errorf("left: %q", left)
		}
	})
}

// A killed worker leaves the lock, the section of the snapshot and its memory. A
// forced deletion does not pass the lock, and the volume that was made before the
// configuration was written is in the way of the next attempt.
func TestSnapshotKilled(t *testing.T) {
	t.Parallel()
	onBoth(t, func(r *replay) {
		r.sh("qm start 101")
		r.n.Fail("snapshot.commit", pvenode.Fault{Kill: true})
		if _, _, rc := r.run(strings.Fields("qm snapshot 101 s1 --vmstate 1")); rc == 0 {
			r.t.Error("the killed snapshot succeeds")
		}
		r.fails("VM is locked (snapshot)", "qm delsnapshot 101 s1 --force 1")
		r.sh("qm unlock 101")
		r.fails("unable to rollback to incomplete snapshot (snapstate = prepare)", "qm rollback 101 s1")
		r.sh("qm delsnapshot 101 s1 --force 1")
		if slices.Contains(r.n.Volumes(101), stateVolume) || strings.Contains(r.n.ConfigFile(101), "[s1]") {
			r.t.Errorf("left: %q\n%s", r.n.Volumes(101), r.n.ConfigFile(101))
		}

		r.n.Fail("snapshot.alloc", pvenode.Fault{Kill: true})
		r.run(strings.Fields("qm snapshot 101 s1 --vmstate 1"))
		r.fails("dataset already exists", "qm snapshot 101 s1 --vmstate 1")
		r.sh("pvesm free " + stateVolume)
		r.sh("qm snapshot 101 s1 --vmstate 1")
	})
}
