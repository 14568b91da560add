package pvenode_test

// deviations are the recorded commands and calls whose answer the fake node
// gives otherwise, with the reason. Beside them, what zfs commands the node
// issues is not replayed at all: the fake node issues none.
var deviations = []struct {
	version string // "" is both
	file    string
	text    string
	reason  string
}{
	{"", "t7", "POST /nodes/pve/storage/local/upload", "the recording contains only the status line of this answer"},
	{"", "t7", "GET /nodes/pve/tasks limit=2 source=all", "total includes the tasks of all earlier recordings"},
	{"", "t8", "GET /nodes/pve/certificates/info", "the CA key has 2048 bits, not 4096, because each test creates a new one"},
	{"", "t6", "qm start 102", "the recorded node had Debian's QEMU, which locks images; Proxmox VE's does not"},
	{"9.2", "t7", "GET /pools/agentlab", staleBroadcast},
	{"9.2", "t7", "GET /cluster/resources type=vm", staleBroadcast},
	{"9.2", "t8", "GET /pools/lab2", staleBroadcast},
	{"9.2", "t8", "GET /pools poolid=lab2", staleBroadcast},
}

const staleBroadcast = "the recorded node answers with outdated values, those of an earlier VM with this VMID"
