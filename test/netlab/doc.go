// Package netlab makes networks of namespaces for tests: the test runs in
// network, mount and process namespaces of its own, which are the host, and
// what is around it (the internet behind the uplink, machines of the LAN) are
// namespaces too, each held by a process that the test starts. Nothing in them
// has a way out of the machine, and nothing is left of them when the test
// ends, however it ends: daemons that it started die with it too.
package netlab
