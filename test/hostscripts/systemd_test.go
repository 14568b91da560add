package hostscripts

import (
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// boot goes on where the script hold ends, with the real systemd as process 1
// and the bus that systemd-run needs, when there is a file /tmp/go.
const boot = `
mount -t cgroup2 cgroup2 sys/fs/cgroup
umount -R dev && mount -t tmpfs tmpfs dev
for d in null:3 zero:5 full:7 random:8 urandom:9; do mknod -m 666 "dev/${d%:*}" c 1 "${d#*:}"; done
ln -s /proc/self/fd dev/fd && mkdir dev/pts dev/shm
rm -rf etc/systemd/system/*.wants etc/fstab && mkdir -p etc/systemd/system && touch etc/fstab
printf '[Unit]\nRequires=basic.target dbus.service\nAfter=basic.target dbus.service\n' >etc/systemd/system/default.target
for u in lib/systemd/system/systemd-*.service lib/systemd/system/systemd-journald*.socket lib/systemd/system/apparmor.service; do
	ln -sf /dev/null "etc/systemd/system/${u##*/}"
done
echo ready
while [ ! -e tmp/go ]; do sleep 0.05; done
exec chroot . /usr/bin/env -i container=docker /lib/systemd/systemd --log-target=console --log-level=warning >/dev/null 2>&1`

// pveshProbe prints how it is run, and answers some calls like a node of Proxmox
// VE without any VM.
const pveshProbe = `#!/bin/sh
{
	echo "call $*"
	grep -E '^(CapBnd|Seccomp|NoNewPrivs):' /proc/self/status
	grep -o '0::.*' /proc/self/cgroup
	touch /etc/written-by-pvesh && echo "writes to /etc"
	[ "$(readlink /proc/self/ns/mnt)" = "$(readlink /proc/1/ns/mnt)" ] && echo "the machine's mounts"
} >>/var/log/pvesh.log 2>&1
case "$2" in
/version) echo '{"release":"8.4","version":"8.4.21","repoid":"2606ac8511111111"}' ;;
/nodes) echo '[{"node":"'"$(hostname)"'","type":"node","id":"node/x","status":"online"}]' ;;
/nodes/*/qemu/*/config)
	vm=${2%/config}
	echo "Configuration file 'nodes/$(hostname)/qemu-server/${vm##*/}.conf' does not exist" >&2
	exit 2
	;;
/nodes/*/storage/local/status) echo '{"type":"dir","content":"iso,snippets,vztmpl","active":1,"enabled":1,"shared":0,"total":1,"used":0,"avail":1}' ;;
*) echo "no '$2' resource" >&2; exit 2 ;;
esac
`

// On a node with the real systemd, install_host.sh makes a daemon that runs in
// its unit's confinement while pvesh runs outside of it.
func TestUnderSystemd(t *testing.T) {
	for _, need := range []string{"/lib/systemd/systemd", "dbus-daemon", "systemd-run"} {
		if _, err := exec.LookPath(need); err != nil {
			t.Skipf("%v (apt-get install systemd dbus)", err)
		}
	}
	start, _, ok := strings.Cut(hold, "echo ready\n")
	if !ok {
		t.Fatal("the script of a host has another end")
	}
	h := begin(t, start+boot)
	h.write("/tmp/go", "")
	deadline := time.Now().Add(60 * time.Second)
	for h.do("systemctl", "is-system-running").stdout != "running\n" {
		if time.Now().After(deadline) {
			t.Skipf("systemd does not boot in namespaces here: %+v", h.do("systemctl", "--failed", "--no-pager"))
		}
		time.Sleep(50 * time.Millisecond)
	}
	h.dir = filepath.Join("/proc", h.pid, "root") // systemd is in its root
	h.ok("mkdir", "-p", "/etc/pve", "/var/lib/vz")
	h.write("/usr/bin/pvesh", pveshProbe)
	h.ok("chmod", "755", "/usr/bin/pvesh")

	commands := h.script("install_host.sh", "--apply").commands()
	contains(t, "commands", commands, "write /etc/agentlab/config.yaml 0644", "systemctl enable agentlab-network.service", "systemctl restart agentlabd.service", "install -d -m 0755 /var/lib/vz/snippets")
	h.settled("install_host.sh")
	// It answers, and what the node lacks still is an error.
	if r := h.do(lab, "status"); r.code != 1 || !strings.Contains(r.stdout, "proxmox") || !strings.Contains(r.stdout, "create_template.sh") {
		t.Errorf("%+v", r)
	}
	unit := h.ok("sh", "-c", "grep -E '^(CapBnd|Seccomp):' /proc/$(systemctl show -p MainPID --value agentlabd)/status")
	if !strings.Contains(unit, "Seccomp:\t2") {
		t.Errorf("the daemon is not confined: %s", unit)
	}
	said := h.read("/var/log/pvesh.log")
	for _, want := range []string{"call get /version --output-format json\n", "Seccomp:\t0\n", "NoNewPrivs:\t0\n", "0::/system.slice/run-", "writes to /etc\n", "the machine's mounts\n"} {
		if !strings.Contains(said, want) {
			t.Errorf("pvesh: no %q in\n%s", want, said)
		}
	}
	if caps := strings.SplitN(unit, "\n", 2)[0]; strings.Contains(said, caps) || strings.Contains(said, "agentlabd.service") {
		t.Errorf("pvesh has the unit's capabilities or is in its group: %s\n%s", caps, said)
	}
	h.ok("test", "-w", "/var/lib/vz/snippets")
	// When the node goes down the daemon ends before Proxmox stops the VMs.
	if after := h.ok("systemctl", "show", "-p", "After", "--value", "agentlabd"); !strings.Contains(after, "pve-guests.service") {
		t.Errorf("agentlabd is after %s", after)
	}
	// A node whose network is not set up yet: init says what is missing, in the
	// order in which it is made.
	rep, _ := h.init()
	names := []string{}
	for _, c := range rep.Checks {
		names = append(names, c.Name)
	}
	if got := strings.Join(names, " "); !strings.HasPrefix(got, "installation bridge firewall template daemon ") || rep.level("installation") != "ok" || rep.level("bridge") != "error" || rep.level("firewall") != "error" || rep.level("proxmox-version") != "ok" {
		t.Errorf("%+v", rep)
	}
	h.carried("install_host.sh", "--remove")
	if got := h.do("systemctl", "is-active", "agentlabd").stdout; got != "inactive\n" {
		t.Errorf("after removal the daemon is %s", got)
	}
}

// carried runs a script and then finds nothing more to do.
func (h *host) carried(args ...string) {
	h.Helper()
	if r := h.script(append(append([]string{}, args...), "--apply")...); r.code != 0 {
		h.Fatalf("%q: %+v", args, r)
	}
	h.settled(args...)
}
