// Package gitsafe runs git on the repository of the user and on objects of guests. It runs no
// program that a repository configures, limits memory and time where objects of a guest are
// read, and checks what a merge would bring to a work tree before it happens.
package gitsafe

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/bounded"
	"github.com/agentlab-vm/agentlab/internal/work"
)

// LocalRepo reports whether the argument of --repo is a directory of this
// machine, and returns its absolute path.
func LocalRepo(arg string) (path string, local bool, err error) {
	looksLocal := arg == "." || arg == ".." || strings.HasPrefix(arg, "/") || strings.HasPrefix(arg, "./") ||
		strings.HasPrefix(arg, "../") || !strings.Contains(arg, ":")
	info, statErr := os.Stat(arg)
	switch {
	case statErr == nil && info.IsDir():
		path, err = filepath.Abs(arg)
		return path, true, err
	case looksLocal:
		return "", false, work.Usage(agentlab.Errorf(agentlab.CodeInvalid, "no directory %s", arg).WithField("repo").
			WithHint("use the path of a git repository, or a URL such as https://host/org/repo"))
	}
	return "", false, nil
}

// gitSafe are options that keep git from running programs that a repository
// configures: hooks, file system monitors, credential and other programs, pagers.
var gitSafe = []string{
	"-c", "core.hooksPath=/dev/null",
	"-c", "core.fsmonitor=false",
	"-c", "core.attributesFile=/dev/null",
	"-c", "gc.auto=0",
	"-c", "maintenance.auto=false",
	"-c", "core.pager=cat",
	"-c", "core.alternateRefsCommand=true",
}

// gitEnv is the environment of git, without inherited variables of git: in a
// hook, GIT_DIR and others point to another repository. No transport is allowed,
// not even to local files, because a transport runs programs that the repository
// configures. The configuration can override protocol.allow, but not
// GIT_ALLOW_PROTOCOL.
func gitEnv() []string {
	var env []string
	for _, kv := range os.Environ() {
		if !strings.HasPrefix(kv, "GIT_") {
			env = append(env, kv)
		}
	}
	return append(env, "GIT_TERMINAL_PROMPT=0", "GIT_OPTIONAL_LOCKS=0", "GIT_NO_LAZY_FETCH=1", "GIT_ALLOW_PROTOCOL=none", "LC_ALL=C")
}

// Command are the streams and settings of a run of git.
type Command struct {
	Stdin   io.Reader
	Stdout  io.Writer // nil means that it is returned
	Stderr  io.Writer // gets a copy, unless nil
	Env     []string
	Limited bool // git reads objects of a guest
	Patient bool // with limited: no limit of time, which would leave a half-written work tree
	Raw     bool // returned output is not trimmed
	// whole is for changes of the work tree: an interrupt does not end them halfway,
	// unless they take longer than gitGrace.
	Whole bool
}

// gitGrace is how long git may run after an interrupt.
const gitGrace = 30 * time.Second

// Git runs git in dir without prompts and returns its standard output.
func Git(ctx context.Context, dir string, args ...string) (string, error) {
	return Command{}.Run(ctx, dir, args...)
}

// gitBare is git in a bare scratch repository.
func gitBare(ctx context.Context, bare string, args ...string) (string, error) {
	return Git(ctx, bare, append([]string{"--git-dir=" + bare}, args...)...)
}

// Run runs git in dir without prompts. It returns the standard output, or else the errors
// that git has printed, in one line.
func (in Command) Run(ctx context.Context, dir string, args ...string) (string, error) {
	path, err := exec.LookPath("git")
	if err != nil {
		return "", agentlab.Errorf(agentlab.CodeUnavailable, "git is not installed").WithHint("install it, e.g. with: sudo apt install git")
	}
	argv := append([]string{path, "-C", dir}, gitSafe...)
	if in.Limited {
		argv = append(underLimits(path, argv[1:], in.Patient), gitSmall...)
	}
	argv = append(argv, args...)
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Env = append(gitEnv(), in.Env...)
	cmd.Stdin = in.Stdin
	// On SIGTERM git removes its locks and temporary files. A kill would leave a lock, with
	// which git refuses all later changes.
	cmd.WaitDelay, cmd.Cancel = gitGrace, func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	if in.Whole {
		cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // Ctrl-C is for all of a group
		cmd.Cancel = func() error { return os.ErrProcessDone }
	}
	var stdout bytes.Buffer
	stderr := bounded.Tail{Max: 64 << 10}
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if in.Stdout != nil {
		cmd.Stdout = in.Stdout
	}
	if in.Stderr != nil {
		cmd.Stderr = io.MultiWriter(in.Stderr, &stderr)
	}
	if err := cmd.Run(); err != nil {
		if ctx.Err() != nil {
			return "", ctx.Err()
		}
		return "", errors.New(cmp.Or(OneLine(stderr.String()), err.Error()))
	}
	if in.Raw {
		return stdout.String(), nil
	}
	return strings.TrimSpace(stdout.String()), nil
}

