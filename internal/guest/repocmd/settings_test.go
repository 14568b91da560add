package repocmd

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab/guestapi"
)

// settings are the ones of a user or an image which could change what the host drives.
// The settings of each group do not contradict each other. EVIL is a program that leaves a
// file, and fails.
const settings = `core.hooksPath EVILDIR
core.eol crlf
core.ignoreCase true
core.preloadIndex false
core.editor EVIL
user.signingKey nobody
branch.main.pushRemote nowhere
push.default nothing
push.autoSetupRemote true
receive.denyDeletes true
transfer.hideRefs refs/heads
status.branch true
diff.mnemonicPrefix true
diff.renames copies
log.showSignature true
pack.threads 3
init.defaultBranch other
worktree.guessRemote true
filter.lfs.required true
extensions.worktreeConfig true
core.attributesFile ATTRIBUTES
filter.other.clean EVIL
filter.other.required true
diff.other.command EVIL
diff.other.textconv EVIL
merge.other.driver EVIL
merge.default other
filter.other.smudge EVIL

core.fsmonitor EVIL
core.quotePath false
core.trustctime false
core.sharedRepository group
core.sshCommand EVIL
user.useConfigOnly true
branch.autoSetupMerge always
push.followTags true
remote.pushDefault nowhere
receive.fsckObjects true
transfer.unpackLimit 1
status.short true
diff.external EVIL
apply.whitespace error
gc.auto 1
pack.writeReverseIndex true
init.defaultObjectFormat sha256
i18n.commitEncoding latin1
filter.lfs.smudge EVIL
trace2.eventTarget EVILDIR/trace

core.abbrev 4
core.checkStat minimal
core.logAllRefUpdates always
core.askPass EVIL
merge.ff only
branch.autoSetupRebase always
push.pushOption x
submodule.recurse true
receive.maxInputSize 1
protocol.allow never
status.relativePaths true
diff.ignoreSubmodules all
apply.ignoreWhitespace change
gc.autoDetach false
index.version 4
init.defaultRefFormat reftable
safe.bareRepository explicit
filter.lfs.process EVIL

core.autocrlf input
core.fileMode false
core.untrackedCache true
core.bigFileThreshold 1
commit.gpgSign true
merge.verifySignatures true
pull.rebase true
push.recurseSubmodules only
receive.denyCurrentBranch refuse
receive.unpackLimit 1
protocol.file.allow never
status.submoduleSummary true
diff.orderFile /nonexistent
color.ui always
maintenance.auto true
feature.manyFiles true
checkout.workers 8
alias.push !EVIL

core.safecrlf true
core.symlinks false
core.splitIndex true
core.pager EVIL
gpg.program EVIL
branch.main.mergeOptions --squash
push.gpgSign true
push.negotiate true
receive.denyNonFastForwards true
receive.advertisePushOptions true
status.showUntrackedFiles no
diff.noprefix true
diff.context 0
column.ui always
pack.packSizeLimit 1m
init.templateDir EVILDIR
checkout.guess false
alias.status !EVIL
help.autocorrect 1`

// Everything that the host drives has the same result whatever is configured, with hooks
// that fail in the repository.
func TestUnusualSettings(t *testing.T) {
	for i, group := range strings.Split(settings, "\n\n") {
		t.Run(strconv.Itoa(i), func(t *testing.T) {
			l := newLab(t)
			evil, ran := filepath.Join(t.TempDir(), "evil"), filepath.Join(t.TempDir(), "ran")
			for _, name := range strings.Fields("EVIL fsmonitor-watchman post-checkout post-index-change post-receive post-update pre-commit pre-push pre-receive push-to-checkout reference-transaction update") {
				write(t, filepath.Join(evil, name), "#!/bin/sh\necho $0 $* >>"+ran+"\nexit 1\n")
				if err := os.Chmod(filepath.Join(evil, name), 0o700); err != nil {
					t.Fatal(err)
				}
			}
			attributes := filepath.Join(t.TempDir(), "attributes")
			write(t, attributes, "* filter=other diff=other merge=other\n")
			values := strings.NewReplacer("EVILDIR", evil, "EVIL", filepath.Join(evil, "EVIL"), "ATTRIBUTES", attributes)
			for line := range strings.SplitSeq(group, "\n") {
				key, value, _ := strings.Cut(line, " ")
				git(t, l.host, "config", "--global", key, values.Replace(value))
			}
			hostSteps(l, evil)
			if text, _ := os.ReadFile(ran); len(text) > 0 {
				t.Errorf("programs of the configuration ran: %s", text)
			}
		})
	}
}

