//go:build linux

package control_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/guest/guestd"
	"github.com/agentlab-vm/agentlab/test/guard"
)

// absent reports whether a file of the guest does not exist.
func (g *guest) absent(name string) bool {
	_, err := os.Lstat(filepath.Join(g.root, name))
	return os.IsNotExist(err)
}

// sleeper starts a process that the test ends, and returns its process ID.
func sleeper(t *testing.T) (pid int, ended <-chan struct{}) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "sleep", "1000")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() { defer close(done); _ = cmd.Wait() }()
	t.Cleanup(func() { _ = cmd.Process.Kill(); <-done })
	return cmd.Process.Pid, done
}

// A guest that was prepared as a template, and its copy.
func TestPrepare(t *testing.T) {
	g := newGuest(t, func(c *guestd.Config) { c.Runner = testRunner(t, t.TempDir()) })
	id := identity()
	id.RootBytes = 20 << 30
	if err := g.Prepare(guard.Context(t), guestapi.PrepareRequest{Network: &guestapi.Network{Address: "x"}}); agentlab.CodeOf(err) != agentlab.CodeInvalid {
		t.Errorf("a network that is none: %v", err)
	}
	const machineID = "0123456789abcdef0123456789abcdef"
	g.put(t, "etc/machine-id", machineID+"\n")
	g.put(t, "proc/sys/kernel/random/boot_id", "of the boot\n")
	const otherKey = "etc/ssh/ssh_host_rsa_key"
	g.put(t, otherKey, "a key of the image")
	for range 2 {
		if err := g.Prepare(guard.Context(t), guestapi.PrepareRequest{Network: id.Network}); err != nil {
			t.Fatal(err)
		}
	}
	files := map[string]os.FileInfo{}
	for _, name := range []string{"etc/machine-id", "etc/hostname", "etc/ssh/ssh_host_ed25519_key", "etc/ssh/ssh_host_ed25519_key.pub"} {
		fi, err := os.Stat(filepath.Join(g.root, name))
		if err != nil || fi.Size() > 0 {
			t.Fatalf("%s of a template: %v, %v", name, fi, err)
		}
		files[name] = fi
	}
	if !g.absent(otherKey) {
		t.Error("a template has a host key")
	}
	template := g.file(t, "run/agentlab/boot_id")
	if g.kernel.syncs != 2 || len(g.kernel.bootIDs) != 1 || g.file(t, "proc/sys/kernel/random/boot_id") != template {
		t.Errorf("%d syncs, boot IDs %q", g.kernel.syncs, g.kernel.bootIDs)
	}
	g.put(t, "run/log/journal/"+machineID+"/system.journal", "")
	g.put(t, "var/lib/dbus/machine-id", machineID+"\n")
	g.put(t, "var/lib/systemd/random-seed", "seed")
	networks := len(g.kernel.networks)
	g.kernel.grown = nil
	if _, err := g.SetIdentity(guard.Context(t), id); err != nil {
		t.Fatal(err)
	}
	if len(g.kernel.networks) != networks {
		t.Error("the network was configured again")
	}
	if len(g.kernel.grown) > 0 {
		t.Errorf("a root disk of the same size was extended: %v", g.kernel.grown)
	}
	now := strings.TrimSpace(g.file(t, "etc/machine-id"))
	if now == machineID || g.file(t, "var/lib/dbus/machine-id") != now+"\n" || g.absent("run/log/journal/"+now+"/system.journal") {
		t.Errorf("machine-id %q", now)
	}
	if !g.absent("var/lib/systemd/random-seed") {
		t.Error("the seed of the template is left")
	}
	bootID := g.file(t, "proc/sys/kernel/random/boot_id")
	if len(g.kernel.bootIDs) != 1 || bootID == template || len(bootID) != 37 {
		t.Errorf("boot ID %q after %q, mounted %q", bootID, template, g.kernel.bootIDs)
	}
	for name, old := range files {
		if fi, err := os.Stat(filepath.Join(g.root, name)); err != nil || fi.Size() == 0 || !os.SameFile(old, fi) || fi.Mode() != old.Mode() {
			t.Errorf("%s was not filled: %v, %v", name, fi, err)
		}
	}
	if err := g.Prepare(guard.Context(t), guestapi.PrepareRequest{}); agentlab.CodeOf(err) != agentlab.CodeConflict {
		t.Errorf("a guest with an identity was prepared: %v", err)
	}
	if _, err := g.SetIdentity(guard.Context(t), id); err != nil { // again: nothing changes
		t.Fatal(err)
	}
	if g.file(t, "proc/sys/kernel/random/boot_id") != bootID || strings.TrimSpace(g.file(t, "etc/machine-id")) != now {
		t.Error("a repeated identity replaced the machine-id or the boot ID")
	}
	// What users have changed since then does not get into a fork, except for the
	// network. It was configured with the repeated identity.
	g.put(t, otherKey, "a key of a user")
	if err := os.Remove(filepath.Join(g.root, "proc/sys/kernel/random/boot_id")); err != nil {
		t.Fatal(err)
	}
	g.put(t, "proc/sys/kernel/random/boot_id", "of the boot\n")
	id.UID += "-2"
	if _, err := g.SetIdentity(guard.Context(t), id); err != nil {
		t.Fatal(err)
	}
	if !g.absent(otherKey) || len(g.kernel.networks) != networks+1 || g.file(t, "proc/sys/kernel/random/boot_id") != g.file(t, "run/agentlab/boot_id") {
		t.Errorf("a fork: host key left %t, %d networks, boot ID %q", !g.absent(otherKey), len(g.kernel.networks), g.file(t, "proc/sys/kernel/random/boot_id"))
	}
	if got := g.file(t, "run/agentlab/uid"); got != id.UID+"\n" {
		t.Errorf("UID %q", got)
	}
	id.UID += "-3"
	other := *id.Network
	other.MTU = 1300
	id.Network = &other
	if _, err := g.SetIdentity(guard.Context(t), id); err != nil {
		t.Fatal(err)
	}
	if n := g.kernel.networks; len(n) != networks+2 || n[len(n)-1].MTU != 1300 {
		t.Errorf("a fork with another network: %+v", n)
	}
}

