package transfer

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/config"
	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
)

// Git's settings for dotfiles. Only the user's own configuration counts, not that of a
// repository.
const (
	dotfilesKey        = "agentlab.dotfiles"
	dotfilesInstallKey = "agentlab.dotfilesinstall"
)

// The limits of dotfiles.
const (
	maxDotfiles     = 2000
	maxDotfile      = 1 << 20  // bytes
	maxDotfileBytes = 16 << 20 // of all
	dotfilesAge     = time.Hour
	dotfilesLimit   = time.Minute // of a clone
)

// secretDotfiles are patterns of names that are not sent, of files and of directories, in any
// directory. They are lower case.
var secretDotfiles = []string{
	".git", ".ssh", ".gnupg", ".aws", ".azure", ".kube", ".docker", ".password-store", ".netrc", "_netrc", ".npmrc", ".yarnrc*", ".pypirc", ".pgpass", ".my.cnf",
	".git-credentials", ".env", ".env.*", ".envrc", "gh", "gcloud", "op", "rclone", ".config.gcloud", "*history*", "id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*",
	"*.pem", "*.key", "*.p12", "*.pfx", "*.kdbx", "*.age", "*.gpg", "*credential*", "*secret*", "*token*", "*password*", "auth.json",
	".claude.json", ".cache", "node_modules",
}

// Dotfiles are files of the user for the home directory of sandboxes.
type Dotfiles struct {
	Sum     string // identifies all; hexadecimal
	Install string // a file among them; "" for none

	dir   string   // on this machine
	names []string // sorted
	left  int      // files that are not sent
}

// FindDotfiles returns the user's dotfiles; nil if there are none.
func FindDotfiles(ctx context.Context, ui work.UI, repo string) (*Dotfiles, error) {
	source := userSetting(ctx, repo, dotfilesKey)
	if source == "" {
		return nil, nil
	}
	dir, err := dotfilesDir(ctx, ui, source)
	if err != nil {
		return nil, err
	}
	d, err := readDotfiles(dir, userSetting(ctx, repo, dotfilesInstallKey))
	if err != nil || len(d.names) == 0 {
		return nil, err
	}
	return &d, nil
}

// Pack returns the archive of the files.
func (d *Dotfiles) Pack() ([]byte, error) {
	p, err := openPacker(d.dir+"/.", nil)
	if err != nil {
		return nil, err
	}
	defer func() { _ = p.Close() }()
	p.names = d.names
	var archive bytes.Buffer
	err = p.pack(&archive)
	return archive.Bytes(), err
}

// NoteSent says that the files were sent.
func (d *Dotfiles) NoteSent(ui work.UI) {
	text := "sent " + agentlab.Plural(len(d.names), "dotfile")
	if d.left > 0 {
		text += fmt.Sprintf("; %d links, large files and files that can contain secrets are not sent", d.left)
	}
	ui.Progressf("%s", text)
}

// userSetting returns a setting of the user's Git configuration, "" if it is not set. A
// repository cannot set it.
func userSetting(ctx context.Context, repo, key string) string {
	in := gitsafe.Command{}
	if file, ok := os.LookupEnv("GIT_CONFIG_GLOBAL"); ok {
		in.Env = []string{"GIT_CONFIG_GLOBAL=" + file}
	}
	value, _ := in.Run(ctx, repo, "config", "--global", "--get", key) // fails if it is not set
	return value
}

// dotfilesDir returns the directory with the dotfiles; a repository is cloned, and
// brought up to date once an hour.
func dotfilesDir(ctx context.Context, ui work.UI, source string) (string, error) {
	if rest, ok := strings.CutPrefix(source, "~/"); ok {
		home, err := os.UserHomeDir()
		if err != nil {
			return "", err
		}
		source = filepath.Join(home, rest)
	}
	if filepath.IsAbs(source) {
		return source, nil
	}
	if !strings.Contains(source, ":") || strings.HasPrefix(source, "-") || strings.Contains(source, "::") {
		return "", agentlab.Errorf(agentlab.CodeInvalid, "%q is neither an absolute path nor the URL of a git repository", source).WithField(dotfilesKey).
			WithHint("git config --global %s ~/dotfiles", dotfilesKey)
	}
	p, err := config.ResolvePaths(os.Getenv, false)
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256([]byte(source))
	dir := filepath.Join(p.Cache, "dotfiles", hex.EncodeToString(sum[:8]))
	if st, err := os.Stat(dir); err == nil && time.Since(st.ModTime()) < dotfilesAge {
		return dir, nil
	}
	return dir, cloneDotfiles(ctx, ui, source, dir)
}

