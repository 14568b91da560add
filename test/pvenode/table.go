package pvenode

// apiTable is every call that the model answers. A call that is not here does
// not exist.
var apiTable []endpoint

// vmPriv is the privilege on the VM in the path.
func vmPriv(privs ...string) func(c *call) *Error {
	return func(c *call) *Error { return c.need("/vms/"+c.p.str("vmid"), privs...) }
}

func vmPrivAny(privs ...string) func(c *call) *Error {
	return func(c *call) *Error { return c.needAny("/vms/"+c.p.str("vmid"), privs...) }
}

func str(name string) param     { return param{name: name} }
func integer(name string) param { return param{name: name, kind: kInt} }
func boolean(name string) param { return param{name: name, kind: kBool} }

func (d param) must() param                           { d.need = true; return d }
func (d param) of(enum ...string) param               { d.enum = enum; return d }
func (d param) as(f func(*Node, string) string) param { d.format = f; return d }
func (d param) atLeast(lo float64) param              { d.min = f64(lo); return d }
func (d param) between(lo, hi float64) param          { d.min, d.max = f64(lo), f64(hi); return d }
func (d param) upTo(length int) param                 { d.maxLen = length; return d }

var anyConfigPriv = []string{
	"VM.Config.Disk", "VM.Config.CDROM", "VM.Config.CPU", "VM.Config.Memory", "VM.Config.Network", "VM.Config.HWType", "VM.Config.Options", "VM.Config.Cloudinit",
}

var storageParam = str("storage").as(formatStorageID)

func init() { //nolint:gochecknoinits // the functions in the table use the table
	apiTable = append(apiTable, vmCalls...)
	apiTable = append(apiTable, nodeCalls...)
	apiTable = append(apiTable, powerCalls...)
	apiTable = append(apiTable, storageCalls...)
	apiTable = append(apiTable, clusterCalls...)
	apiTable = append(apiTable, agentCalls()...)
	apiTable = append(apiTable, accessTable...)
	apiTable = append(apiTable, firewallTable...)
	apiTable = append(apiTable, snapshotTable...)
	apiTable = append(apiTable, moveTable...)
	apiTable = append(apiTable, createTable...)
	apiTable = append(apiTable, diskTable...)
	apiTable = append(apiTable, cloudinitTable...)
}

var setParams = []param{
	str("digest").upTo(64), str("delete"), str("revert"), boolean("force"), boolean("skiplock"),
}

var vmCalls = []endpoint{
	{method: "GET", path: "/nodes/{node}/qemu", params: []param{boolean("full")}, run: apiVMs},
	{method: "GET", path: "/nodes/{node}/qemu/{vmid}/config", params: []param{boolean("current"), str("snapshot").as(formatConfigID).upTo(40)}, perm: vmPriv("VM.Audit"), run: apiConfig},
	{method: "GET", path: "/nodes/{node}/qemu/{vmid}/pending", perm: vmPriv("VM.Audit"), run: apiPending},
	{method: "GET", path: "/nodes/{node}/qemu/{vmid}/status/current", perm: vmPriv("VM.Audit"), run: apiStatus},
	{method: "GET", path: "/nodes/{node}/qemu/{vmid}/feature", perm: vmPriv("VM.Audit"), run: apiFeature, params: []param{
		str("feature").must().of("snapshot", "clone", "copy"), str("snapname").as(formatConfigID).upTo(40),
	}},
	{method: "PUT", path: "/nodes/{node}/qemu/{vmid}/config", options: true, perm: vmPrivAny(anyConfigPriv...), run: apiSetSync, params: setParams},
	{method: "POST", path: "/nodes/{node}/qemu/{vmid}/config", options: true, perm: vmPrivAny(anyConfigPriv...), run: apiSetTask,
		params: append([]param{integer("background_delay").between(1, 30), str("import-working-storage").as(formatStorageID)}, setParams...)},
	{method: "POST", path: "/nodes/{node}/qemu/{vmid}/clone", run: apiClone, perm: clonePerm, params: []param{
		integer("newid").must().as(formatVMID), str("name").as(formatDNSName), str("description"), str("pool").as(formatPool), str("snapname").as(formatConfigID).upTo(40),
		storageParam, str("format").of("raw", "qcow2", "vmdk"), boolean("full"), str("target").as(formatNode), integer("bwlimit").atLeast(0),
	}},
	{method: "POST", path: "/nodes/{node}/qemu/{vmid}/status/start", perm: vmPriv("VM.PowerMgmt"), run: apiStart, params: []param{
		boolean("skiplock"), str("stateuri").upTo(128), str("migratedfrom"), str("migration_type"), str("migration_network"), str("machine"), str("force-cpu"), str("targetstorage"), integer("timeout").atLeast(0), str("nets-host-mtu"),
		{name: "with-conntrack-state", kind: kBool, only9: true},
	}},
	{method: "POST", path: "/nodes/{node}/qemu/{vmid}/status/stop", perm: vmPriv("VM.PowerMgmt"), run: apiStop, params: []param{
		boolean("skiplock"), str("migratedfrom"), integer("timeout").atLeast(0), boolean("keepActive"), boolean("overrule-shutdown"),
	}},
	{method: "POST", path: "/nodes/{node}/qemu/{vmid}/status/shutdown", perm: vmPriv("VM.PowerMgmt"), run: apiShutdown, params: []param{
		boolean("skiplock"), integer("timeout").atLeast(0), boolean("forceStop"), boolean("keepActive"),
	}},
	{method: "DELETE", path: "/nodes/{node}/qemu/{vmid}", perm: vmPriv("VM.Allocate"), run: apiDestroy, params: []param{
		boolean("skiplock"), boolean("purge"), boolean("destroy-unreferenced-disks"),
	}},
}

