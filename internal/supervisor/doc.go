// Package supervisor runs one virtual machine of any driver in a process of its
// own ("agentlabd vmm DIR"): it owns the VM's private network, its console and
// its control link, enforces its deadline, and pauses it while the host's disk
// is nearly full. The supervisor outlives the daemon; the VM ends with it.
//
// # Two sides
//
//   - Run is the supervisor's process. A driver gives it a Kind, which opens the
//     VM that the driver described in start.json.
//   - Dir is the driver's side, in the daemon. It keeps no state in memory:
//     everything is in the directory (files.go).
//
// # What the files mean
//
// A supervisor is alive exactly while a process holds the lock of shim.lock;
// the driver takes it before it starts the supervisor and hands it down, so
// there is no moment between. The VM's process is alive exactly while a process
// holds the lock of its own lock file (Dir.Process). Process IDs are hints:
// before a process is signalled, its start time is compared with the recorded
// one. state.json says how the last run ended; "running" there without a held
// lock means that the supervisor was killed.
package supervisor
