package pvenode

// The commands of the node's tools, as far as this project or the recordings
// use them; every other one is unknown, as a misspelled one is there.

const vmPath = "/nodes/{node}/qemu/{vmid}"

// vmCommand is a command of qm about one VM.
func vmCommand(name, method, path string, args ...string) toolCommand {
	return toolCommand{name: name, method: method, path: vmPath + path, args: append([]string{"vmid"}, args...)}
}

// upidExit makes the exit code tell whether the task failed.
func upidExit(c toolCommand) toolCommand { c.upidExit = true; return c }

// printed adds how the result is printed.
func printed(c toolCommand, show func(*tool, Response)) toolCommand { c.show = show; return c }

// keyFile lets the option sshkeys name a file.
func keyFile(c toolCommand) toolCommand { c.files = []string{"sshkeys"}; return c }

var qmCommands = toolTable{
	aliases: map[string]string{
		"importdisk": "disk import", "move-disk": "disk move", "move_disk": "disk move", "rescan": "disk rescan",
		"resize": "disk resize", "unlink": "disk unlink", "agent": "guest cmd",
	},
	commands: []toolCommand{
		{name: "list", method: "GET", path: "/nodes/{node}/qemu", show: printVMs},
		keyFile(upidExit(toolCommand{name: "create", method: "POST", path: "/nodes/{node}/qemu", args: []string{"vmid"}})),
		upidExit(vmCommand("destroy", "DELETE", "")),
		upidExit(vmCommand("clone", "POST", "/clone", "newid")),
		keyFile(vmCommand("set", "PUT", "/config")),
		printed(vmCommand("config", "GET", "/config"), printConfig),
		printed(vmCommand("pending", "GET", "/pending"), printPending),
		{name: "status", args: []string{"vmid"}, local: qmStatus, options: map[string]optionKind{"verbose": boolOption}},
		upidExit(vmCommand("snapshot", "POST", "/snapshot", "snapname")),
		upidExit(vmCommand("delsnapshot", "DELETE", "/snapshot/{snapname}", "snapname")),
		printed(vmCommand("listsnapshot", "GET", "/snapshot"), printSnapshots),
		upidExit(vmCommand("rollback", "POST", "/snapshot/{snapname}/rollback", "snapname")),
		vmCommand("template", "POST", "/template"),
		upidExit(vmCommand("start", "POST", "/status/start")),
		upidExit(vmCommand("stop", "POST", "/status/stop")),
		upidExit(vmCommand("reset", "POST", "/status/reset")),
		upidExit(vmCommand("shutdown", "POST", "/status/shutdown")),
		upidExit(vmCommand("reboot", "POST", "/status/reboot")),
		upidExit(vmCommand("suspend", "POST", "/status/suspend")),
		upidExit(vmCommand("resume", "POST", "/status/resume")),
		{name: "unlock", args: []string{"vmid"}, local: qmUnlock},
		{name: "disk import", args: []string{"vmid", "source", "storage"}, local: qmImportDisk,
			options: map[string]optionKind{"format": plainOption, "target-disk": plainOption}},
		upidExit(vmCommand("disk move", "POST", "/move_disk", "disk", "storage")),
		{name: "disk rescan", local: qmRescan, options: map[string]optionKind{"vmid": plainOption, "dryrun": boolOption}},
		vmCommand("disk resize", "PUT", "/resize", "disk", "size"),
		vmCommand("disk unlink", "PUT", "/unlink"),
		printed(vmCommand("guest cmd", "POST", "/agent", "command"), printAgent),
		{name: "guest exec", args: []string{"vmid", "extra-args"}, local: qmGuestExec,
			options: map[string]optionKind{"synchronous": boolOption, "timeout": plainOption, "pass-stdin": boolOption}},
		printed(vmCommand("guest exec-status", "GET", "/agent/exec-status", "pid"), printAgent),
		printed(vmCommand("cloudinit dump", "GET", "/cloudinit/dump", "type"), printText),
		printed(vmCommand("cloudinit pending", "GET", "/cloudinit"), printPending),
		vmCommand("cloudinit update", "PUT", "/cloudinit"),
	},
}

var pvesmCommands = toolTable{commands: []toolCommand{
	{name: "status", method: "GET", path: "/nodes/{node}/storage", show: printStorages},
	{name: "list", method: "GET", path: "/nodes/{node}/storage/{storage}/content", args: []string{"storage"}, show: printContent},
	{name: "alloc", method: "POST", path: "/nodes/{node}/storage/{storage}/content",
		args: []string{"storage", "vmid", "filename", "size"}, show: printAllocated},
	{name: "free", args: []string{"volume"}, local: pvesmFree,
		options: map[string]optionKind{"storage": plainOption, "delay": plainOption}},
	{name: "path", args: []string{"volume"}, local: pvesmPath},
}}

// accessCommand is a command of pveum.
func accessCommand(name, method, path string, args ...string) toolCommand {
	return toolCommand{name: name, method: method, path: path, args: args}
}

// formatted is a command of pveum whose result has a format.
func formatted(c toolCommand) toolCommand {
	c.format, c.show = true, func(t *tool, r Response) { t.printData(r.Data, formats{output: "text"}) }
	return c
}

var pveumCommands = toolTable{
	aliases: map[string]string{
		"useradd": "user add", "usermod": "user modify", "userdel": "user delete",
		"roleadd": "role add", "rolemod": "role modify", "roledel": "role delete",
		"aclmod": "acl modify", "acldel": "acl delete",
	},
	commands: []toolCommand{
		accessCommand("user add", "POST", "/access/users", "userid"),
		accessCommand("user modify", "PUT", "/access/users/{userid}", "userid"),
		accessCommand("user delete", "DELETE", "/access/users/{userid}", "userid"),
		formatted(accessCommand("user list", "GET", "/access/users")),
		formatted(accessCommand("user permissions", "GET", "/access/permissions", "userid")),
		formatted(accessCommand("user token add", "POST", "/access/users/{userid}/token/{tokenid}", "userid", "tokenid")),
		formatted(accessCommand("user token modify", "PUT", "/access/users/{userid}/token/{tokenid}", "userid", "tokenid")),
		formatted(accessCommand("user token delete", "DELETE", "/access/users/{userid}/token/{tokenid}", "userid", "tokenid")),
		formatted(accessCommand("user token remove", "DELETE", "/access/users/{userid}/token/{tokenid}", "userid", "tokenid")),
		formatted(accessCommand("user token list", "GET", "/access/users/{userid}/token", "userid")),
		accessCommand("role add", "POST", "/access/roles", "roleid"),
		accessCommand("role modify", "PUT", "/access/roles/{roleid}", "roleid"),
		accessCommand("role delete", "DELETE", "/access/roles/{roleid}", "roleid"),
		formatted(accessCommand("role list", "GET", "/access/roles")),
		{name: "acl modify", method: "PUT", path: "/access/acl", args: []string{"path"}, fixed: map[string]string{"delete": "0"}},
		{name: "acl delete", method: "PUT", path: "/access/acl", args: []string{"path"}, fixed: map[string]string{"delete": "1"}},
		formatted(accessCommand("acl list", "GET", "/access/acl")),
		accessCommand("pool add", "POST", "/pools", "poolid"),
		accessCommand("pool modify", "PUT", "/pools", "poolid"),
		accessCommand("pool delete", "DELETE", "/pools", "poolid"),
		formatted(accessCommand("pool list", "GET", "/pools")),
	},
}
