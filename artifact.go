package agentlab

import (
	"strings"
	"unicode"
	"unicode/utf8"
)

// Limits on the path of an artifact.
const (
	MaxArtifactPathBytes = 512
	MaxArtifactPathDepth = 16
)

// ArtifactLog is the log of a job's agent.
const ArtifactLog = "agent.log"

// ArtifactResult is the git bundle of a job's commits and uncommitted changes.
const ArtifactResult = "result.bundle"

// ArtifactLFS is the objects of Git LFS to which the commits of a job point.
const ArtifactLFS = "lfs.objects"

// The artifacts of a job's checkpoint: git bundles of the agent's work, which the
// runner sends while the agent works. ArtifactCheckpoint has everything since
// the commit that the job started from, ArtifactIncrement what is new since
// ArtifactCheckpoint. They do not count towards the limits on artifacts.
const (
	ArtifactCheckpoint = "checkpoint.bundle"
	ArtifactIncrement  = "checkpoint-increment.bundle"

	MaxCheckpointBytes = 256 << 20 // of one of them
)

// IsCheckpoint reports whether an artifact is part of a checkpoint.
func IsCheckpoint(path string) bool { return path == ArtifactCheckpoint || path == ArtifactIncrement }

// InJobBundle reports whether an artifact is part of the bundle of its job: the result and
// what explains it, without declared outputs and the files of attempts.
func InJobBundle(path string) bool {
	return !strings.HasPrefix(path, "outputs/") && !strings.HasPrefix(path, "attempts/")
}

// ValidateArtifactPath checks the path of a file that a guest uploads. The
// path is relative, with single slashes, in printable UTF-8, without the
// special characters of file systems and shells. No component begins with a
// dot or a hyphen, or ends with a dot or a space. So a download into any
// directory creates no hidden file and no name that a command reads as an
// option.
func ValidateArtifactPath(p string) error {
	bad := func(why string) error {
		return Errorf(CodeInvalid, "%q is not an artifact path: %s", Cut(p, 80), why).WithField("path")
	}
	switch {
	case p == "":
		return bad("it is empty")
	case len(p) > MaxArtifactPathBytes:
		return bad("it is too long")
	case strings.Count(p, "/") >= MaxArtifactPathDepth:
		return bad("it is too deep")
	case !utf8.ValidString(p):
		return bad("it is not UTF-8")
	}
	for _, r := range p {
		if !unicode.IsPrint(r) || strings.ContainsRune(`\:*?"<>|`, r) {
			return bad("it contains a character that is not allowed")
		}
	}
	for part := range strings.SplitSeq(p, "/") {
		switch {
		case part == "":
			return bad("it has an empty component")
		case len(part) > 255:
			return bad("a component is too long")
		case part[0] == '.' || part[0] == '-' || part[0] == ' ':
			return bad("a component begins with a dot, a hyphen or a space")
		case strings.HasSuffix(part, ".") || strings.HasSuffix(part, " "):
			return bad("a component ends with a dot or a space")
		}
	}
	return nil
}
