package transfer

import (
	"bytes"
	"context"
	"os"
	"slices"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
)

// IgnoreFile names files of a repository that are not sent, in the syntax of
// .gitignore.
const IgnoreFile = ".agentlabignore"

// EnvPatterns are git's patterns of environment files.
var EnvPatterns = []string{":(glob)**/.env", ":(glob)**/.env.*", ":(glob)**/.envrc"}

// The limits of environment files.
const (
	maxEnvFiles = 1000
	maxEnvFile  = 1 << 20  // bytes
	maxEnvBytes = 64 << 20 // of all
)

// SentEnvFiles are the environment files that were sent to a sandbox.
type SentEnvFiles struct {
	Sandbox   string   `json:"sandbox"`
	Directory string   `json:"directory"`
	Files     []string `json:"files"` // sorted, relative to the top of the repository
}

// SendEnvFiles copies the environment files of the work tree that contains the directory
// repo to the directory dir of a sandbox, which must exist, and replaces those that are
// there. They are .env, .env.* and .envrc in any directory, if git does not track them,
// except in directories that git ignores as a whole, in other repositories, and what
// .agentlabignore names. It sends nothing but these files, and nothing at all if there
// are none.
func SendEnvFiles(ctx context.Context, c *client.Client, sandbox, repo, dir string) (SentEnvFiles, error) {
	sent := SentEnvFiles{Sandbox: sandbox, Directory: dir, Files: []string{}}
	p, err := packEnvFiles(ctx, repo)
	if err != nil || p == nil {
		return sent, err
	}
	defer func() { _ = p.Close() }()
	// The dot at the end requires that the directory exists.
	to := Place{sandbox, strings.TrimRight(dir, "/") + "/."}
	if err := sendArchive(ctx, c, to, Options{Force: true}, "", p); err != nil {
		return sent, err
	}
	sent.Files = p.names
	return sent, nil
}

// PackEnvFiles returns the environment files that SendEnvFiles sends, and their archive.
func PackEnvFiles(ctx context.Context, repo string) (names []string, archive []byte, err error) {
	p, err := packEnvFiles(ctx, repo)
	if err != nil || p == nil {
		return nil, nil, err
	}
	defer func() { _ = p.Close() }()
	var out bytes.Buffer
	err = p.pack(&out)
	return p.names, out.Bytes(), err
}

// packEnvFiles returns a packer of environment files; nil if there are none.
func packEnvFiles(ctx context.Context, repo string) (*packer, error) {
	top, names, err := FindEnvFiles(ctx, repo)
	if err != nil || len(names) == 0 {
		return nil, err
	}
	root, err := os.OpenRoot(top)
	if err != nil {
		return nil, work.LocalFault(top, err)
	}
	total := int64(0)
	for _, name := range names {
		st, err := root.Lstat(name)
		switch {
		case err != nil:
			err = work.LocalFault(name, err)
		case st.Size() > maxEnvFile:
			err = agentlab.Errorf(agentlab.CodeLimit, "%s has %s, more than the %s of an environment file", name, work.ByteSize(st.Size()), work.ByteSize(maxEnvFile)).
				WithHint("name it in %s, or copy it with 'agentlab cp'", IgnoreFile)
		default:
			if total += st.Size(); total > maxEnvBytes {
				err = agentlab.Errorf(agentlab.CodeLimit, "%s has more than %s of environment files", top, work.ByteSize(maxEnvBytes)).WithHint("name directories in %s", IgnoreFile)
			}
		}
		if err != nil {
			_ = root.Close()
			return nil, err
		}
	}
	return &packer{kind: guestapi.FilesContent, name: top, root: root, names: names, show: func() {}}, nil
}

// FindEnvFiles returns the top of a work tree and its environment files.
func FindEnvFiles(ctx context.Context, repo string) (top string, names []string, err error) {
	if top, err = gitsafe.Git(ctx, repo, "rev-parse", "--show-toplevel"); err != nil {
		return "", nil, agentlab.Errorf(agentlab.CodeInvalid, "%s is not in the work tree of a git repository: %v", repo, err).WithField("repo")
	}
	var found []string
	for _, args := range [][]string{{"--exclude-standard"}, {"--exclude-standard", "--ignored", "--directory"}} {
		some, err := ListFiles(ctx, top, args, EnvPatterns)
		if err != nil {
			return "", nil, err
		}
		found = append(found, some...)
	}
	slices.Sort(found)
	found = slices.Compact(found)
	if len(found) > maxEnvFiles {
		return "", nil, agentlab.Errorf(agentlab.CodeLimit, "%s has %d environment files, more than %d", top, len(found), maxEnvFiles).WithHint("name directories in %s", IgnoreFile)
	}
	if len(found) == 0 {
		return top, nil, nil
	}
	without, err := IgnoredNames(ctx, top, found)
	if err != nil {
		return "", nil, err
	}
	return top, slices.DeleteFunc(found, func(name string) bool { return without[name] }), nil
}

// ListFiles returns files that git does not track, without directories.
func ListFiles(ctx context.Context, top string, args, patterns []string) ([]string, error) {
	args = slices.Concat([]string{"ls-files", "-z", "--others"}, args, []string{"--"}, patterns)
	out, err := gitsafe.Command{Raw: true}.Run(ctx, top, args...)
	if err != nil {
		return nil, agentlab.Errorf(agentlab.CodeInvalid, "git cannot list the files of %s: %w", top, err)
	}
	var names []string
	for name := range strings.SplitSeq(out, "\x00") {
		if name != "" && !strings.HasSuffix(name, "/") {
			names = append(names, name)
		}
	}
	return names, nil
}
