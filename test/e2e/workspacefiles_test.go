package e2e

import (
	"context"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/guestapi"
)

// fillWorkspace makes files of each kind, and printWorkspace prints what an archive
// must have of them.
const (
	fillWorkspace = `set -eu
cd /work
mkdir -p dir/sub
printf 'text' > dir/file
ln dir/file dir/hard
ln -s /etc/passwd dir/link
printf 'x' > "$(printf 'odd\nname')"
printf 'x' > ./-rf
truncate -s 3G sparse
printf 'end' >> sparse
head -c 5000000 /dev/urandom > random
printf 'secret' > root; chmod 600 root
chmod 4755 dir/sub
mkfifo pipe
mknod device c 1 3
python3 -c 'import os, socket
os.setxattr("dir/file", "user.kind", b"text")
socket.socket(socket.AF_UNIX).bind("socket")'
chown -R 1234:5678 dir
sync`
	printWorkspace = `set -eu
cd /work
find . -path ./lost+found -prune -o ! -type s ! -type c -printf '%P|%y|%m|%U|%G|%s|%n|%l\n' | sort
sha256sum dir/file random
tail -c 3 sparse
du -m sparse | cut -f1
python3 -c 'import os; print(os.getxattr("dir/hard", "user.kind"))'`
)

// The files of a workspace are exported and imported through maintenance sandboxes,
// and damage of its file system is found and repaired. A maintenance sandbox has no
// network and no secrets.
func TestWorkspaceMaintenance(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	root := func(sandbox, script string) string {
		t.Helper()
		return l.ok("exec", sandbox, "--user", "root", "--", "bash", "-c", script)
	}
	l.ok("sandbox", "new", "--name", "one", "--workspace", "new:data", "--workspace-size", "4")
	root("one", fillWorkspace)
	want := root("one", printWorkspace)
	if r := l.run("", "workspace", "export", "data"); r.code == 0 || !strings.Contains(r.stderr, "one") {
		t.Errorf("a workspace that is in use was exported: %v", r)
	}
	l.ok("sandbox", "destroy", "one")

	if out := l.ok("workspace", "fsck", "data"); !strings.Contains(out, "is clean") {
		t.Errorf("fsck: %s", out)
	}
	archive := filepath.Join(t.TempDir(), "data.tar.zst")
	l.ok("workspace", "export", "data", "-o", archive)
	if info, err := os.Stat(archive); err != nil || info.Size() < 5_000_000 || info.Size() > 6_000_000 || info.Mode().Perm() != 0o600 {
		t.Errorf("the archive: %+v, %v", info, err)
	}
	l.ok("workspace", "import", "copy", archive, "--size", "1") // the sparse file needs no space
	l.ok("sandbox", "new", "--name", "two", "--workspace", "copy")
	if got := root("two", printWorkspace); got != want {
		t.Errorf("the copy has\n%s, not\n%s", got, want)
	}
	l.ok("sandbox", "destroy", "two")

	c := l.client()
	sb, err := c.CreateSandbox(context.Background(), api.SandboxCreate{Name: "three", Maintenance: agentlab.MaintenanceDisk, WorkspaceSelection: api.WorkspaceSelection{Workspace: "data"}})
	if err != nil || sb.NetworkMode != agentlab.NetworkOff {
		t.Fatalf("%+v, %v", sb, err)
	}
	if !eventually(commandLimit, func() bool {
		sb, err = c.Sandbox(context.Background(), "three")
		return err != nil || sb.State == "READY"
	}) || err != nil {
		t.Fatalf("%+v, %v", sb, err)
	}
	dev := root("three", `set -eu
! test -e /etc/agentlab/bootstrap.json
! mountpoint -q `+guestapi.WorkspaceDir+`
! ip route get 192.0.2.1 >/dev/null 2>&1 || ! timeout 3 bash -c 'exec 3<>/dev/tcp/192.0.2.1/80' 2>/dev/null
grep -l `+guestapi.VolumeSerial+` /sys/block/*/serial | cut -d/ -f4`)
	root("three", "debugfs -w -R 'clri /dir' /dev/"+strings.TrimSpace(dev)+"; sync")
	l.ok("sandbox", "destroy", strconv.Itoa(sb.VMID))
	if r := l.run("", "workspace", "fsck", "data"); r.code != 1 || !strings.Contains(r.stdout, "is damaged") {
		t.Errorf("fsck of a damaged workspace: %v", r)
	}
	if r := l.run("", "workspace", "fsck", "data", "--repair"); r.code != 2 || !strings.Contains(r.stderr, "not confirmed") {
		t.Errorf("repair without a confirmation: %v", r)
	}
	if out := l.ok("workspace", "fsck", "data", "--repair", "--yes"); !strings.Contains(out, "is repaired") {
		t.Errorf("repair: %s", out)
	}
	if out := l.ok("workspace", "fsck", "data"); !strings.Contains(out, "is clean") {
		t.Errorf("fsck after the repair: %s", out)
	}
	l.ok("sandbox", "new", "--name", "four", "--workspace", "data")
	if out := root("four", "cd /work; cat root; find lost+found -name file -o -links 2 -type f | wc -l"); !strings.HasPrefix(out, "secret") {
		t.Errorf("the repaired workspace has %s", out)
	}
}