// gitMeter matches what git prints about its progress.
var gitMeter = regexp.MustCompile(`^(Enumerating|Counting|Compressing|Writing) objects: |^Delta compression using |^Total [0-9]+ `)

// OneLine returns what git prints with an error as one line, without its progress and
// hints.
func OneLine(s string) string {
	var parts []string
	for line := range strings.FieldsFuncSeq(s, func(r rune) bool { return r == '\n' || r == '\r' }) {
		if line = strings.TrimSpace(line); line != "" && !strings.HasPrefix(line, "hint:") && !gitMeter.MatchString(line) {
			parts = append(parts, line)
		}
	}
	return strings.Join(parts, "; ")
}

// LastLine returns the last line of a text.
func LastLine(s string) string { return s[strings.LastIndexByte(s, '\n')+1:] }

// DetachedBranch is the branch in the bundle for a commit that the user did not
// specify by a branch.
const DetachedBranch = "agentlab-base"

// CurrentBranch returns the branch that is checked out; "" if HEAD is detached. Git's short
// name of a branch depends on tags of that name.
func CurrentBranch(ctx context.Context, path string) string {
	ref, _ := Git(ctx, path, "symbolic-ref", "--quiet", "HEAD")
	branch, _ := strings.CutPrefix(ref, "refs/heads/")
	return branch
}

// branchName returns the branch in the bundle for the commit of ref.
func branchName(ctx context.Context, path, ref string) string {
	full, err := Git(ctx, path, "rev-parse", "--symbolic-full-name", "--end-of-options", ref)
	// Some versions of git also print --end-of-options, on a separate line.
	if name, ok := strings.CutPrefix(LastLine(full), "refs/heads/"); err == nil && ok && agentlab.ValidateRef(name) == nil {
		return name
	}
	return DetachedBranch
}

// ScratchRepo creates an empty bare repository in dir with alternates.
func ScratchRepo(ctx context.Context, dir string, objects ...string) (string, error) {
	bare := filepath.Join(dir, "repo.git")
	if _, err := Git(ctx, dir, "init", "--quiet", "--bare", "--template=", bare); err != nil {
		return "", err
	}
	info := filepath.Join(bare, "objects", "info")
	if err := os.MkdirAll(info, 0o700); err != nil {
		return "", err
	}
	return bare, os.WriteFile(filepath.Join(info, "alternates"), []byte(strings.Join(objects, "\n")+"\n"), 0o600)
}

// PackBundle packs a commit, those of its submodules, and objects of Git LFS. git writes its progress
// to progress, unless that is nil.
func PackBundle(ctx context.Context, dir string, src LocalCommit, progress io.Writer) (*os.File, error) {
	objects := []string{src.Objects}
	name := "refs/heads/" + src.Branch
	refs, update := []string{"HEAD", name}, "update "+name+" "+src.Commit+"\n"
	for _, m := range src.Modules {
		objects = append(objects, m.Objects)
		if ref := guestapi.RefModules + m.Commit; !slices.Contains(refs, ref) {
			refs, update = append(refs, ref), update+"update "+ref+" "+m.Commit+"\n"
		}
	}
	bare, err := ScratchRepo(ctx, dir, objects...)
	if err != nil {
		return nil, err
	}
	in := Command{Stdin: strings.NewReader(update)}
	if _, err := in.Run(ctx, bare, "--git-dir="+bare, "update-ref", "--stdin"); err != nil {
		return nil, err
	}
	if _, err := gitBare(ctx, bare, "symbolic-ref", "HEAD", name); err != nil {
		return nil, err
	}
	more, err := src.Lfs.addTo(ctx, bare)
	if err != nil {
		return nil, err
	}
	refs = append(refs, more...)
	out := filepath.Join(dir, "repo.bundle")
	args := append([]string{"--git-dir=" + bare, "-c", "core.bigFileThreshold=16m", "bundle", "create", "--all-progress", out}, refs...)
	if _, err := (Command{Stderr: progress}).Run(ctx, bare, args...); err != nil {
		return nil, err
	}
	return os.Open(out)
}

func warnUncommitted(ctx context.Context, ui work.UI, path string) {
	env, err := DisableFilters(ctx, path)
	if err != nil {
		return // without the note
	}
	status, err := Command{Env: env}.Run(ctx, path, "status", "--porcelain", "--ignore-submodules=all")
	if err == nil && status != "" {
		n := strings.Count(status, "\n") + 1
		ui.Progressf("note: not sending %s in %s; only commits are sent", agentlab.Plural(n, "uncommitted change"), path)
	}
}

