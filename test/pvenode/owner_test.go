package pvenode_test

import "testing"

// A disk that another VM owns stays after the VM in which it is configured was
// destroyed, and a rollback of its owner gives it the size that it had.
func TestForeignDisk(t *testing.T) {
	t.Parallel()
	onBoth(t, func(r *replay) {
		r.sh("qm create 150 --name holder --scsi0 local-zfs:1")
		r.sh("qm set 101 --scsi9 local-zfs:vm-150-disk-0,serial=agentlab-work")
		r.sh("qm start 101")
		r.sh("qm start 102")
		r.sh("qm set 102 --scsi9 local-zfs:vm-150-disk-0") // nothing protects it
		r.sh("qm start 150")
		for _, vmid := range []string{"101", "102", "150"} {
			r.sh("qm stop " + vmid)
		}
		r.sh("qm destroy 101 --destroy-unreferenced-disks 0")
		r.wantVolume("vm-150-disk-0", true)

		r.sh("qm snapshot 150 s1")
		r.sh("qm disk resize 150 scsi0 3G")
		r.wantConfig(150, "scsi0: local-zfs:vm-150-disk-0,size=3G", true)
		r.fails("Full clone feature is not supported for a snapshot of", "qm clone 150 151 --full 1 --snapname s1")
		r.sh("qm clone 150 151 --full 1")
		r.wantConfig(151, "scsi0: local-zfs:vm-151-disk-0,size=3G", true)
		r.sh("qm rollback 150 s1")
		r.wantConfig(150, "scsi0: local-zfs:vm-150-disk-0,size=1G", true)
		r.sh("qm disk resize 150 scsi0 2G") // it has not kept 3 GiB, or this would shrink it
		r.wantConfig(150, "scsi0: local-zfs:vm-150-disk-0,size=2G", true)
		r.sh("qm destroy 150")
		r.wantVolume("vm-150-disk-0", false)
		r.wantVolume("vm-151-disk-0", true)
	})
}
