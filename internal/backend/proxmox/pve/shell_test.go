package pve

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/test/guard"
)

// programs is a directory with shell scripts in place of Proxmox's programs.
func programs(t *testing.T, scripts map[string]string) ShellOptions {
	dir := t.TempDir()
	for name, text := range scripts {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/sh\n"+text), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	return ShellOptions{Bin: dir}
}

func shellClient(t *testing.T, pvesh string) *Client {
	return New(NewShell(programs(t, map[string]string{"pvesh": pvesh}))).WithPoll(Poll{First: time.Millisecond, Max: time.Millisecond})
}

// What pvesh gets is a list of arguments, never a line for a shell.
func TestShellArguments(t *testing.T) {
	log := filepath.Join(t.TempDir(), "args")
	c := shellClient(t, `for a; do printf '%s\0' "$a"; done >`+log+`; echo '"UPID:pve:00002511:000404FA:6B00F94F:qmclone:9000:root@pam:"'`)
	desc := "agentlab-uid: x\n$(touch /tmp/never) `x` 'q' \"é\" -- --skiplock 1"
	if _, err := c.Clone(guard.Context(t), "pve", 9000, CloneOptions{NewID: 101, Name: "sb-101", Description: desc}); err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile(log)
	if err != nil {
		t.Fatal(err)
	}
	want := []string{
		"create", "/nodes/pve/qemu/9000/clone", "--description", desc, "--full", "0", "--name", "sb-101", "--newid", "101", "--output-format", "json", "",
	}
	if string(got) != strings.Join(want, "\x00") {
		t.Errorf("%q", got)
	}
	if _, err := c.AgentExec(guard.Context(t), "pve", 101, []string{"/bin/echo", "a b"}, nil); agentlab.CodeOf(err) != agentlab.CodeUnknownOutcome {
		t.Errorf("exec: %v", err) // a task where a number was expected
	}
	got, _ = os.ReadFile(log)
	if !strings.HasPrefix(string(got), "create\x00/nodes/pve/qemu/101/agent/exec\x00--command\x00/bin/echo\x00--command\x00a b\x00--output-format") {
		t.Errorf("%q", got)
	}
	if _, err := c.DeleteContent(guard.Context(t), "pve", "local-zfs:base-9000-disk-0/vm-101-disk-0"); err != nil {
		t.Error(err)
	}
	got, _ = os.ReadFile(log)
	if !strings.HasPrefix(string(got), "delete\x00/nodes/pve/storage/local-zfs/content/base-9000-disk-0/vm-101-disk-0\x00") {
		t.Errorf("%q", got)
	}
}

func TestShellPathsCannotEscape(t *testing.T) {
	for _, p := range []string{
		apiPath("nodes", "pve/qemu/9000", "qemu"), apiPath("nodes", "..", "qemu"), apiPath("nodes", "a;reboot", "qemu"),
		apiPath("nodes", "$(x)", "qemu"), apiPath("nodes", "a b"), "/nodes/%zz", apiPath("nodes", "a\x00"), apiPath("nodes", "a>b"),
	} {
		if got, err := plainPath(p); err == nil {
			t.Errorf("%q was taken as %q", p, got)
		}
	}
	upid := "UPID:pve:00001FD8:0003D7EE:6B00F8DB:imgdel:9998@local-zfs:agentlab@pve!ctl:"
	if got, err := plainPath(apiPath("nodes", "pve", "tasks", upid, "status")); err != nil || got != "/nodes/pve/tasks/"+upid+"/status" {
		t.Error(got, err)
	}
}

func TestShellAnswers(t *testing.T) {
	const upid = "UPID:pve:00002511:000404FA:6B00F94F:qmclone:9000:root@pam:"
	for name, pvesh := range map[string]string{
		"log lines first": `echo 'create full clone of drive ide2 (local-zfs:vm-9000-cloudinit)'; echo '"` + upid + `"'`,
		"noise":           `echo 'for my (...) is experimental at /usr/share/perl5/PVE/LXC.pm line 1635.' >&2; echo '"` + upid + `"'`,
		"a failed task":   `echo '"` + upid + `"'; echo 'VM 101 already running' >&2`,
		"another node":    `printf '%s\n' '"create full clone of drive ide2 (x)\"` + upid + `\""'`,
		"another node, 2": `printf '%s\n' '"\"` + upid + `\""'`,
	} {
		u, err := shellClient(t, pvesh).Clone(guard.Context(t), "pve", 9000, CloneOptions{NewID: 101})
		if err != nil || u != upid {
			t.Errorf("%s: %q %v", name, u, err)
		}
	}
	for name, pvesh := range map[string]string{
		"nothing": `:`, "log alone": `echo 'create full clone'`, "killed": `kill -9 $$`, "failed without a word": `exit 5`,
	} {
		_, err := shellClient(t, pvesh).Clone(guard.Context(t), "pve", 9000, CloneOptions{NewID: 101})
		if agentlab.CodeOf(err) != agentlab.CodeUnknownOutcome {
			t.Errorf("%s: %s %v", name, agentlab.CodeOf(err), err)
		}
		if _, err := shellClient(t, pvesh).VMs(guard.Context(t), "pve"); err == nil || agentlab.CodeOf(err) == agentlab.CodeUnknownOutcome {
			t.Errorf("reading, %s: %v", name, err)
		}
	}
	for exit := range []int{1, 2, 4, 25, 29, 255} {
		if exit == 0 {
			continue
		}
		_, err := shellClient(t, fmt.Sprintf(`echo "Configuration file 'nodes/pve/qemu-server/777.conf' does not exist" >&2; exit %d`, exit)).Config(guard.Context(t), "pve", 777)
		if agentlab.CodeOf(err) != agentlab.CodeNotFound {
			t.Errorf("exit %d: %v", exit, err)
		}
	}
	if err := shellClient(t, `echo 'update VM 101: -description a'; echo '{"x":1}'`).Set(guard.Context(t), "pve", 101, Changes{Set: map[string]string{"description": "a"}}); err != nil {
		t.Errorf("a call that returns nothing: %v", err)
	}
	_, err := New(NewShell(ShellOptions{Bin: t.TempDir()})).Start(guard.Context(t), "pve", 101)
	if agentlab.CodeOf(err) != agentlab.CodeUnavailable || agentlab.HintOf(err) == "" {
		t.Errorf("no pvesh: %v", err)
	}
}

// A change that is under way is not cut off: not by the end of the context,
// not by a signal to the daemon's group, not by the end of the daemon, whose
// pipes would break. pvesh would leave locks and half a disk.
func TestShellChangesAreNeverCutOff(t *testing.T) {
	dir := t.TempDir()
	fifo, done := filepath.Join(dir, "go"), filepath.Join(dir, "done")
	if err := syscall.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	c := shellClient(t, fmt.Sprintf(`echo begun; echo $$ >%[1]s; read x <%[1]s; echo log; ps -o sid= -p $$ >%[2]s.tmp; mv %[2]s.tmp %[2]s; echo end >%[1]s`, fifo, done))
	ctx, cancel := context.WithCancel(guard.Context(t))
	go func() {
		_, _ = os.ReadFile(fifo)
		cancel()
	}()
	_, err := c.Start(ctx, "pve", 101)
	if agentlab.CodeOf(err) != agentlab.CodeUnknownOutcome || !errors.Is(err, context.Canceled) {
		t.Fatalf("%s %v", agentlab.CodeOf(err), err)
	}
	if _, err := os.Stat(done); err == nil {
		t.Fatal("it has ended already")
	}
	if err := os.WriteFile(fifo, []byte("go\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := os.ReadFile(fifo); err != nil {
		t.Fatal(err)
	}
	sid, err := os.ReadFile(done)
	if err != nil {
		t.Fatalf("the change was cut off: %v", err)
	}
	own, _, _ := syscall.Syscall(syscall.SYS_GETSID, 0, 0, 0)
	if got, err := strconv.Atoi(strings.TrimSpace(string(sid))); err != nil || got == int(own) {
		t.Errorf("session %q, ours is %d: a signal to our group would end it", sid, own)
	}
}

// What only reads is ended with its context.
func TestShellReadsAreCutOff(t *testing.T) {
	fifo := filepath.Join(t.TempDir(), "fifo")
	if err := syscall.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	c := shellClient(t, fmt.Sprintf(`echo begun >%[1]s; read x <%[1]s`, fifo))
	ctx, cancel := context.WithCancel(guard.Context(t))
	go func() {
		_, _ = os.ReadFile(fifo)
		cancel()
	}()
	if _, err := c.VMs(ctx, "pve"); agentlab.CodeOf(err) != agentlab.CodeUnavailable || !errors.Is(err, context.Canceled) {
		t.Errorf("%s %v", agentlab.CodeOf(err), err)
	}
}

// The output of a change goes into a file: when the daemon is killed the
// program must not die of its next line.
func TestShellOutputSurvivesTheDaemon(t *testing.T) {
	if os.Getenv("PVE_TEST_DAEMON") != "" {
		_, _ = New(NewShell(ShellOptions{Bin: os.Getenv("PVE_TEST_DAEMON")})).Start(context.Background(), "pve", 101)
		return
	}
	dir := t.TempDir()
	fifo := filepath.Join(dir, "fifo")
	if err := syscall.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	o := programs(t, map[string]string{"pvesh": fmt.Sprintf(
		`echo begun >%[1]s; read x <%[1]s; i=0; while [ $i -lt 2000 ]; do echo "a line of log" || exit 1; echo x >&2 || exit 1; i=$((i+1)); done; echo all >%[1]s`, fifo)})
	daemon := exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$")
	daemon.Env = append(os.Environ(), "PVE_TEST_DAEMON="+o.Bin)
	daemon.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := daemon.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.ReadFile(fifo); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(-daemon.Process.Pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	_ = daemon.Wait()
	if err := os.WriteFile(fifo, []byte("go\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(fifo); err != nil || string(got) != "all\n" {
		t.Errorf("the change has not come to its end: %q %v", got, err)
	}
}

// The cluster file system of a node answers root only with root's group; a
// daemon in another group would fail in every call.
func TestShellRunsWithRootsGroup(t *testing.T) {
	if os.Getenv("PVE_TEST_GROUP") != "" {
		_, err := New(NewShell(ShellOptions{Bin: os.Getenv("PVE_TEST_GROUP")})).Start(context.Background(), "pve", 101)
		if agentlab.CodeOf(err) != agentlab.CodeInternal {
			t.Error(err)
		}
		fmt.Println(err)
		return
	}
	if os.Geteuid() != 0 {
		t.Skip("only root can have another group and root's at once")
	}
	if c := rootCredential(0, 997); c == nil || c.Uid != 0 || c.Gid != 0 || rootCredential(0, 0) != nil || rootCredential(1000, 1000) != nil {
		t.Error("who programs run as")
	}
	o := programs(t, map[string]string{"pvesh": `echo "gid $(id -g)" >&2; exit 1`})
	cmd := exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$")
	cmd.Env = append(os.Environ(), "PVE_TEST_GROUP="+o.Bin)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 0, Gid: 997}}
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "gid 0") {
		t.Errorf("%v %s", err, out)
	}
}

// systemd-run would put the environment of its unit where a text has a "$".
func TestShellPrefixOfSystemd(t *testing.T) {
	o := programs(t, map[string]string{
		"pvesh": `printf '"%s"\n' "$4"`, "systemd-run": `shift; for a; do shift; set -- "$@" "$(printf %s "$a" | sed 's/\$\$/@/g; s/\$[A-Z]*//g; s/@/$/g')"; done; exec "$@"`,
	})
	for _, prefix := range [][]string{nil, {filepath.Join(o.Bin, "systemd-run"), "--"}} {
		o.Prefix = prefix
		raw, err := NewShell(o).Call(guard.Context(t), Post, "/nodes/pve/qemu/101/agent/exec", url.Values{"command": {"a $HOME $$ b"}})
		if err != nil || string(raw) != `"a $HOME $$ b"` {
			t.Errorf("%s %v", raw, err)
		}
	}
}

func TestShellSlots(t *testing.T) {
	s, _ := NewShell(ShellOptions{}).(*shell)
	ctx, cancel := context.WithCancel(guard.Context(t))
	var release []func()
	for range maxWrites {
		r, err := s.acquireSlot(ctx, Post, "/nodes/pve/qemu/101/status/shutdown")
		if err != nil {
			t.Fatal(err)
		}
		release = append(release, r)
	}
	if r, err := s.acquireSlot(ctx, Post, "/nodes/pve/qemu/101/status/stop"); err != nil {
		t.Errorf("stop waits for shutdowns: %v", err)
	} else {
		r()
	}
	cancel()
	if _, err := s.acquireSlot(ctx, Post, "/nodes/pve/qemu/101/clone"); agentlab.CodeOf(err) != agentlab.CodeUnavailable {
		t.Errorf("%v", err)
	}
	release[0]()
	if r, err := s.acquireSlot(guard.Context(t), Put, "/nodes/pve/qemu/101/config"); err != nil {
		t.Error(err)
	} else {
		r()
	}
}

func TestSnippets(t *testing.T) {
	store := filepath.Join(t.TempDir(), "store")
	o := programs(t, map[string]string{
		"pvesm": `[ "$1" = path ] || exit 9; echo "` + store + `/${2#local:}"`,
		"qm":    `[ "$*" = "unlock 101" ] || { echo "Configuration file 'nodes/pve/qemu-server/$2.conf' does not exist" >&2; exit 2; }`,
	})
	root, ctx := NewShell(o).Root(), guard.Context(t)
	const name = "agentlab-101-0011aabb-x7.yaml"
	if names, err := root.Snippets(ctx); err != nil || len(names) != 0 {
		t.Errorf("no directory yet: %v %v", names, err)
	}
	for range 2 {
		id, err := root.WriteSnippet(ctx, name, []byte("#cloud-config\n"))
		if err != nil || id != "local:snippets/"+name {
			t.Fatal(id, err)
		}
	}
	path := filepath.Join(store, "snippets", name)
	st, err := os.Stat(path)
	if err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("%v %v", st.Mode(), err)
	}
	if _, err := root.WriteSnippet(ctx, name, []byte("other")); agentlab.CodeOf(err) != agentlab.CodeExists {
		t.Errorf("another content: %v", err)
	}
	if err := os.Symlink(path, filepath.Join(store, "snippets", "agentlab-link.yaml")); err != nil {
		t.Fatal(err)
	}
	if _, err := root.WriteSnippet(ctx, "agentlab-link.yaml", []byte("#cloud-config\n")); agentlab.CodeOf(err) != agentlab.CodeExists {
		t.Errorf("a link in the way: %v", err)
	}
	for _, bad := range []string{"", "../x", "a/b", ".hidden", "x.tmp", strings.Repeat("x", 300)} {
		if _, err := root.WriteSnippet(ctx, bad, nil); agentlab.CodeOf(err) != agentlab.CodeInvalid {
			t.Errorf("%q: %v", bad, err)
		}
		if err := root.RemoveSnippet(ctx, bad); agentlab.CodeOf(err) != agentlab.CodeInvalid {
			t.Errorf("%q: %v", bad, err)
		}
	}
	// A kill in the middle of a write leaves half a file under another name.
	half := "agentlab-102-0011aabb-y8.yaml"
	if err := os.WriteFile(filepath.Join(store, "snippets", half+unfinished), []byte("#cl"), 0o600); err != nil {
		t.Fatal(err)
	}
	names, err := root.Snippets(ctx)
	if err != nil || strings.Join(names, " ") != name+" "+half {
		t.Errorf("%v %v", names, err)
	}
	for range 2 {
		for _, n := range names {
			if err := root.RemoveSnippet(ctx, n); err != nil {
				t.Error(err)
			}
		}
	}
	if names, err := root.Snippets(ctx); err != nil || len(names) != 0 {
		t.Errorf("left: %v %v", names, err)
	}
	if err := root.Unlock(ctx, 101); err != nil {
		t.Error(err)
	}
	if err := root.Unlock(ctx, 102); agentlab.CodeOf(err) != agentlab.CodeNotFound {
		t.Error(err)
	}
}