// DisableFilters returns an environment that disables all configured filters: git
// would run their programs on changed files. It does not use -c, which cannot
// set a filter whose name has an equals sign.
func DisableFilters(ctx context.Context, path string) ([]string, error) {
	keys, err := Git(ctx, path, "config", "--null", "--name-only", "--list")
	if err != nil {
		return nil, err
	}
	var env []string
	n := 0
	seen := map[string]bool{}
	for key := range strings.SplitSeq(keys, "\x00") {
		end := strings.LastIndexByte(key, '.')
		if !strings.HasPrefix(key, "filter.") || end < len("filter.") || seen[key[:end]] {
			continue
		}
		seen[key[:end]] = true
		for _, kv := range [][2]string{{"clean", ""}, {"smudge", ""}, {"process", ""}, {"required", "false"}} {
			env = append(env, fmt.Sprintf("GIT_CONFIG_KEY_%d=%s.%s", n, key[:end], kv[0]), fmt.Sprintf("GIT_CONFIG_VALUE_%d=%s", n, kv[1]))
			n++
		}
	}
	return append(env, fmt.Sprintf("GIT_CONFIG_COUNT=%d", n)), nil
}

// WithConfig adds a setting to an environment of DisableFilters.
func WithConfig(env []string, key, value string) []string {
	last := len(env) - 1
	n, _ := strconv.Atoi(strings.TrimPrefix(env[last], "GIT_CONFIG_COUNT="))
	return append(slices.Clone(env[:last]), fmt.Sprintf("GIT_CONFIG_KEY_%d=%s", n, key), fmt.Sprintf("GIT_CONFIG_VALUE_%d=%s", n, value), fmt.Sprintf("GIT_CONFIG_COUNT=%d", n+1))
}

// OwnIdentity is the environment for commits that no user sees.
func OwnIdentity() []string {
	return []string{
		"GIT_AUTHOR_NAME=AgentLab", "GIT_AUTHOR_EMAIL=agentlab@localhost", "GIT_COMMITTER_NAME=AgentLab", "GIT_COMMITTER_EMAIL=agentlab@localhost",
	}
}

// CopyIndex copies the index of a work tree, which can be missing, and returns the
// environment that selects the copy. The copy has the time of the index: git compares it
// with the times of files to find changes right after the index was written.
func CopyIndex(ctx context.Context, top, to string) (env []string, err error) {
	from, err := Git(ctx, top, "rev-parse", "--path-format=absolute", "--git-path", "index")
	if err != nil {
		return nil, err
	}
	env = []string{"GIT_INDEX_FILE=" + to}
	st, err := os.Stat(from)
	if errors.Is(err, fs.ErrNotExist) {
		return env, nil
	}
	if err != nil {
		return nil, err
	}
	text, err := os.ReadFile(from)
	if err != nil {
		return nil, err
	}
	if err := os.WriteFile(to, text, 0o600); err != nil {
		return nil, err
	}
	return env, os.Chtimes(to, st.ModTime(), st.ModTime())
}

// IsCommit reports whether s has the format of a commit's ID. Bundles are limited to
// repositories with SHA-1.
func IsCommit(s string) bool { return len(s) == 40 && agentlab.IsHex(s, 40) }

// IsAncestor reports whether a commit is in the history of another one.
func IsAncestor(ctx context.Context, path, commit, of string) bool {
	_, err := Git(ctx, path, "merge-base", "--is-ancestor", commit, of)
	return err == nil
}

// PlainMergeDrivers returns options that replace the merge drivers of the configuration,
// which a guest's .gitattributes can choose, by git's merge of lines.
func PlainMergeDrivers(ctx context.Context, path string) ([]string, error) {
	keys, err := Git(ctx, path, "config", "--null", "--name-only", "--list")
	if err != nil {
		return nil, err
	}
	var options []string
	for key := range strings.SplitSeq(keys, "\x00") {
		if name, ok := strings.CutSuffix(key, ".driver"); ok && strings.HasPrefix(name, "merge.") {
			if strings.Contains(key, "=") {
				return nil, agentlab.Errorf(agentlab.CodeUnsupported, "the merge driver %q has an equals sign in its name", key).WithHint("rename it in the configuration of git")
			}
			options = append(options, "-c", key+"=git merge-file --marker-size=%L %A %O %B")
		}
	}
	return options, nil
}

// DeleteRefs deletes refs of a repository with a prefix.
func DeleteRefs(ctx context.Context, path, prefix string) error {
	refs, err := Git(ctx, path, "for-each-ref", "--format=delete %(refname)", prefix)
	if err != nil || refs == "" {
		return err
	}
	_, err = Command{Stdin: strings.NewReader(refs + "\n")}.Run(ctx, path, "update-ref", "--no-deref", "--stdin")
	return err
}
