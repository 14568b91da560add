package server

import "slices"

// verbRunJobs is required for every call that runs a task of the caller.
const verbRunJobs = "job.run"

// verbs lists the verbs to which a token may be restricted, each with what it
// allows. A route has one of them; several routes may share one. A verb is
// never renamed, because tokens stay valid after an upgrade of the daemon.
var verbs = []struct{ name, allows string }{
	{"daemon.read", "read the state of the daemon"},
	{"daemon.stop", "stop the daemon"},
	{"daemon.backup", "make a backup of the database"},
	{"daemon.clock", "confirm that the clock is right after it jumped"},
	{"daemon.dns", "start and stop the DNS responder for names of sandboxes"},
	{"doctor.make", "make doctor bundles: rows, events, logs and the configuration, without secrets"},
	{"cache.clear", "remove the objects of the registry cache"},
	{"event.read", "read and follow events"},
	{"egress.read", "read and follow egress decisions"},
	{verbRunJobs, "create jobs and upload their repositories (see what requests name, above)"},
	{"job.read", "read jobs, their logs and artifacts"},
	{"job.cancel", "cancel jobs"},
	{"message.post", "post messages"},
	{"message.read", "read and follow messages"},
	{"sandbox.create", "create and fork sandboxes, and the templates that they start from (see what requests name, above)"},
	{"sandbox.read", "read sandboxes and their consoles"},
	{"sandbox.power", "start, stop, suspend and resume sandboxes, renew their leases"},
	{"sandbox.snapshot", "save, restore and delete snapshots of sandboxes, use snapshots and disks of sandboxes in requests"},
	{"sandbox.exec", "run commands in sandboxes and connect to their ports"},
	{"sandbox.destroy", "destroy sandboxes"},
	{"workspace.read", "read workspaces and check them"},
	{"workspace.write", "create, rename, resize and copy workspaces, save and restore their content, use them in requests"},
	{"workspace.delete", "delete workspaces and their snapshots, return workspaces from the trash"},
	{"session.read", "read sessions and their history"},
	{"session.write", "create, resume, stop, copy and rename sessions, run jobs in them (see what requests name, above)"},
	{"session.delete", "delete sessions, with their workspaces"},
	{"policy.reload", "apply the current network policies of profiles to sandboxes"},
	{"profile.read", "read and check profiles"},
	{"profile.write", "change profiles"},
	{"secret.read", "read the names of secrets, use profiles with secrets in requests"},
	{"secret.write", "change secrets"},
	{"token.manage", "create, list and revoke tokens"},
	{"host.read", "read the firewall of the bridge for sandboxes and the use of the registry cache"},
	{"host.network", "apply and remove the firewall of the bridge for sandboxes"},
	{"host.drain", "drain backends, and make them usable again"},
	{"image.read", "read images and templates"},
	{"image.write", "build and remove images, remove templates"},
}

func knownVerb(name string) bool {
	return slices.ContainsFunc(verbs, func(v struct{ name, allows string }) bool { return v.name == name })
}

// target is the parameter that names the sandbox or job of a call. A token
// that is restricted to sandboxes may only make calls with a target, and only
// for its own sandboxes, so it cannot use lists and other calls about several
// sandboxes. The zero value is not valid in the route table.
type target int

const (
	noTarget  target = iota + 1 // the call has no sandbox, or is about all
	onSandbox                   // the path parameter {sandbox}: VMID or name
	onJob                       // the path parameter {job}, which counts as its sandbox
	byQuery                     // the query parameters sandbox and job; without both the call is about all
	byScope                     // one of the query parameters job and workspace
)

func (t target) String() string {
	switch t {
	case noTarget:
		return "none"
	case onSandbox:
		return "sandbox"
	case onJob:
		return "job"
	case byQuery:
		return "query"
	case byScope:
		return "scope"
	}
	return "missing"
}

// origin is where a route may be used from. The zero value is not valid in the
// route table.
type origin int

const (
	// anyOrigin: on the unix socket and, with a token, over TCP.
	anyOrigin origin = iota + 1
	// localOnly: only on the unix socket and without a token, where the
	// kernel identifies the caller. It is for calls that return or receive
	// secrets, for the management of tokens, and for stopping the daemon.
	localOnly
)

func (r origin) String() string {
	switch r {
	case anyOrigin:
		return "anywhere"
	case localOnly:
		return "local"
	}
	return "missing"
}
