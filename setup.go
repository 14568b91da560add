package agentlab

import "strings"

// SetupSource identifies what the commands under setup of a job's repository depend
// on. The caller of the API has read it in its own copy of the repository.
type SetupSource struct {
	Owner string // caller of the API; its entries are only for itself
	Repo  string // identifies the copy of the repository
	Ref   string // branch or commit whose jobs may use the entry
	// Default means that the commit is part of the default branch: the jobs of all
	// branches may use its entry.
	Default bool
	Sum     string // lower-case hex SHA-256 of the commands and of the files that they read
}

// maxSetupRepo is the maximum length of Repo and Ref of a SetupSource, in bytes.
const maxSetupRepo = 4 << 10

// Validate returns an error with code invalid unless the fields have their format.
func (s *SetupSource) Validate() error {
	for _, f := range []struct{ name, value string }{{"repo", s.Repo}, {"ref", s.Ref}} {
		if f.value == "" || len(f.value) > maxSetupRepo || !IsPrintable(f.value) {
			return Errorf(CodeInvalid, "it is not a text of 1 to %d bytes", maxSetupRepo).WithField("setup." + f.name)
		}
	}
	if len(s.Sum) != 64 || !IsHex(s.Sum, 64) || s.Sum != strings.ToLower(s.Sum) {
		return Errorf(CodeInvalid, "it is not a SHA-256 in hex").WithField("setup.sum")
	}
	return nil
}

// SetupEntry describes a snapshot that was saved after the commands under setup of a
// repository have run. The zero value means that a snapshot is none.
type SetupEntry struct {
	Key  string // hash of all that a job must share to use it
	Repo string
	Ref  string // the branch whose jobs may use it; "" means all
}

// JobSetup is how a job uses the snapshots after setup. The zero value means that it
// does not.
type JobSetup struct {
	Entry  SetupEntry // of the snapshot that it uses or makes; zero if it does neither
	Reused bool       // the snapshot is that of an earlier job
	Note   string     // why it runs the commands itself, although its repository has some
}
