package qemu

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/stream"
	"github.com/agentlab-vm/agentlab/test/sample"
)

// randomValues prints a name and a random value in each line, from every source of
// random values of the image and from what was made of them. Node.js is tested in
// test/e2e, with the image agents.
const randomValues = `
echo kernel-uuid $(cat /proc/sys/kernel/random/uuid)
echo boot-id $(cat /proc/sys/kernel/random/boot_id)
echo machine-id $(cat /etc/machine-id)
echo host-key $(cut -d' ' -f2 /etc/ssh/ssh_host_ed25519_key.pub)
echo dev-urandom $(od -An -tx1 -N16 /dev/urandom | tr -d ' ')
echo dev-random $(od -An -tx1 -N16 /dev/random | tr -d ' ')
echo openssl $(openssl rand -hex 16)
echo mktemp $(mktemp -u XXXXXXXXXXXXXXXX)
ssh-keygen -q -t ed25519 -N '' -f /root/key && echo ssh-keygen $(cut -d' ' -f2 /root/key.pub) && rm /root/key*
python3 -c 'import ctypes, os, random, secrets, uuid
made = (ctypes.c_ubyte * 16)()
ctypes.CDLL("libuuid.so.1").uuid_generate(made)
print("libuuid", bytes(made).hex()) # uuidgen prints this
print("getrandom", os.getrandom(16).hex())
print("python-urandom", os.urandom(16).hex())
print("python-random", random.getrandbits(128))
print("python-secrets", secrets.token_hex(16))
print("python-uuid4", uuid.uuid4())
print("python-hash", hash("a"))'
if [ -x /root/random ]; then /root/random; fi
`

// oldProcesses starts processes that have seeded their own generators, and print
// values into /root/old-* at SIGUSR1.
const oldProcesses = `
cat >/root/old.py <<'END'
import os, random, signal
def show(*_):
    with open("/root/old-python", "w") as f:
        print("old-python-urandom", os.urandom(16).hex(), file=f)
        print("old-python-random", random.getrandbits(128), file=f)
signal.signal(signal.SIGUSR1, show)
show()
while True:
    signal.pause()
END
setsid python3 /root/old.py >/dev/null 2>&1 </dev/null & echo $! >/root/old.pids
setsid /root/random /root/old-go >/dev/null 2>&1 </dev/null & echo $! >>/root/old.pids
until [ -s /root/old-go ] && [ -s /root/old-python ]; do sleep 0.1; done; sync`

const oldValues = `rm /root/old-go /root/old-python; kill -USR1 $(cat /root/old.pids)
until [ -s /root/old-go ] && [ -s /root/old-python ]; do sleep 0.1; done; cat /root/old-go /root/old-python`

// secretsOfSource makes what a runner and users leave in a sandbox.
const secretsOfSource = `install -d -o agent -g agent -m 700 /run/agentlab/secrets /home/agent/.ssh
su agent -c 'echo "{\"runner\":{\"token\":\"canary-1\"}}" >/run/agentlab/secrets/bootstrap.json; echo canary-2 >/run/agentlab/secrets/git-credential'
mkdir -p /run/agentlab/ssh/authorized_keys.d; echo canary-3 >/run/agentlab/ssh/authorized_keys.d/agent
echo canary-4 >/run/agentlab/bootstrap.json`

const secretsLeft = `grep -rl canary /run/agentlab /home/agent; find /run/agentlab/secrets /run/agentlab/ssh -type f 2>/dev/null`

// ownState are the values that a process has made before it was copied: only the
// process can replace them.
var ownState = []string{"old-go-math", "old-go-math2", "old-go-maphash", "old-python-random"}

// put writes an executable file in the guest.
func (b *box) put(path string, content []byte) {
	b.Helper()
	conn, err := b.client().Exec(b.ctx, guestapi.ExecRequest{Command: []string{"sh", "-c", "cat >" + path + " && chmod +x " + path}, User: "root"})
	b.ok(err)
	defer func() { _ = conn.Close() }()
	w := stream.NewWriter(conn)
	for part := range slices.Chunk(content, 16<<10) {
		b.ok(w.Frame(stream.Stdin, part))
	}
	b.ok(w.Frame(stream.StdinEOF, nil))
	frames := stream.NewReader(conn)
	for {
		t, p, err := frames.Next()
		b.ok(err)
		if t == stream.Exit {
			if !bytes.Contains(p, []byte(`"code":0`)) {
				b.Fatalf("%s: %s", path, p)
			}
			return
		}
	}
}

// takeOver gives the guest its identity, which journald and all programs have
// then.
func (b *box) takeOver() {
	b.Helper()
	id := strings.ReplaceAll(b.identify().BootID, "-", "")
	const script = `tr -d - </proc/sys/kernel/random/boot_id; journalctl --list-boots | awk '$1 == 0 {print $2}'
journalctl -q -n 1 -o export | grep -a -e ^_BOOT_ID -e ^_MACHINE_ID | sort; cat /etc/machine-id`
	b.output("logger -p daemon.info mark")
	eventually(b, bootTimeout, "a record", func() error {
		if b.output("journalctl -q -b -n 20 | grep mark") == "" {
			return errors.New("there is none")
		}
		return nil
	})
	got := strings.Fields(b.output(script))
	if len(got) != 5 || got[0] != id || got[1] != id || got[2] != "_BOOT_ID="+id || got[3] != "_MACHINE_ID="+got[4] {
		b.Errorf("boot ID %s: %q", id, got)
	}
}

