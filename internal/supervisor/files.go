package supervisor

// FileConsole is the file with the guest's console output, in the directory of a
// supervised VM.
const FileConsole = "console.log"

// Files in the directory of a supervised VM. The driver's own files are in the
// same directory: the disk, and those of Dir.Process.
const (
	fileStart    = "start.json"    // what to run: Start and the driver's part; written at every start
	fileState    = "state.json"    // state or result of the last run: runState
	fileDeadline = "deadline.json" // when the supervisor powers the VM off by itself: deadline
	fileEgress   = "egress.log"    // every decision about the guest's network flows, JSON lines
	fileLog      = "shim.log"      // the supervisor's log, JSON lines
	fileStderr   = "shim.stderr"   // stderr of the supervisor of the last run, such as a Go panic

	fileLock = "shim.lock" // held by the supervisor, and by the driver while it starts it
	filePID  = "shim.pid"  // processID of the supervisor

	fileSock      = "shim.sock"  // the supervisor's HTTP API, for the driver
	fileGuestSock = "guest.sock" // the supervisor forwards the guest's connections to the controller here
)
