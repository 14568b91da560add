// Package fake is a driver without virtual machines, for tests of everything
// above the driver contract: services, daemon, command line. It keeps the
// contract of package backend (the conformance suite says so), fails where it
// is told to, and has guests that answer guest control and run jobs over the
// real guest plane. It executes nothing on the host.
//
// A Host is the machine on which the "VMs" run; a Driver is one opening of
// it, as agentlabd has one. Closing or crashing a Driver leaves the VMs
// running, and the next Open finds them. With Config.Dir a Host also outlives
// its process: every change is on disk before a method returns, and the next
// process goes on with every guest and every job where they were.
//
// # Guests
//
// A guest answers health, identity, exec, attach, ssh-key and power. Exec
// knows true, false, echo, cat, env, hostname, sleep SECONDS, exit N, curl URL
// (every host is the controller), egress VERDICT HOST:PORT [RULE] (see Jobs) and sh -c with a list of these separated by
// ";"; an empty command is a shell that reads such lines. DialGuest finds an echo service on port 7 and a
// banner on port 22; every other port refuses.
//
// Some beginnings of a sandbox's name change its guest: "never-boots" never
// answers, "crash-boots" crashes right after its start, "never-stops" does not
// power off when it is asked, "no-runner" has no runner. The VM of a sandbox
// whose name ends with "-slow" takes a second to be stopped or destroyed.
//
// # Jobs
//
// The runner of a fake guest fetches its bootstrap, reports, sends the log,
// obeys directives and uploads, as agent-runner does. The task of the job
// tells what the agent would do, one command per line:
//
//	echo TEXT           a line of the log
//	exit N              the agent ends with this code (default 0 at the end)
//	sleep DURATION      does nothing for so long (Go syntax, "1.5s")
//	hang                does nothing until it is stopped or its time is over
//	silent              from here on nothing is heard of the runner, the VM runs on
//	stubborn            from here on the deadline and directives to stop are ignored
//	crash-vm            the VM crashes
//	poweroff            the VM powers itself off
//	artifact NAME TEXT  uploads a file
//	artifact64 NAME BASE64
//	                    uploads a file with these bytes
//	egress VERDICT HOST:PORT [RULE]
//	                    a record of the egress log; VERDICT is allow or deny
//	env NAME            a line of the log with the value of a secret variable
//	repo                fetches the repository bundle and logs its size
//	report JSON         sends a report as it stands (hostile guests)
//
// Anything else ends the agent with code 127.
package fake