// cloneDotfiles replaces dir by a clone of a repository. Without the repository, an
// older clone is used.
func cloneDotfiles(ctx context.Context, ui work.UI, source, dir string) error {
	ctx, cancel := context.WithTimeout(ctx, dotfilesLimit)
	defer cancel()
	if err := os.MkdirAll(filepath.Dir(dir), 0o700); err != nil {
		return err
	}
	const pattern = ".clone-*"
	gitsafe.RemoveKilled(filepath.Dir(dir), pattern)
	tmp, remove, err := gitsafe.LockedDir(filepath.Dir(dir), pattern)
	if err != nil {
		return err
	}
	defer remove()
	err = gitsafe.UsersGit(ctx, ui, "clone", "--quiet", "--depth=1", "--no-tags", "--config", "core.symlinks=false", "--", source, filepath.Join(tmp, "work"))
	if err != nil {
		if _, old := os.Stat(dir); old == nil && ctx.Err() == nil {
			ui.Progressf("note: the dotfiles were not brought up to date: %s", agentlab.WithoutControls(err.Error()))
			return nil
		}
		return agentlab.Errorf(agentlab.CodeUnavailable, "the dotfiles cannot be cloned: %w", err).WithField(dotfilesKey).
			WithHint("clone the repository manually to see why, or remove the setting: git config --global --unset %s", dotfilesKey)
	}
	if err := os.RemoveAll(dir); err != nil {
		return err
	}
	err = os.Rename(filepath.Join(tmp, "work"), dir)
	if errors.Is(err, fs.ErrExist) { // the clone of another command, as new as this one
		return nil
	}
	return err
}

// readDotfiles lists the files below dir that are sent. It follows no links.
func readDotfiles(dir, install string) (Dotfiles, error) {
	d := Dotfiles{dir: dir, Install: install}
	if home, err := os.UserHomeDir(); err == nil && sameFile(home, dir) {
		return d, agentlab.Errorf(agentlab.CodeDenied, "the home directory is not a directory of dotfiles").WithField(dotfilesKey).
			WithHint("copy the files that sandboxes may have to a directory of their own")
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return d, work.LocalFault(dir, err)
	}
	defer func() { _ = root.Close() }()
	h, total := sha256.New(), int64(0)
	err = fs.WalkDir(root.FS(), ".", func(name string, e fs.DirEntry, err error) error {
		if err != nil || name == "." {
			return err
		}
		if secretDotfile(e.Name()) {
			d.left++
			if e.IsDir() {
				return fs.SkipDir
			}
			return nil
		}
		if e.IsDir() {
			return nil
		}
		st, err := e.Info()
		if err != nil {
			return err
		}
		if !st.Mode().IsRegular() || st.Size() > maxDotfile {
			d.left++
			return nil
		}
		data, err := root.ReadFile(name)
		if err != nil {
			return err
		}
		if total += st.Size(); total > maxDotfileBytes || len(d.names) == maxDotfiles {
			return agentlab.Errorf(agentlab.CodeLimit, "%s has more than %d files or %s of dotfiles", dir, maxDotfiles, work.ByteSize(maxDotfileBytes)).WithField(dotfilesKey)
		}
		d.names = append(d.names, name)
		_, _ = fmt.Fprintf(h, "%q %o %d %s\n", name, st.Mode().Perm(), len(data), data)
		return nil
	})
	if err != nil {
		return d, work.LocalFault(dir, err)
	}
	if install != "" && (!filepath.IsLocal(install) || !slices.Contains(d.names, install)) {
		return d, agentlab.Errorf(agentlab.CodeInvalid, "%q is not one of the dotfiles", install).WithField(dotfilesInstallKey).
			WithHint("name an executable file in %s", dir)
	}
	_, _ = fmt.Fprint(h, install)
	d.Sum = hex.EncodeToString(h.Sum(nil))
	return d, nil
}

// secretDotfile reports whether files of that name often contain secrets, or are not
// configuration.
func secretDotfile(name string) bool {
	return slices.ContainsFunc(secretDotfiles, func(pattern string) bool {
		ok, _ := path.Match(pattern, strings.ToLower(name)) // the patterns are valid
		return ok
	})
}

func sameFile(a, b string) bool {
	one, err1 := os.Stat(a)
	two, err2 := os.Stat(b)
	return err1 == nil && err2 == nil && os.SameFile(one, two)
}
