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
	{"", "t7", "POST /nodes/pve/storage/local/upload", "the recorder kept the status line of this answer alone"},
	{"", "t7", "GET /nodes/pve/tasks limit=2 source=all", "total counts the tasks of every recording before"},
	{"", "t8", "GET /nodes/pve/certificates/info", "the authority's key has 2048 bits, not 4096: it is made for each test"},
	{"9.2", "t7", "GET /pools/agentlab", staleBroadcast},
	{"9.2", "t7", "GET /cluster/resources type=vm", staleBroadcast},
	{"9.2", "t8", "GET /pools/lab2", staleBroadcast},
	{"9.2", "t8", "GET /pools poolid=lab2", staleBroadcast},
}

const staleBroadcast = "the recorded node answers from a broadcast of before the VM was made, with what an earlier one of that number had"
