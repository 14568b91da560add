// Package supervisor runs one virtual machine of any driver in a separate
// process ("agentlabd vmm DIR"): it owns the VM's private network, its console
// and its control link, enforces its deadline, and pauses it while the host's
// disk is nearly full. The supervisor keeps running when the daemon ends; the
// VM ends with the supervisor.
//
// # Two sides
//
//   - Run is the supervisor's process. A driver provides a Kind, which opens the
//     VM that the driver described in start.json.
//   - Dir is the driver's side, in the daemon. It keeps no state in memory:
//     everything is in the directory (files.go).
//
// # What the files mean
//
// A supervisor is alive exactly while a process holds the lock of shim.lock;
// the driver takes it before it starts the supervisor, which inherits it, so
// there is no gap. The VM's process is alive exactly while a process holds the
// lock of its own lock file (Dir.Process). Process IDs are hints: before a
// process is signalled, its start time is compared with the recorded one.
// state.json has the result of the last run; "running" there without a held
// lock means that the supervisor was killed.
package supervisor
