package guestapi

// Exit codes of 'agentlab-agent files'. Another code than 0 comes with a message on
// standard error, which ends with the name of the file for FilesExists.
const (
	FilesChanged  = 10 // the archive is complete, but files changed while they were read
	FilesMissing  = 20 // there is no such file
	FilesIsDir    = 21 // a directory is where a file is needed
	FilesSpecial  = 22 // neither a file nor a directory
	FilesExists   = 23 // it would replace a file
	FilesNotADir  = 24 // a file is where a directory is needed
	FilesNoTarget = 25 // the directory of the destination is missing
	FilesCut      = 26 // the archive is incomplete
	FilesUnsized  = 27 // the file has content but no size, as files of /proc
	FilesDenied   = 28 // the user may not read or write a file
	FilesNoSpace  = 29 // the disk is full
)

// The kinds of sources that 'agentlab-agent files' copies.
const (
	FilesFile    = "file"    // a file
	FilesTree    = "tree"    // a directory
	FilesContent = "content" // the content of a directory, which goes into one that exists or is new
)

// FilesStage begins the name of the directory beside a destination in which 'agentlab-agent
// files push' extracts an archive.
const FilesStage = ".agentlab-cp-"

// The entries of an archive for 'agentlab-agent files push'. An archive that is cut off
// between two entries looks complete, so something must show its end: for a directory the
// empty file FilesEnd after the files, which are below FilesNew; and for a file, which
// comes in parts with the name FilesPart, the size of all in FilesSizeDigits digits as the
// last part.
const (
	FilesNew        = "new"
	FilesEnd        = "end"
	FilesPart       = "part"
	FilesSizeDigits = 20
)

// Exit codes of 'agentlab-agent workspace check' that do not depend on errors of the file
// system; the others are those of e2fsck(8).
const (
	MaintainNoFileSystem = 8  // the disk has no superblock
	MaintainFailed       = 16 // e2fsck or tar did not run
)

// ContainerUnsupported is the exit code of 'agentlab-agent devcontainer --build' in an image
// that cannot build dev containers.
const ContainerUnsupported = 90
