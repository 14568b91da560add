package cli

// What the tests of the whole command tree need of this package.
var (
	ArgumentFlags = argumentFlags
	ArgumentFlag  = argumentFlag
	FlagNames     = flagNames
	IsArgument    = isArgument
)

// ExitUsage is the exit code of a usage error.
const ExitUsage = exitUsage