// namespaces shows that an unprivileged user can mount /proc in namespaces of
// their own, that they cannot enter the directory of the whole /proc, and how many
// mounts there are.
const namespaces = `su agent -s /bin/sh -c 'unshare -Urpf --mount-proc grep -c . /proc/self/mounts >/dev/null && echo mounted
ls /run/agentlab-proc >/dev/null 2>&1 || echo denied
cat /run/agentlab-proc/proc/1/stat >/dev/null 2>&1 || echo denied
if command -v bwrap >/dev/null; then bwrap --unshare-user --unshare-pid --ro-bind / / --dev /dev --proc /proc true || echo no bwrap; fi' 2>&1
grep -c ' /run/agentlab-proc/proc ' /proc/mounts; grep -c ' /proc/sys/kernel/random/boot_id ' /proc/mounts`

// wantNamespaces checks that the new boot ID does not prevent containers.
func (b *box) wantNamespaces() {
	b.Helper()
	if got := b.output(namespaces); got != "mounted\ndenied\ndenied\n1\n1" {
		b.Errorf("namespaces of a user: %q", got)
	}
}

// reach says whether the network carries the guest's frames.
const reach = `python3 -c 'import socket
try:
    socket.create_connection(("10.77.0.1", 8844), 2)
    print("open")
except TimeoutError:
    print("held")'`

// fork creates the nth sandbox from a snapshot, and starts it.
func (b *box) fork(n int, from backend.SnapshotRef) *box {
	b.Helper()
	sp := b.f.spec(n)
	sp.From = &from
	c := &box{TB: b.TB, f: b.f, d: b.d, ref: sp.Ref(), ctx: b.ctx}
	b.ok(b.d.Create(b.ctx, sp))
	c.boot()
	return c
}

// randoms are the random values of several guests.
type randoms struct {
	testing.TB
	seen map[string]string // from value to guest and source
}

func (r randoms) add(guest, text string, least int) {
	r.Helper()
	n := 0
	for line := range strings.Lines(text) {
		name, value, ok := strings.Cut(strings.TrimSpace(line), " ")
		switch {
		case !ok || value == "":
			r.Errorf("%s printed %q", guest, line)
		case slices.Contains(ownState, name):
		case r.seen[value] != "":
			r.Errorf("%s: %s has the value %s of %s", guest, name, value, r.seen[value])
		default:
			r.seen[value] = guest + ": " + name
			n++
		}
	}
	if n < least {
		r.Errorf("%s has %d values, want at least %d: %s", guest, n, least, text)
	}
}

// Guests that continue the same guest have no random value in common, and no
// identity. Processes of the user continue.
func TestClonesHaveOwnRandomValues(t *testing.T) {
	b := newBox(t, warmFixture(t), nil)
	program := filepath.Join(t.TempDir(), "random")
	cmd := exec.CommandContext(t.Context(), "go", "build", "-trimpath", "-ldflags", "-s -w", "-o", program, "./testdata/random")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	code, err := os.ReadFile(program)
	b.ok(err)
	clones, forks := 2, 2
	if sample.Full() {
		clones, forks = 8, 8
	}
	r := randoms{TB: t, seen: map[string]string{}}
	var source *box
	for n := range clones {
		c := b.clone(10+n, nil)
		c.takeOver()
		c.wantNamespaces()
		r.add(fmt.Sprintf("clone %d", n), c.output(randomValues), 16)
		if source == nil {
			source = c
		} else {
			b.ok(b.d.Destroy(b.ctx, c.ref))
		}
	}
	source.put("/root/random", code)
	source.output(oldProcesses)
	source.output(secretsOfSource)
	r.add("the source", source.output("/root/random; cat /root/old-*"), 6)
	saved, err := b.d.SaveSnapshot(b.ctx, source.ref, agentlab.NewUID())
	b.ok(err)
	for n := range forks {
		c := b.fork(20+n, saved.Ref)
		if got := c.output(reach); got != "held" {
			t.Errorf("the network of fork %d, before its identity: %s", n, got)
		}
		c.takeOver()
		if got := c.output(reach); got != "open" {
			t.Errorf("the network of fork %d: %s", n, got)
		}
		c.wantNamespaces()
		r.add(fmt.Sprintf("fork %d", n), c.output(randomValues), 20)
		r.add(fmt.Sprintf("fork %d", n), c.output(oldValues), 2)
		if left := c.output(secretsLeft); left != "" {
			t.Errorf("fork %d has secrets of the source: %s", n, left)
		}
		b.ok(b.d.Destroy(b.ctx, c.ref))
	}
	r.add("the source, later", source.output(oldValues), 2)
}
