package pve

import (
	"errors"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
)

// recordedTexts are all texts that the recordings of 8.4 and 9.2 have as an
// answer or as the exit status of a task, for calls that this package makes.
var recordedTexts = []struct {
	status int
	text   string
	code   agentlab.Code
}{
	{500, "Configuration file 'nodes/pve/qemu-server/101.conf' does not exist", agentlab.CodeNotFound},
	{500, "unable to find configuration file for VM 101 on node 'pve'", agentlab.CodeNotFound},
	{500, "unable to create VM 9000 - VM 9000 already exists on node 'pve'", agentlab.CodeExists},
	{500, "unable to create VM 101: config file already exists", agentlab.CodeExists},
	{500, "zfs error: cannot create 'rpool/data/vm-9999-agentlab-ws2': dataset already exists", agentlab.CodeExists},
	{500, "disk image '/var/lib/vz/images/9999/vm-9999-ws1.qcow2' already exists", agentlab.CodeExists},
	{500, "create pool failed: pool 'agentlab' already exists", agentlab.CodeExists},
	{500, "can't lock file '/var/lock/qemu-server/lock-102.conf' - got timeout", agentlab.CodeBusy},
	{500, "can't lock file '/var/lock/pve-manager/pve-storage-local-zfs' - got timeout", agentlab.CodeBusy},
	{500, "cfs-lock 'storage-nfs' error: got lock request timeout", agentlab.CodeBusy},
	{500, "VM is locked (suspending)", agentlab.CodeBusy},
	{500, "VM is locked (clone)", agentlab.CodeBusy},
	{500, "checksum mismatch (file change by other user?)", agentlab.CodeBusy},
	{500, "Failed to obtain guest migration lock - replication running?", agentlab.CodeBusy},
	{500, "zfs error: cannot destroy 'rpool/data/vm-9999-hot': dataset is busy", agentlab.CodeBusy},
	{500, "VM 101 not running", agentlab.CodeConflict},
	{500, "VM 101 is not running", agentlab.CodeConflict},
	{500, "VM 101 already running", agentlab.CodeConflict},
	{500, "VM 101 is running - destroy failed", agentlab.CodeConflict},
	{500, "VM is paused - cannot shutdown", agentlab.CodeConflict},
	{500, "base volume 'base-9000-disk-0' is still in use by linked clones", agentlab.CodeConflict},
	{500, "base volume 'local-zfs:base-9000-disk-0' is still in use by linked cloned", agentlab.CodeConflict},
	{500, "you can't start a vm if it's a template", agentlab.CodeConflict},
	{500, "scsi0: unable to apply pending change scsi0 : unable to delete 'local-zfs:base-9000-disk-0/vm-101-disk-0' - volume is still in use (snapshot?)", agentlab.CodeConflict},
	{500, "can't remove VM 101 - protection mode enabled", agentlab.CodeDenied},
	{500, "can't remove drive 'scsi0' - protection mode enabled", agentlab.CodeDenied},
	{500, "only root can set 'affinity' config", agentlab.CodeDenied},
	{500, "Only root can pass arbitrary filesystem paths. at /usr/share/perl5/PVE/Storage.pm line 651.", agentlab.CodeDenied},
	{403, "Permission check failed (/vms/9000, VM.Clone)", agentlab.CodeDenied},
	{403, "Permission check failed (/vms/101, VM.GuestAgent.Audit|VM.GuestAgent.Unrestricted)", agentlab.CodeDenied},
	{403, "Permission check failed", agentlab.CodeDenied},
	{403, "Permission check failed (pool 'nosuch' does not exist)", agentlab.CodeInvalid},
	{401, "No ticket", agentlab.CodeDenied},
	{401, "Authentication failed!", agentlab.CodeDenied},
	{500, "QEMU guest agent is not running", agentlab.CodeUnavailable},
	{500, "No QEMU guest agent configured", agentlab.CodeUnavailable},
	{500, "VM 101 qga command 'guest-ping' failed - got timeout", agentlab.CodeUnavailable},
	{500, "VM quit/powerdown failed - got timeout", agentlab.CodeTimeout},
	{500, "Linked clone feature is not supported for 'local-zfs:base-9000-disk-0/vm-101-disk-0' (scsi0)", agentlab.CodeUnsupported},
	{500, "Full clone feature is not supported for a snapshot of 'local-zfs:base-9000-disk-0/vm-101-disk-0' (scsi0)", agentlab.CodeUnsupported},
	{500, "snapshot name 's1' already used", agentlab.CodeExists},
	{500, "can't rollback, 's1' is not most recent snapshot on 'local-zfs:base-9000-disk-0/vm-101-disk-0'", agentlab.CodeConflict},
	{500, "snapshot feature is not available", agentlab.CodeUnsupported},
	{500, "parameter 'storage' not allowed for linked clones", agentlab.CodeUnsupported},
	{501, "Method 'GET /nosuch' not implemented", agentlab.CodeUnsupported},
	{0, "No 'get' handler defined for '/nosuch'", agentlab.CodeUnsupported},
	{500, "storage 'nosuch' does not exist", agentlab.CodeInvalid},
	{500, "no such cluster node 'nosuch'", agentlab.CodeInvalid},
	{500, "hostname lookup 'other' failed - failed to get address info for: other: Temporary failure in name resolution", agentlab.CodeUnavailable},
	{500, "volume 'local:snippets/nosuch.yaml' does not exist", agentlab.CodeUnavailable},
	{500, "bridge 'nosuch' does not exist", agentlab.CodeUnavailable},
	{500, "timeout: no zvol device link for 'vm-9999-nosuch' found after 10 sec.", agentlab.CodeUnavailable},
	{500, "zfs error: cannot create 'rpool/data/vm-1-disk-0': out of space", agentlab.CodeNoSpace},
	{500, "unexpected status", agentlab.CodeUnknownOutcome},
	{500, "clone failed: can't lock file '/var/lock/pve-manager/pve-storage-local-zfs' - got timeout", agentlab.CodeBusy},
	{500, "clone failed: lvcreate 'pve/vm-101-disk-0' error: Cannot create new thin volume, free space in thin pool pve/data reached threshold.", agentlab.CodeNoSpace},
	{500, "clone failed: not enough free space (5 < 10)", agentlab.CodeNoSpace},
	{500, "KVM virtualisation configured, but not available. Either disable in VM configuration or enable in BIOS.", agentlab.CodeUnavailable},
	{500, "clone failed: Configuration file 'nodes/pve/qemu-server/101.conf' does not exist", agentlab.CodeInternal},

	// Nothing of this proves anything.
	{500, "start failed: QEMU exited with code 1", agentlab.CodeInternal},
	{500, "zfs error: cannot open 'rpool/data/vm-9999-nosuch': dataset does not exist", agentlab.CodeInternal},
	{500, "snapshot 's1' does not exist", agentlab.CodeInternal},
	{500, "Disk 'unused9' for VM '101' does not exist", agentlab.CodeInternal},
	{500, "shrinking disks is not supported", agentlab.CodeInternal},
	{500, "Agent error: Configuration file 'nodes/pve/qemu-server/101.conf' does not exist", agentlab.CodeInternal},
	{500, "Agent error: dataset is busy, no space left on device, pool 'x' already exists", agentlab.CodeInternal},
	{500, "see unable to find configuration file for VM 101 on node 'pve', or not", agentlab.CodeInternal},
	{500, "", agentlab.CodeInternal},
	{404, "not found", agentlab.CodeInternal},
}

