package guestapi

// The repository of a session in its sandbox.
const (
	RepoDir      = "/work/repo" // on the workspace of the session
	ProjectDir   = "/workspace" // a link to RepoDir
	WorktreesDir = ".worktrees" // in RepoDir; has the work trees of further branches
)

// AgentHome is the home directory of the user agent in all images.
const AgentHome = "/home/agent"

// Limits on what a guest reports about a repository.
const (
	MaxRepoState    = 8 << 20 // bytes of a RepoState as JSON
	MaxRepoBranches = 10000
	MaxWorktrees    = 200
)

// AgentName and AgentEmail are the identity of commits in a guest that has no other.
const (
	AgentName  = "AgentLab agent"
	AgentEmail = "agent@agentlab.invalid"
)

// RepoInit is the input of 'agentlab-agent repo init'.
type RepoInit struct {
	Branch    string `json:"branch"`               // that is checked out in a new repository
	Origin    string `json:"origin,omitempty"`     // URL of the remote origin, unless the repository has one
	UserName  string `json:"user_name,omitempty"`  // of new commits, unless the repository has one
	UserEmail string `json:"user_email,omitempty"` // as UserName
	// Exclude are untracked files that the host sends, which are not work of the agent; nil
	// means that those of the last call stay. An earlier agentlab-agent ignores it.
	Exclude []string `json:"exclude"`
}

// SavedDir is a directory of the workspace: the submodules that updates of the checkout
// replaced, and checkouts that git could not read, by job.
const SavedDir = ".agentlab-saved"

// RepoState is the output of 'agentlab-agent repo state'.
type RepoState struct {
	Branches  map[string]string `json:"branches"`  // commits by the names of branches
	Worktrees []RepoWorktree    `json:"worktrees"` // the first is RepoDir
	// Elsewhere counts work that is in none of them: stashes, files with uncommitted
	// changes in work trees outside of RepoDir, commits that only their HEAD has, commits
	// in submodules, and jobs that have put something into SavedDir.
	Elsewhere int `json:"elsewhere,omitempty"`
	// Stashes is how many of Elsewhere are stashes; nil from an earlier version.
	Stashes *int `json:"stashes,omitempty"`
	// ModuleWork counts those of Elsewhere that are commits in submodules, by the directory
	// of the submodule, which is relative to RepoDir.
	ModuleWork map[string]int `json:"module_work,omitempty"`
	// Modules are the commits of submodules that the host has sent.
	Modules []string `json:"modules,omitempty"`
}

// RepoWorktree is a work tree of a session.
type RepoWorktree struct {
	Dir         string `json:"dir"`              // relative to RepoDir; "" is RepoDir itself
	Branch      string `json:"branch,omitempty"` // "" if its HEAD is detached
	Head        string `json:"head,omitempty"`   // "" before the first commit
	Uncommitted int    `json:"uncommitted"`      // files with uncommitted changes
}

// MainWorktree is the DIR of 'agentlab-agent repo programs' that means the main work tree,
// without the others, which are below it.
const MainWorktree = "."

// RepoPrograms is the output of 'agentlab-agent repo programs DIR': what runs with a
// working directory in DIR, which is relative to RepoDir.
type RepoPrograms struct {
	Names  []string `json:"names"`  // of programs other than shells
	Shells int      `json:"shells"` // shells that wait for a command
}

// MaxRepoPrograms limits RepoPrograms.Names.
const MaxRepoPrograms = 20

// RepoPack is the input of 'agentlab-agent repo pack', which writes a git bundle, or
// nothing if the receiver has everything.
type RepoPack struct {
	Branches []string `json:"branches"`
	Have     []string `json:"have"` // commits that the receiver has, with their history
	// Changes has the uncommitted changes of the work tree in Dir added, as a commit
	// on top of its HEAD in RefChanges.
	Changes bool   `json:"changes,omitempty"`
	Dir     string `json:"dir,omitempty"`
}

// RepoReceive is the first line of the input of 'agentlab-agent repo receive'. A git
// bundle follows it, unless the repository has all commits.
type RepoReceive struct {
	Updates []RepoUpdate `json:"updates"`
	// Changes is a commit whose difference from its first parent is applied to the
	// work tree in Dir.
	Changes string `json:"changes,omitempty"`
	Dir     string `json:"dir,omitempty"`
	// Checkout is a branch to check out in RepoDir after the updates, unless that has
	// uncommitted changes. The state of the repository shows whether it is.
	Checkout string `json:"checkout,omitempty"`
}

// RepoUpdate sets a branch, and the work tree that has it checked out.
type RepoUpdate struct {
	Branch string `json:"branch"`
	Commit string `json:"commit"` // "" deletes the branch
	Force  bool   `json:"force,omitempty"`
}

// RepoReceived is the output of 'agentlab-agent repo receive'.
type RepoReceived struct {
	Errors  map[string]string `json:"errors"`            // why a branch was not updated
	Modules string            `json:"modules,omitempty"` // why submodules are not checked out
}

// RepoLFS is the first line of the input of 'agentlab-agent repo lfs receive' and 'repo lfs
// pack'. With receive, objects of the list follow, which are stored and put into the work
// trees in place of their pointers. Pack writes those that the repository has.
type RepoLFS struct {
	Objects []LFSObject `json:"objects"`
}

// RefLFS begins the refs of a bundle for an object of Git LFS, which is a blob in it; its
// SHA-256 follows.
const RefLFS = "refs/agentlab/lfs/"

// LFSObject is an object of Git LFS.
type LFSObject struct {
	OID  string `json:"oid"` // SHA-256
	Size int64  `json:"size"`
}

// RepoLFSReceived is the output of 'agentlab-agent repo lfs receive'.
type RepoLFSReceived struct {
	Missing   []string `json:"missing"`   // objects of the list that the repository does not have
	Installed bool     `json:"installed"` // Git LFS; without it, pointers stay
}
