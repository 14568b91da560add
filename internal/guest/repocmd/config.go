package repocmd

import (
	"fmt"
	"os/exec"
	"slices"
	"strconv"
	"strings"
)

// DurableConfig is the configuration of git with which commits survive the loss of the
// VM, unlike with its default. SyncRefs does the same for the names of their refs.
var DurableConfig = [][2]string{{"core.fsync", "all"}, {"core.fsyncMethod", "batch"}}

// plainConfig makes the steps that the host drives independent of the configuration of
// the guest: no hook, monitor or signature, and nothing that refuses an update. Settings
// that decide how files look, such as core.autocrlf, stay: with others, git would take
// the files of the agent for changed ones.
var plainConfig = [][2]string{
	{"core.hooksPath", "/dev/null"}, {"core.fsmonitor", "false"}, {"core.safecrlf", "false"},
	{"commit.gpgSign", "false"}, {"submodule.recurse", "false"}, {"status.submoduleSummary", "false"}, {"diff.orderFile", "/dev/null"},
	{"gc.auto", "0"}, {"maintenance.auto", "false"}, {"receive.autogc", "false"},
	{"push.gpgSign", "false"}, {"push.followTags", "false"}, {"push.recurseSubmodules", "no"}, {"push.pushOption", ""}, {"push.negotiate", "false"},
	{"protocol.file.allow", "always"}, {"transfer.hideRefs", "!refs/"}, {"receive.hideRefs", "!refs/"},
	{"receive.denyCurrentBranch", "updateInstead"}, {"receive.denyDeleteCurrent", "refuse"}, {"receive.denyDeletes", "false"}, {"receive.denyNonFastForwards", "false"},
	{"receive.fsckObjects", "false"}, {"transfer.fsckObjects", "false"}, {"receive.maxInputSize", "0"},
	{"worktree.guessRemote", "false"}, {"branch.autoSetupMerge", "false"}, {"init.defaultRefFormat", "files"},
}

// lfsClean converts a file of Git LFS to its pointer. It uses no network.
const lfsClean = "git-lfs clean -- %f"

// plain returns the environment with plainConfig that also disables the filters of the
// guest: one that is required and fails, such as Git LFS without its server, would end a
// checkout halfway. Only files of Git LFS become pointers when git reads them, if git-lfs
// is there.
func (r repo) plain() ([]string, error) {
	if r.env != nil && *r.env != nil {
		return *r.env, nil
	}
	keys, err := r.exec(command{}, "config", "--null", "--name-only", "--list")
	if err != nil {
		return nil, err
	}
	config := slices.Clone(plainConfig)
	var seen []string
	for key := range strings.SplitSeq(keys, "\x00") {
		end := strings.LastIndexByte(key, '.')
		if end < len("filter.") || !strings.HasPrefix(key, "filter.") || slices.Contains(seen, key[:end]) {
			continue
		}
		name := key[:end]
		if seen = append(seen, name); name == "filter.lfs" && hasLFS() {
			continue
		}
		config = append(config, [2]string{name + ".clean", ""}, [2]string{name + ".smudge", ""}, [2]string{name + ".process", ""}, [2]string{name + ".required", "false"})
	}
	if hasLFS() {
		config = append(config, [2]string{"filter.lfs.clean", lfsClean}, [2]string{"filter.lfs.smudge", ""}, [2]string{"filter.lfs.required", "false"})
		if slices.Contains(strings.Split(keys, "\x00"), "filter.lfs.process") { // git prefers it to the others
			config = append(config, [2]string{"filter.lfs.process", "git-lfs filter-process --skip"})
		}
	}
	env := make([]string, 0, 2*len(config)+1)
	for i, kv := range config {
		env = append(env, fmt.Sprintf("GIT_CONFIG_KEY_%d=%s", i, kv[0]), fmt.Sprintf("GIT_CONFIG_VALUE_%d=%s", i, kv[1]))
	}
	env = append(env, "GIT_CONFIG_COUNT="+strconv.Itoa(len(config)))
	if r.env != nil {
		*r.env = env
	}
	return env, nil
}

// hasLFS reports whether Git LFS is installed.
func hasLFS() bool {
	_, err := exec.LookPath("git-lfs")
	return err == nil
}