// hostSteps does what the host does with a session, and checks the results. Hooks of the
// guest are in a directory.
func hostSteps(l lab, hooks string) {
	l.Helper()
	config := filepath.Join(os.Getenv("HOME"), ".gitconfig")
	host := func(args ...string) string { // without the configuration of the guest
		l.Helper()
		l.Setenv("GIT_CONFIG_GLOBAL", "/dev/null")
		defer func() { l.Setenv("GIT_CONFIG_GLOBAL", config) }()
		return git(l.T, l.host, append([]string{"-c", "user.name=T", "-c", "user.email=t@localhost"}, args...)...)
	}
	write(l.T, filepath.Join(l.host, ".gitattributes"), "*.bin filter=lfs\n*.other filter=other diff=other\n")
	for _, name := range []string{"a", "b.bin", "c.other", "dir/d"} {
		write(l.T, filepath.Join(l.host, name), "one  \ntwo\n")
	}
	save := func(message string) string {
		host("add", "-A")
		host("commit", "-q", "-m", message)
		return host("rev-parse", "HEAD")
	}
	first := save("first")
	l.ok(guestapi.RepoInit{Branch: "main", Origin: "https://host.example/a/b.git"}, "init")
	linkHooks(l, hooks)
	receive := func(p guestapi.RepoReceive, revs ...string) {
		l.Helper()
		bundle := filepath.Join(l.TempDir(), "bundle")
		host(append([]string{"bundle", "create", "-q", bundle}, revs...)...)
		p.Dir = ""
		if got := l.sendFile(p, bundle); len(got.Errors) > 0 {
			l.Errorf("%v: %v", p, got.Errors)
		}
	}
	one := guestapi.RepoReceive{Updates: []guestapi.RepoUpdate{{Branch: "main", Commit: first}, {Branch: "topic", Commit: first}}}
	receive(one, "HEAD")
	clean := func(branch, commit string) {
		l.Helper()
		if st := l.stateNow(); len(st.Worktrees) != 1 || st.Worktrees[0] != (guestapi.RepoWorktree{Branch: branch, Head: commit}) {
			l.Fatalf("want %s at %s: %+v", branch, commit, st)
		}
	}
	clean("main", first)
	for _, name := range []string{"a", "b.bin", "c.other", "dir/d"} {
		write(l.T, filepath.Join(l.host, name), "one  \nchanged\n")
	}
	second := save("second")
	receive(guestapi.RepoReceive{Updates: []guestapi.RepoUpdate{{Branch: "main", Commit: second}}}, "HEAD")
	clean("main", second)
	receive(guestapi.RepoReceive{Updates: []guestapi.RepoUpdate{{Branch: "topic", Commit: second}}, Checkout: "topic"}, "HEAD")
	clean("topic", second)
	receive(guestapi.RepoReceive{Updates: []guestapi.RepoUpdate{{Branch: "main", Commit: first, Force: true}}}, "HEAD")
	receive(guestapi.RepoReceive{Updates: []guestapi.RepoUpdate{{Branch: "main"}}}, "HEAD")
	write(l.T, filepath.Join(l.host, "a"), "one  \ncarried \n")
	write(l.T, filepath.Join(l.host, "new.bin"), "new\n")
	host("add", "-A")
	changes := host("commit-tree", host("write-tree"), "-p", "HEAD", "-m", "changes")
	host("update-ref", guestapi.RefChanges, changes)
	receive(guestapi.RepoReceive{Changes: changes}, guestapi.RefChanges)
	if st := l.stateNow(); st.Worktrees[0].Uncommitted != 2 || len(st.Branches) != 1 {
		l.Fatalf("carried changes: %+v", st)
	}
	packed := filepath.Join(l.TempDir(), "packed")
	write(l.T, packed, l.ok(guestapi.RepoPack{Branches: []string{"topic"}, Have: []string{second}, Changes: true}, "pack"))
	host("fetch", "-q", packed, guestapi.RefChanges+":refs/got")
	if got, want := host("rev-parse", "refs/got^{tree}"), host("rev-parse", changes+"^{tree}"); got != want {
		l.Errorf("the uncommitted changes differ: %s", host("diff", want, got))
	}
	l.ok(nil, "worktree", "add", "fix", "topic")
	if st := l.stateNow(); len(st.Worktrees) != 2 || st.Worktrees[1] != (guestapi.RepoWorktree{Dir: ".worktrees/fix", Branch: "fix", Head: second}) {
		l.Errorf("%+v", st)
	}
	l.ok(nil, "worktree", "remove", "fix")
}

// linkHooks installs hooks in the repository of the guest.
func linkHooks(l lab, from string) {
	l.Helper()
	to := filepath.Join(l.dir, ".git", "hooks")
	if err := os.RemoveAll(to); err != nil {
		l.Fatal(err)
	}
	if err := os.Symlink(from, to); err != nil {
		l.Fatal(err)
	}
}
