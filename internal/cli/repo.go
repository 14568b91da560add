package cli

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
)

// localRepo tells whether the argument of --repo names a folder on this
// machine, and gives its absolute path.
func localRepo(arg string) (path string, local bool, err error) {
	looksLocal := arg == "." || arg == ".." || strings.HasPrefix(arg, "/") || strings.HasPrefix(arg, "./") ||
		strings.HasPrefix(arg, "../") || !strings.Contains(arg, ":")
	info, statErr := os.Stat(arg)
	switch {
	case statErr == nil && info.IsDir():
		path, err = filepath.Abs(arg)
		return path, true, err
	case looksLocal:
		return "", false, agentlab.Errorf(agentlab.CodeInvalid, "no folder %s", arg).WithField("repo").
			WithHint("give the path of a git repository, or a URL such as https://host/org/repo")
	}
	return "", false, nil
}

// gitSafe are options under which git runs nothing that a repository names:
// no hooks, no file system monitor, no helpers, no pager.
var gitSafe = []string{
	"-c", "core.hooksPath=/dev/null",
	"-c", "core.fsmonitor=false",
	"-c", "core.attributesFile=/dev/null",
	"-c", "gc.auto=0",
	"-c", "maintenance.auto=false",
	"-c", "core.pager=cat",
	"-c", "core.alternateRefsCommand=true",
}

// gitEnv is the environment of git. Nothing that steers git is inherited: in
// a hook, GIT_DIR and its like name another repository than the one we mean.
// No transport is allowed, not even to local files, because a transport runs
// programs that the repository's configuration names; unlike protocol.allow,
// GIT_ALLOW_PROTOCOL cannot be widened by that configuration.
func gitEnv() []string {
	var env []string
	for _, kv := range os.Environ() {
		if !strings.HasPrefix(kv, "GIT_") {
			env = append(env, kv)
		}
	}
	return append(env, "GIT_TERMINAL_PROMPT=0", "GIT_OPTIONAL_LOCKS=0", "GIT_NO_LAZY_FETCH=1", "GIT_ALLOW_PROTOCOL=none", "LC_ALL=C")
}

// gitInput is what a run of git gets beside its arguments.
type gitInput struct {
	stdin   io.Reader
	stdout  io.Writer // nil: it is returned
	stderr  io.Writer // gets a copy; nil: none
	env     []string
	limited bool // it reads objects of a guest
	raw     bool // its output is returned with the space around it
}

// git runs git in dir without a prompt and returns its standard output.
func git(ctx context.Context, dir string, args ...string) (string, error) {
	return gitInput{}.run(ctx, dir, args...)
}

// gitBare is git in a bare repository of our own, which it does not look for.
func gitBare(ctx context.Context, bare string, args ...string) (string, error) {
	return git(ctx, bare, append([]string{"--git-dir=" + bare}, args...)...)
}

func (in gitInput) run(ctx context.Context, dir string, args ...string) (string, error) {
	path, err := exec.LookPath("git")
	if err != nil {
		return "", agentlab.Errorf(agentlab.CodeUnavailable, "git is not installed").WithHint("install it, e.g. sudo apt install git")
	}
	argv := append([]string{path, "-C", dir}, gitSafe...)
	if in.limited {
		argv = append(underLimits(path, argv[1:]), gitSmall...)
	}
	argv = append(argv, args...)
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...) //nolint:gosec // arguments are checked by the callers
	cmd.Env = append(gitEnv(), in.env...)
	cmd.Stdin = in.stdin
	var stdout bytes.Buffer
	stderr := tailWriter{most: 64 << 10}
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
		msg := strings.TrimSpace(stderr.buf.String())
		if msg == "" {
			msg = err.Error()
		}
		return "", errors.New(lastLine(msg))
	}
	if in.raw {
		return stdout.String(), nil
	}
	return strings.TrimSpace(stdout.String()), nil
}

func lastLine(s string) string { return s[strings.LastIndexByte(s, '\n')+1:] }

// detachedBranch is the branch in the bundle of a commit that the user did not
// name by a branch.
const detachedBranch = "agentlab-base"

// branchName chooses the name under which the commit travels.
func branchName(ctx context.Context, path, ref string) string {
	full, err := git(ctx, path, "rev-parse", "--symbolic-full-name", "--end-of-options", ref)
	// Some versions of git print --end-of-options, too, on a line of its own.
	if name, ok := strings.CutPrefix(lastLine(full), "refs/heads/"); err == nil && ok && agentlab.ValidateRef(name) == nil {
		return name
	}
	return detachedBranch
}

// scratchRepo makes an empty bare repository in dir that borrows objects.
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

// packBundle packs a commit and those of its submodules. What git says of its
// progress goes to progress, unless that is nil.
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
	out := filepath.Join(dir, "repo.bundle")
	args := append([]string{"--git-dir=" + bare, "bundle", "create", "--all-progress", out}, refs...)
	if _, err := (gitInput{stderr: progress}).run(ctx, bare, args...); err != nil {
		return nil, err
	}
	return os.Open(out) //nolint:gosec // our own temporary file
}

func (a *App) warnUncommitted(ctx context.Context, path string) {
	env, err := filtersOff(ctx, path)
	if err != nil {
		return // only the note is lost
	}
	status, err := gitInput{env: env}.run(ctx, path, "status", "--porcelain", "--ignore-submodules=all")
	if err == nil && status != "" {
		n := strings.Count(status, "\n") + 1
		a.progressf("note: %d uncommitted change(s) in %s stay here; the sandbox gets what is committed", n, path)
	}
}

// filtersOff is an environment that blanks every configured filter, as each
// names programs that git would run on changed files. It is not done by -c,
// which cannot name a filter with an equals sign.
func filtersOff(ctx context.Context, path string) ([]string, error) {
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

// saveTo copies r into a new file, which appears under its name only when
// it is whole.
func saveTo(name string, r io.Reader, force bool) (int64, error) {
	if _, err := os.Lstat(name); err == nil && !force {
		return 0, agentlab.Errorf(agentlab.CodeExists, "%s exists", name).WithHint("use --force to replace it, or --out to choose another place")
	}
	// Unlike os.CreateTemp, this leaves the permissions to the user's umask.
	tmpName := filepath.Join(filepath.Dir(name), ".agentlab-"+rand.Text())
	tmp, err := os.OpenFile(tmpName, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o644) //nolint:gosec // an ordinary file of the user
	if err != nil {
		return 0, agentlab.Errorf(agentlab.CodeInvalid, "cannot write: %w", err)
	}
	defer func() { _ = os.Remove(tmp.Name()) }()
	n, err := io.Copy(tmp, r)
	if closeErr := tmp.Close(); err == nil {
		err = closeErr
	}
	if err == nil {
		err = os.Rename(tmp.Name(), name)
	}
	if err != nil {
		return 0, agentlab.Errorf(agentlab.CodeUnavailable, "download of %s failed: %w", name, err)
	}
	return n, nil
}
