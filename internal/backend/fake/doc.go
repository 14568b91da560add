// Package fake is a driver without virtual machines, for tests of everything
// above the driver contract: services, daemon, command line. It fulfils the
// contract of package backend (tested by the conformance suite), fails where a
// test requests it, and has guests that answer guest control and run jobs over
// the real guest plane. It executes nothing on the host.
//
// A Host is the machine on which the "VMs" run; a Driver is one opened
// instance of it, like that of agentlabd. Closing or crashing a Driver leaves
// the VMs running, and the next Open finds them. With Config.Dir the state of
// a Host survives its process: every change is on disk before a method
// returns, and the next process continues with every guest and every job.
//
// # Guests
//
// A guest answers health, identity, exec, attach, ssh-key and power. Exec supports true, false,
// echo, cat [FILE...], env, hostname, sleep SECONDS, exit N, curl URL (every host is the controller), egress
// VERDICT HOST:PORT [RULE] (see Jobs), listen PORT [WORKTREE], sync, volume write TEXT, volume read, volume size and sh -c with a list of these separated by ";", each of
// which may end with "> FILE" to write a file to the guest's disk; an empty command is a shell that
// reads such lines. DialGuest finds an echo service on port 7 a banner
// on port 22, and a web server on each port after listen; every other port refuses.
//
// The files of a guest in /work/ are on its volume, if it has one. The program volume
// reads and writes the volume itself; without one it ends with code 3.
//
// Some prefixes of a sandbox's name change its guest: "never-boots" never
// answers, "crash-boots" crashes before it answers, as does each guest that boots with a file /damaged, "never-stops" does not
// power off when it is asked, "no-runner" has no runner, in "no-kvm" no virtual machine runs. The VM of a sandbox
// whose name ends with "-slow" takes a second to be stopped or destroyed.
//
// # Jobs
//
// The runner of a fake guest fetches its bootstrap, reports, sends the log,
// follows directives and uploads, like agent-runner. The task of the job
// defines what the agent does, one command per line:
//
//	echo TEXT           a line of the log
//	exit N              the agent ends with this code (default 0 at the end)
//	sleep DURATION waits for this time (Go syntax, "1.5s")
//	hang waits until it is stopped or its time is over
//	silent from here on the runner sends nothing; the VM keeps running
//	stubborn            from here on the deadline and directives to stop are ignored
//	crash-vm            the VM crashes
//	poweroff            the VM powers itself off
//	artifact NAME TEXT  uploads a file
//	artifact64 NAME BASE64
//	                    uploads a file with these bytes; the ID
//	                    job-2222222222222 becomes that of the job
//	egress VERDICT HOST:PORT [RULE]
//	                    a record of the egress log; VERDICT is allow or deny
//	env NAME            a line of the log with the value of a secret variable
//	repo                fetches the repository bundle and logs its size
//	report JSON sends a report unchanged (hostile guests)
//
// Anything else ends the agent with code 127.
package fake
