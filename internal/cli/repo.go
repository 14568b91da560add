package cli

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
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

// localRepo reports whether the argument of --repo is a directory of this
// machine, and returns its absolute path.
func localRepo(arg string) (path string, local bool, err error) {
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

// gitInput are the streams and settings of a run of git.
type gitInput struct {
	stdin   io.Reader
	stdout  io.Writer // nil means that it is returned
	stderr  io.Writer // gets a copy, unless nil
	env     []string
	limited bool // git reads objects of a guest
	patient bool // with limited: no limit of time, which would leave a half-written work tree
	raw     bool // returned output is not trimmed
	// whole is for changes of the work tree: an interrupt does not end them halfway,
	// unless they take longer than gitGrace.
	whole bool
}

// gitGrace is how long git may run after an interrupt.
const gitGrace = 30 * time.Second

// git runs git in dir without prompts and returns its standard output.
func git(ctx context.Context, dir string, args ...string) (string, error) {
	return gitInput{}.run(ctx, dir, args...)
}

// gitBare is git in a bare scratch repository.
func gitBare(ctx context.Context, bare string, args ...string) (string, error) {
	return git(ctx, bare, append([]string{"--git-dir=" + bare}, args...)...)
}

func (in gitInput) run(ctx context.Context, dir string, args ...string) (string, error) {
	path, err := exec.LookPath("git")
	if err != nil {
		return "", agentlab.Errorf(agentlab.CodeUnavailable, "git is not installed").WithHint("install it, e.g. with: sudo apt install git")
	}
	argv := append([]string{path, "-C", dir}, gitSafe...)
	if in.limited {
		argv = append(underLimits(path, argv[1:], in.patient), gitSmall...)
	}
	argv = append(argv, args...)
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...) //nolint:gosec // arguments are checked by the callers
	cmd.Env = append(gitEnv(), in.env...)
	cmd.Stdin = in.stdin
	// On SIGTERM git removes its locks and temporary files. A kill would leave a lock, with
	// which git refuses all later changes.
	cmd.WaitDelay, cmd.Cancel = gitGrace, func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	if in.whole {
		cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // Ctrl-C is for all of a group
		cmd.Cancel = func() error { return os.ErrProcessDone }
	}
	var stdout bytes.Buffer
	stderr := bounded.Tail{Max: 64 << 10}
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if in.stdout != nil {
		cmd.Stdout = in.stdout
	}
	if in.stderr != nil {
		cmd.Stderr = io.MultiWriter(in.stderr, &stderr)
	}
	if err := cmd.Run(); err != nil {
		if ctx.Err() != nil {
			return "", ctx.Err()
		}
		return "", errors.New(cmp.Or(oneLine(stderr.String()), err.Error()))
	}
	if in.raw {
		return stdout.String(), nil
	}
	return strings.TrimSpace(stdout.String()), nil
}

// gitMeter matches what git prints about its progress.
var gitMeter = regexp.MustCompile(`^(Enumerating|Counting|Compressing|Writing) objects: |^Delta compression using |^Total [0-9]+ `)

// oneLine returns what git prints with an error as one line, without its progress and
// hints.
func oneLine(s string) string {
	var parts []string
	for line := range strings.FieldsFuncSeq(s, func(r rune) bool { return r == '\n' || r == '\r' }) {
		if line = strings.TrimSpace(line); line != "" && !strings.HasPrefix(line, "hint:") && !gitMeter.MatchString(line) {
			parts = append(parts, line)
		}
	}
	return strings.Join(parts, "; ")
}

func lastLine(s string) string { return s[strings.LastIndexByte(s, '\n')+1:] }

// detachedBranch is the branch in the bundle for a commit that the user did not
// specify by a branch.
const detachedBranch = "agentlab-base"

// currentBranch returns the branch that is checked out; "" if HEAD is detached. Git's short
// name of a branch depends on tags of that name.
func currentBranch(ctx context.Context, path string) string {
	ref, _ := git(ctx, path, "symbolic-ref", "--quiet", "HEAD")
	branch, _ := strings.CutPrefix(ref, "refs/heads/")
	return branch
}

