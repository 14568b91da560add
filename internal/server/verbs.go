package server

import "slices"

// verbRunJobs is needed for whatever runs a task of the caller's own.
const verbRunJobs = "job.run"

// verbs are what a token may be restricted to, each with what it allows. A
// route has one of them; several routes may share one. A verb of a token is
// never renamed, since tokens outlive the daemon that made them.
var verbs = []struct{ name, allows string }{
	{"daemon.read", "read the state of the daemon"},
	{"daemon.stop", "stop the daemon"},
	{"daemon.backup", "make a backup of the database"},
	{"daemon.clock", "confirm that the clock is right after it jumped"},
	{"event.read", "read and follow events"},
	{"egress.read", "read and follow egress decisions"},
	{verbRunJobs, "create jobs and upload their repositories"},
	{"job.read", "read jobs, their logs and artifacts"},
	{"job.cancel", "cancel jobs"},
	{"sandbox.create", "create sandboxes (a job in them also needs job.run)"},
	{"sandbox.read", "read sandboxes and their consoles"},
	{"sandbox.power", "start, stop, suspend and resume sandboxes, renew their leases"},
	{"sandbox.exec", "run commands in sandboxes and connect to their ports"},
	{"sandbox.destroy", "destroy sandboxes"},
	{"policy.reload", "apply the current network policies of profiles to sandboxes"},
	{"profile.read", "read and check profiles"},
	{"profile.write", "change profiles"},
	{"secret.read", "read the names of secrets"},
	{"secret.write", "change secrets"},
	{"token.manage", "create, list and revoke tokens"},
	{"host.read", "read the firewall of the bridge for sandboxes"},
	{"host.network", "apply and remove the firewall of the bridge for sandboxes"},
	{"image.read", "read images"},
	{"image.write", "build and remove images"},
}

func knownVerb(name string) bool {
	return slices.ContainsFunc(verbs, func(v struct{ name, allows string }) bool { return v.name == name })
}

// target says what names the sandbox or job that a call is about. A token
// that is bound to sandboxes may only make calls that have one, and only for
// its own; so lists, and whatever concerns more than one sandbox, are not for
// it. The zero value is refused in the route table.
type target int

const (
	noTarget  target = iota + 1 // the call is about none, or about all
	onSandbox                   // the path parameter {sandbox}: VMID or name
	onJob                       // the path parameter {job}, which counts as its sandbox
	byQuery                     // the query parameters sandbox and job; a call without both is about all
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
	}
	return "missing"
}

// reach says from where a route may be used. The zero value is refused in the
// route table.
type reach int

const (
	// anywhere: on the unix socket and, with a token, over TCP.
	anywhere reach = iota + 1
	// localOnly: only by a process that the kernel vouches for, on the unix
	// socket and without a token. It is for what hands out or takes in
	// secrets, for the tokens themselves, and for ending the daemon.
	localOnly
)

func (r reach) String() string {
	switch r {
	case anywhere:
		return "anywhere"
	case localOnly:
		return "local"
	}
	return "missing"
}