// clonePerm: who clones needs the source, the target and what its volumes and
// devices use.
func clonePerm(c *call) *Error {
	if err := c.need("/vms/"+c.p.str("vmid"), "VM.Clone"); err != nil {
		return err
	}
	newid, poolID := c.p.num("newid"), c.p.str("pool")
	if !c.may("/vms/"+itoa(newid), "VM.Allocate") && (poolID == "" || !c.may("/pool/"+poolID, "VM.Allocate")) {
		return denied("")
	}
	return nil
}

var nodeCalls = []endpoint{
	{method: "GET", path: "/version", run: apiVersion},
	{method: "GET", path: "/access/permissions", run: apiPermissions, params: []param{str("path"), str("userid")}},
	{method: "GET", path: "/nodes/{node}/tasks", run: apiTasks, params: []param{
		integer("start").atLeast(0), integer("limit").atLeast(0), str("userfilter"), str("typefilter"), integer("vmid").as(formatVMID), boolean("errors"),
		str("source").of("archive", "active", "all"), integer("since"), integer("until"), str("statusfilter"),
	}},
	{method: "GET", path: "/nodes/{node}/tasks/{upid}/status", run: apiTaskStatus},
	{method: "GET", path: "/nodes/{node}/tasks/{upid}/log", run: apiTaskLog, params: []param{integer("start").atLeast(0), integer("limit").atLeast(0), boolean("download")}},
	{method: "DELETE", path: "/nodes/{node}/tasks/{upid}", run: apiTaskStop},
	{method: "GET", path: "/pools", run: apiPools, params: []param{str("poolid").as(formatPool), str("type").of("qemu", "lxc", "storage")}},
	{method: "DELETE", path: "/pools", run: apiPoolDelete, perm: func(c *call) *Error { return c.need("/pool/"+c.p.str("poolid"), "Pool.Allocate") },
		params: []param{str("poolid").must().as(formatPool)}},
	{method: "POST", path: "/pools", run: apiPoolCreate, params: []param{str("poolid").must().as(formatPool), str("comment")}},
	{method: "GET", path: "/pools/{poolid}", run: apiPool, params: []param{str("type").of("qemu", "lxc", "storage")},
		perm: func(c *call) *Error { return c.need("/pool/"+c.p.str("poolid"), "Pool.Audit") }},
	{method: "PUT", path: "/pools/{poolid}", run: apiPoolUpdate, perm: func(c *call) *Error { return c.need("/pool/"+c.p.str("poolid"), "Pool.Allocate") }, params: []param{
		str("comment"), str("vms"), str("storage"), boolean("allow-move"), boolean("delete"),
	}},
	{method: "DELETE", path: "/pools/{poolid}", run: apiPoolDelete, perm: func(c *call) *Error { return c.need("/pool/"+c.p.str("poolid"), "Pool.Allocate") }},
}