// branchName returns the branch in the bundle for the commit of ref.
func branchName(ctx context.Context, path, ref string) string {
	full, err := git(ctx, path, "rev-parse", "--symbolic-full-name", "--end-of-options", ref)
	// Some versions of git also print --end-of-options, on a separate line.
	if name, ok := strings.CutPrefix(lastLine(full), "refs/heads/"); err == nil && ok && agentlab.ValidateRef(name) == nil {
		return name
	}
	return detachedBranch
}

// scratchRepo creates an empty bare repository in dir with alternates.
func scratchRepo(ctx context.Context, dir string, objects ...string) (string, error) {
	bare := filepath.Join(dir, "repo.git")
	if _, err := git(ctx, dir, "init", "--quiet", "--bare", "--template=", bare); err != nil {
		return "", err
	}
	info := filepath.Join(bare, "objects", "info")
	if err := os.MkdirAll(info, 0o700); err != nil {
		return "", err
	}
	return bare, os.WriteFile(filepath.Join(info, "alternates"), []byte(strings.Join(objects, "\n")+"\n"), 0o600)
}

// packBundle packs a commit, those of its submodules, and objects of Git LFS. git writes its progress
// to progress, unless that is nil.
func packBundle(ctx context.Context, dir string, src localSource, progress io.Writer) (*os.File, error) {
	objects := []string{src.objects}
	name := "refs/heads/" + src.branch
	refs, update := []string{"HEAD", name}, "update "+name+" "+src.commit+"\n"
	for _, m := range src.modules {
		objects = append(objects, m.objects)
		if ref := guestapi.RefModules + m.commit; !slices.Contains(refs, ref) {
			refs, update = append(refs, ref), update+"update "+ref+" "+m.commit+"\n"
		}
	}
	bare, err := scratchRepo(ctx, dir, objects...)
	if err != nil {
		return nil, err
	}
	in := gitInput{stdin: strings.NewReader(update)}
	if _, err := in.run(ctx, bare, "--git-dir="+bare, "update-ref", "--stdin"); err != nil {
		return nil, err
	}
	if _, err := gitBare(ctx, bare, "symbolic-ref", "HEAD", name); err != nil {
		return nil, err
	}
	more, err := src.lfs.addTo(ctx, bare)
	if err != nil {
		return nil, err
	}
	refs = append(refs, more...)
	out := filepath.Join(dir, "repo.bundle")
	args := append([]string{"--git-dir=" + bare, "-c", "core.bigFileThreshold=16m", "bundle", "create", "--all-progress", out}, refs...)
	if _, err := (gitInput{stderr: progress}).run(ctx, bare, args...); err != nil {
		return nil, err
	}
	return os.Open(out) //nolint:gosec // our own temporary file
}

func (a *App) warnUncommitted(ctx context.Context, path string) {
	env, err := disableFilters(ctx, path)
	if err != nil {
		return // without the note
	}
	status, err := gitInput{env: env}.run(ctx, path, "status", "--porcelain", "--ignore-submodules=all")
	if err == nil && status != "" {
		n := strings.Count(status, "\n") + 1
		a.Progressf("note: not sending %s in %s; only commits are sent", agentlab.Plural(n, "uncommitted change"), path)
	}
}

// disableFilters returns an environment that disables all configured filters: git
// would run their programs on changed files. It does not use -c, which cannot
// set a filter whose name has an equals sign.
func disableFilters(ctx context.Context, path string) ([]string, error) {
	keys, err := git(ctx, path, "config", "--null", "--name-only", "--list")
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

// withConfig adds a setting to an environment of disableFilters.
func withConfig(env []string, key, value string) []string {
	last := len(env) - 1
	n, _ := strconv.Atoi(strings.TrimPrefix(env[last], "GIT_CONFIG_COUNT="))
	return append(slices.Clone(env[:last]), fmt.Sprintf("GIT_CONFIG_KEY_%d=%s", n, key), fmt.Sprintf("GIT_CONFIG_VALUE_%d=%s", n, value), fmt.Sprintf("GIT_CONFIG_COUNT=%d", n+1))
}