func TestFaultsOfTheRecordings(t *testing.T) {
	for _, r := range recordedTexts {
		err := callError("do it", &Fault{Status: r.status, Message: r.text})
		if got := agentlab.CodeOf(err); got != r.code {
			t.Errorf("%d %q is %s, want %s", r.status, r.text, got, r.code)
		}
		if r.text != "" && !strings.Contains(err.Error(), strings.TrimRight(r.text, ".")) {
			t.Errorf("the text %q is not in %q", r.text, err)
		}
		if f, ok := faultOf(err); !ok || f.Message != r.text {
			t.Errorf("%q: the answer is not in the chain of the error", r.text)
		}
	}
}

func TestRefusedParameters(t *testing.T) {
	for _, c := range []struct {
		param, text string
		code        agentlab.Code
	}{
		{"name", "invalid format - value does not look like a valid DNS name\n", agentlab.CodeInvalid},
		{"vmid", "VM 9000 already exists", agentlab.CodeExists},
		{"skiplock", "Only root may use this option.", agentlab.CodeDenied},
		{"upid", "no such task", agentlab.CodeNotFound},
		{"bogus", "property is not defined in schema and the schema does not allow additional properties", agentlab.CodeUnsupported},
		{"scsi0", "unable to apply pending change scsi0 : unable to delete 'local-zfs:vm-101-disk-0' - volume is still in use (snapshot?)", agentlab.CodeConflict},
		{"scsi1", "hotplug problem - unplug failed", agentlab.CodeInvalid},
	} {
		err := callError("configure VM 101", &Fault{Status: 400, Message: "Parameter verification failed.", Params: map[string]string{c.param: c.text}})
		if got := agentlab.CodeOf(err); got != c.code {
			t.Errorf("%s: %q is %s, want %s", c.param, c.text, got, c.code)
		}
		if e, _ := errors.AsType[*agentlab.Error](err); e.Field != c.param || strings.Contains(e.Error(), "\n") {
			t.Errorf("field %q, text %q", e.Field, e)
		}
	}
}