// A guest that continues another sandbox's has nothing of it afterwards that
// AgentLab has put there, and its journald has ended.
func TestIdentityOfFork(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "run"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	g := newGuest(t, func(c *guestd.Config) { c.Runner = testRunner(t, dir) })
	ran := func(want string) (pid int) {
		t.Helper()
		guard.Until(t, "the steps "+want, func() bool {
			got, last := steps(dir)
			pid = last
			return got == want
		})
		return pid
	}
	source := identity()
	source.Bootstrap = &guestapi.Bootstrap{Token: "token-of-the-source", Controller: "c", VMID: 1}
	if _, err := g.SetIdentity(guard.Context(t), source); err != nil {
		t.Fatal(err)
	}
	first := ran("begins")
	g.put(t, "run/agentlab/secrets/bootstrap.json", `{"runner":{"token":"x"}}`)
	g.put(t, "run/agentlab/ssh/authorized_keys.d/agent", "a key\n")
	g.put(t, "run/agentlab/boot_id", "of-the-source\n")
	journald, ended := sleeper(t)
	g.put(t, "sys/fs/cgroup/system.slice/systemd-journald.service/cgroup.procs", strconv.Itoa(journald)+"\n")
	user := g.sh(t, "echo ready; exec sleep 1000")
	user.shows(t, "ready")
	before := map[string]string{}
	for _, name := range []string{"etc/machine-id", "etc/ssh/ssh_host_ed25519_key", "etc/ssh/ssh_host_ed25519_key.pub", "run/agentlab/boot_id"} {
		before[name] = g.file(t, name)
	}

	fork := identity()
	fork.Bootstrap = &guestapi.Bootstrap{Token: "token-of-the-fork", Controller: "c", VMID: 2}
	h, err := g.SetIdentity(guard.Context(t), fork)
	if err != nil {
		t.Fatal(err)
	}
	if h.Identity != fork.UID || h.Bootstrapped {
		t.Errorf("%+v", h)
	}
	for name, old := range before {
		if g.file(t, name) == old {
			t.Errorf("%s is that of the source", name)
		}
	}
	for _, name := range []string{"run/agentlab/ssh/authorized_keys.d", "run/agentlab/secrets/bootstrap.json"} {
		if !g.absent(name) {
			t.Errorf("%s is left", name)
		}
	}
	if doc := g.file(t, "run/agentlab/bootstrap.json"); !strings.Contains(doc, fork.Bootstrap.Token) || strings.Contains(doc, source.Bootstrap.Token) {
		t.Errorf("bootstrap document: %s", doc)
	}
	<-ended
	second := ran("begins wipes begins") // the process that wipes is the runner of the fork
	if !dead(first) {
		t.Error("the runner of the source lives")
	}
	select {
	case <-user.ended:
		t.Error("a process of the user has ended")
	default:
	}

	fork.UID, fork.Bootstrap, fork.RootBytes = agentlab.NewUID(), nil, 33<<30
	if _, err := g.SetIdentity(guard.Context(t), fork); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(g.kernel.grown, []int64{33 << 30}) {
		t.Errorf("the root disk was extended to %v", g.kernel.grown)
	}
	if !g.absent("run/agentlab/bootstrap.json") {
		t.Error("a fork without a document has that of its source")
	}
	if !dead(second) {
		t.Error("the runner of the source lives")
	}
}