// not_found must be about the requested VM: an answer about another VM proves
// nothing.
func TestNotFoundIsAboutTheRequestedVM(t *testing.T) {
	gone := callError("read", &Fault{Status: 500, Message: "Configuration file 'nodes/pve/qemu-server/102.conf' does not exist"})
	if got := agentlab.CodeOf(onlyAboutVM(gone, 102)); got != agentlab.CodeNotFound {
		t.Errorf("of the same VM: %s", got)
	}
	if got := agentlab.CodeOf(onlyAboutVM(gone, 101)); got != agentlab.CodeInternal {
		t.Errorf("of another VM: %s", got)
	}
	u, _ := ParseUPID("UPID:pve:00002562:0004063E:6B00F952:qmdestroy:101:root@pam:")
	if got := agentlab.CodeOf(explainTask(u, "Configuration file 'nodes/pve/qemu-server/102.conf' does not exist", nil)); got != agentlab.CodeInternal {
		t.Errorf("a task's, of another VM: %s", got)
	}
	if got := agentlab.CodeOf(explainTask(u, "Configuration file 'nodes/pve/qemu-server/101.conf' does not exist", nil)); got != agentlab.CodeNotFound {
		t.Errorf("a task's, of its VM: %s", got)
	}
	if got := agentlab.CodeOf(explainTask(u, "oops", []string{"Configuration file 'nodes/pve/qemu-server/101.conf' does not exist"})); got != agentlab.CodeInternal {
		t.Errorf("in the log only: %s", got)
	}
}

func TestHintsSayWhatToGrant(t *testing.T) {
	err := callError("clone", &Fault{Status: 403, Message: "Permission check failed (/vms/101, VM.GuestAgent.Audit|VM.GuestAgent.Unrestricted)"})
	if h := agentlab.HintOf(err); !strings.Contains(h, "VM.GuestAgent.Audit or VM.GuestAgent.Unrestricted on /vms/101") {
		t.Errorf("hint %q", h)
	}
}

func TestDiagnosisOfPrograms(t *testing.T) {
	for _, c := range []struct{ diag, message, param, reason string }{
		{"Configuration file 'nodes/pve/qemu-server/777.conf' does not exist\n", "Configuration file 'nodes/pve/qemu-server/777.conf' does not exist", "", ""},
		{"for my (...) is experimental at /usr/share/perl5/PVE/LXC.pm line 1635.\nVM 101 is running - destroy failed\n", "VM 101 is running - destroy failed", "", ""},
		{"trying to acquire lock...\ncan't lock file '/var/lock/qemu-server/lock-102.conf' - got timeout\n", "can't lock file '/var/lock/qemu-server/lock-102.conf' - got timeout", "", ""},
		{"400 Parameter verification failed.\nvmid: VM 9000 already exists\npvesh get <api_path> [OPTIONS] [FORMAT_OPTIONS]\n", "Parameter verification failed.", "vmid", "VM 9000 already exists"},
		{"for my (...) is experimental at /x line 1.\n400 Parameter verification failed.\nnet0: invalid format - format error\nnet0.macaddr: invalid format\n\nqm set <vmid> [OPTIONS]\n", "Parameter verification failed.", "net0", "invalid format - format error net0.macaddr: invalid format"},
		{"Only root can pass arbitrary filesystem paths. at /usr/share/perl5/PVE/Storage.pm line 651.\n", "Only root can pass arbitrary filesystem paths. at /usr/share/perl5/PVE/Storage.pm line 651.", "", ""},
		{"for my (...) is experimental at /usr/share/perl5/PVE/LXC.pm line 1635.\n", "for my (...) is experimental at /usr/share/perl5/PVE/LXC.pm line 1635.", "", ""},
		{"Wide character in die at /x line 1.\nAgent error: x\nConfiguration file 'nodes/pve/qemu-server/101.conf' does not exist\n", "Agent error: x", "", ""},
		{"Agent error: x\n400 Parameter verification failed.\nname: y\n", "Agent error: x", "", ""},
		{"VM 101 is running - destroy failed\nproxy handler failed: command '/usr/bin/ssh' failed: exit code 25\n", "VM 101 is running - destroy failed", "", ""},
	} {
		f := parseDiagnosis(c.diag)
		if f.Message != c.message || c.param != "" && f.Params[c.param] != c.reason {
			t.Errorf("%q: %+v", c.diag, f)
		}
	}
	if f := parseDiagnosis("trying to acquire lock...\n OK\n"); f != nil {
		t.Errorf("nothing was said: %+v", f)
	}
}

// Each class matches its own text of the node, and no other class's.
func TestClasses(t *testing.T) {
	classes := []Class{NoLinkedClone, VMRuns, VMProtected, NotNewestSnapshot}
	for i, text := range []string{
		"Linked clone feature is not supported for drive 'scsi0'", "VM 101 is running - destroy failed", "can't remove VM 101 - protection mode enabled",
		"can't rollback, 's1' is not most recent snapshot on 'local-zfs:vm-101-disk-0'",
	} {
		err := callError("call", &Fault{Status: 500, Message: text})
		for j, c := range classes {
			if c.Is(err) != (i == j) {
				t.Errorf("%q: class %d: %v", text, j, c.Is(err))
			}
		}
	}
}
