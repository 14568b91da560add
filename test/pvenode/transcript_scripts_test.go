package pvenode_test

import (
	"fmt"
	"net/http"
	"os"
	"sort"
	"strings"
	"sync"
	"time"

	"github.com/agentlab-vm/agentlab/test/pvenode"
)

// script is what a recording does not show: how its node was set up, what was
// done between two entries, and how its other lines were made.
type script struct {
	setup func(*replay)
	steps []hidden
	// raw makes the lines that belong to no entry, by section, in order.
	raw map[string][]func(*replay) []string
}

// hidden is something done before an entry ("== section" for its first one).
type hidden struct {
	before string
	nth    int // which one of those that read the same; 0 is the first
	do     func(*replay)
}

func sh(lines ...string) func(*replay) {
	return func(r *replay) {
		for _, l := range lines {
			r.sh(l)
		}
	}
}

const (
	mib = 1 << 20
	// networkScript is what QEMU said on the machine of t6-power, which could
	// not make a tap device.
	networkScript = "qemu-system-x86_64: -netdev type=tap,id=net0,ifname=tap%sscript=/usr/libexec/qemu-server/pve-bridge," +
		"downscript=/usr/libexec/qemu-server/pve-bridgedown: network script /usr/libexec/qemu-server/pve-bridge failed with status 256"
)

// files are those of the node's root that recordings name.
func files(r *replay) {
	r.sparseFile("/root/cloud.img", 64*mib)
	r.writeFile("/root/k.pub", 0o600, publicKey+"\n")
}

// template is the VM that t1 makes, which all others begin with.
func template(r *replay) {
	files(r)
	r.sh(argv("qm create 9000 --name tmpl --memory 256 --cores 1 --net0 virtio,bridge=vmbr1 --scsihw virtio-scsi-single" +
		" --scsi0 local-zfs:0,import-from=/root/cloud.img --ide2 local-zfs:cloudinit --boot order=scsi0 --serial0 socket" +
		" --vga serial0 --agent enabled=1 --ostype l26 --kvm 0 --onboot 1 --tags tpl --description golden image")...)
	r.sh("qm resize 9000 scsi0 +64M")
	r.sh("qm template 9000")
}

// clones makes linked clones of the template.
func clones(r *replay, ids ...int) {
	for _, id := range ids {
		r.sh(fmt.Sprintf("qm clone 9000 %d --name sb-%d", id, id))
	}
}

// volumes makes volumes of VM 9999 on local-zfs, given as name and size.
func volumes(r *replay, nameAndSize ...string) {
	for _, v := range nameAndSize {
		name, size, _ := strings.Cut(v, " ")
		r.sh("pvesm", "alloc", "local-zfs", "9999", name, size)
	}
}

var scripts = map[string]script{
	"t1": {setup: files},
	"t2": {setup: func(r *replay) { template(r); clones(r, 101, 102) }},
	"t3": scriptT3, "t4": scriptT4, "t6-power": scriptT6Power, "t6": scriptT6,
	"t7": scriptT7, "t8": scriptT8, "t9": scriptT9,
}

var scriptT3 = script{
	setup: func(r *replay) {
		template(r)
		volumes(r, "vm-9999-agentlab-ws1 1G", "vm-9999-agentlab-ws2 1G", "vm-9999-disk-0 1G")
		r.sh("pvesm alloc local-zfs 102 vm-102-disk-1 4M") // what t2 left behind
		clones(r, 101, 102)
		r.sh("qm set 101 --scsi1 local-zfs:vm-9999-agentlab-ws1")
	},
	steps: []hidden{
		{before: "qm rollback 101 s3", do: func(r *replay) { r.n.ZFSSnapshot("local-zfs:vm-9999-agentlab-ws1", "agentlab-x") }},
		{before: "== template with snapshots, snapshot of a template", do: sh("qm clone 9000 103 --name sb-103", "qm snapshot 103 s1")},
	},
	raw: map[string][]func(*replay) []string{
		"destroying a VM leaves its snapshot behind on a foreign volume": {func(r *replay) []string {
			return r.n.ZFSSnapshots("local-zfs:vm-9999-agentlab-ws1")
		}},
	},
}

var scriptT4 = script{
	setup: func(r *replay) {
		template(r)
		clones(r, 101)
		snippets(r)
	},
	steps: []hidden{
		{before: "qm set 101 --hookscript local:snippets/hook.sh", nth: 2, do: func(r *replay) {
			if err := os.Chmod(r.n.HostPath("/var/lib/vz/snippets/hook.sh"), 0o755); err != nil {
				r.t.Fatal(err)
			}
		}},
	},
	raw: map[string][]func(*replay) []string{
		"description, tags, name, onboot, agent, protection": {func(r *replay) []string {
			return prefixed("  conf| ", r.n.ConfigFile(101))
		}},
	},
}

func snippets(r *replay) {
	r.writeFile("/var/lib/vz/snippets/a-101.yaml", 0o644, "#cloud-config\nuser: agent\n")
	r.writeFile("/var/lib/vz/snippets/hook.sh", 0o644, "#!/bin/sh\nexit 0\n")
}

func prefixed(prefix, content string) []string {
	var out []string
	for _, l := range strings.Split(strings.TrimSuffix(content, "\n"), "\n") {
		out = append(out, strings.TrimRight(prefix+l, " "))
	}
	return out
}

var startSteps = []hidden{
	{before: "== start errors", do: sh("qm set 101 --net0 virtio=BC:24:11:00:00:02,bridge=nosuch")},
	{before: "qm start 101", nth: 2, do: sh("qm set 101 --net0 virtio=BC:24:11:00:00:02,bridge=vmbr1",
		"qm set 101 --cicustom user=local:snippets/nosuch.yaml")},
	{before: "== start", do: sh("qm set 101 --delete cicustom")},
}

// scriptT6Power: that machine's QEMU never got a tap device.
var scriptT6Power = script{
	setup: func(r *replay) {
		template(r)
		clones(r, 101)
		for _, id := range []int{101, 102} {
			r.n.Fail("start.qemu", pvenode.Fault{
				VMID: id, Times: -1, Log: []string{fmt.Sprintf(networkScript, fmt.Sprintf("%di0,", id))},
				Error: "start failed: QEMU exited with code 1",
			})
		}
	},
	steps: append([]hidden{
		{before: "== same volume in two running VMs", do: func(r *replay) {
			clones(r, 102)
		}},
		{before: "== while running: destroy, detach a disk, set, resize, clone, template, move", do: func(r *replay) {
			volumes(r, "vm-9999-hot 1G")
		}},
	}, startSteps...),
}

var scriptT6 = script{
	setup: func(r *replay) {
		template(r)
		clones(r, 101)
		r.sh("qm", "set", "101", "--args",
			`-kernel /srv/guest/vmlinuz -initrd /srv/guest/initrd.gz -append console=ttyS0,115200\ quiet\ panic=1\ net.ifnames=0`)
	},
	steps: append([]hidden{
		{before: "== start", do: func(r *replay) { r.guest(101).agent(false) }},
		{before: "GET /nodes/pve/qemu/101/agent/network-get-interfaces", do: func(r *replay) { r.guest(101).agent(true) }},
		{before: "qm set 101 --scsi1 local-zfs:vm-9999-hot", do: func(r *replay) { volumes(r, "vm-9999-hot 1G") }},
		{before: "qm disk move 101 scsi1 --target-vmid 102 --target-disk scsi1", do: func(r *replay) { clones(r, 102) }},
		{before: "== shutdown without a guest that answers", do: func(r *replay) {
			r.guest(101).deaf()
			r.sh("qm set 101 --delete args")
			r.sh("qm start 101")
		}},
		{before: "== suspend to disk (needs pve-qemu: expected to fail here, but shows the locks)", do: func(r *replay) {
			r.sh("qm start 101")
			r.n.Fail("suspend.state", pvenode.Fault{
				Log:   []string{"VM 101 qmp command 'savevm-end' failed - The command savevm-end has not been found"},
				Error: "VM 101 qmp command 'savevm-start' failed - The command savevm-start has not been found",
			})
		}},
	}, startSteps...),
	raw: map[string][]func(*replay) []string{
		"agent running": {
			func(r *replay) []string {
				a := r.do(http.MethodPost, "/api2/json/nodes/pve/qemu/101/agent/exec", form, "command=%2Fbin%2Fecho&command=hello", nil)
				return []string{"> exec with command as repeated parameter", "HTTP/1.1 " + a.status, r.pidOf("181", a.body), "> exec with JSON body", r.pidOf("183", r.execJSON())}
			},
		},
	},
}

// form is the type of the recordings' bodies.
const form = "application/x-www-form-urlencoded"

// execJSON runs a program of the guest, its command as a JSON list.
func (r *replay) execJSON() string {
	a := r.do(http.MethodPost, "/api2/json/nodes/pve/qemu/101/agent/exec", "application/json",
		`{"command":["/bin/sh","-c","echo out; echo err >&2; exit 3"]}`, nil)
	return a.body
}

var scriptT7 = script{
	setup: func(r *replay) {
		template(r)
		files(r)
		if r.version == "8.4" {
			r.sh("pveum user add agentlab@pve")
		}
		volumes(r, "vm-9999-agentlab-ws2 1G", "vm-9999-disk-0 1G", "vm-9999-hot 1G")
		snippets(r)
	},
	steps: []hidden{
		{before: "GET /version", do: func(r *replay) { r.keep, r.token = r.token, "root@pam!t1=00000000-0000-0000-0000-000000000000" }},
		{before: "GET /version", nth: 2, do: func(r *replay) { r.token = "root@pam!nosuch=" + r.keep[len("root@pam!t1="):] }},
		{before: "GET /version", nth: 3, do: func(r *replay) { r.token = "nobody@pve!t1=" + r.keep[len("root@pam!t1="):] }},
		{before: "GET /nosuch", do: func(r *replay) { r.token = r.keep }},
		{before: "GET /version", nth: 4, do: func(r *replay) { r.token = "agentlab@pve!ctl=" + r.made }},
		{before: "POST /nodes/pve/qemu/9000/clone newid=101 pool=agentlab", do: grant("/pool/agentlab",
			"VM.Allocate,VM.Clone,VM.Audit,VM.PowerMgmt,VM.Config.Disk,VM.Config.CPU,VM.Config.Memory,VM.Config.Network,"+
				"VM.Config.Options,VM.Config.Cloudinit,VM.Config.CDROM,VM.Snapshot,VM.Snapshot.Rollback,Pool.Audit")},
		{before: "POST /nodes/pve/qemu/9000/clone newid=101 pool=agentlab", nth: 2, do: grantNew("AgentLabStore", "/storage/local-zfs", "Datastore.AllocateSpace,Datastore.Audit")},
		{before: "POST /nodes/pve/qemu/9000/clone newid=101 pool=agentlab", nth: 3, do: grantNew("AgentLabNet", "/sdn/zones/localnetwork/vmbr1", "SDN.Use")},
		{before: "GET /nodes/pve/tasks limit=2 source=all", do: func(r *replay) { r.token = r.keep }},
	},
	raw: map[string][]func(*replay) []string{
		"auth failures": {rawAuth, rawBodies},
	},
}

// grant makes the role of the recording what it was then, and gives it on a
// path to the user and to its token.
func grant(path, privs string) func(*replay) {
	return func(r *replay) {
		r.sh("pveum", "role", "modify", "AgentLab", "--privs", privs)
		giveRole(r, path, "AgentLab")
	}
}

func grantNew(role, path, privs string) func(*replay) {
	return func(r *replay) {
		r.sh("pveum", "role", "add", role, "--privs", privs)
		giveRole(r, path, role)
	}
}

func giveRole(r *replay, path, role string) {
	r.sh("pveum", "acl", "modify", path, "--users", "agentlab@pve", "--roles", role)
	r.sh("pveum", "acl", "modify", path, "--tokens", "agentlab@pve!ctl", "--roles", role)
}

func rawAuth(r *replay) []string {
	r.token = ""
	none := r.do(http.MethodGet, "/api2/json/version", "", "", nil)
	bearer := r.do(http.MethodGet, "/api2/json/version", "", "", map[string]string{"Authorization": "Bearer x"})
	r.token = r.keep
	plain := r.do(http.MethodGet, "/api2/version", "", "", nil)
	return append([]string{"> no header at all", "HTTP/1.1 " + none.status, "> cookie-like header", "HTTP/1.1 " + bearer.status,
		"> path without format"}, headed(plain)...)
}

// headed is a status line with the headers that refusals of the server have.
func headed(a answer) []string {
	out := []string{"HTTP/1.1 " + a.status}
	if v := a.header.Get("Cache-Control"); v != "" {
		out = append(out, "Cache-Control: "+v)
	}
	if a.closed {
		out = append(out, "Connection: close")
	}
	return out
}

func rawBodies(r *replay) []string {
	var out []string
	note := func(title string, lines ...string) { out = append(append(out, title), lines...) }
	note("> DELETE with a body", headed(r.do(http.MethodDelete, "/api2/json/nodes/pve/qemu/9000", form, "purge=1", nil))...)
	note("> chunked body", headed(r.do(http.MethodPut, "/api2/json/nodes/pve/qemu/9000/config", form, "onboot=1",
		map[string]string{"Transfer-Encoding": "chunked"}))...)
	note("> POST with no content type / text/plain", headed(r.do(http.MethodPut, "/api2/json/nodes/pve/qemu/9000/config", "text/plain", "onboot=1", nil))...)
	for _, body := range []string{`{"onboot":true,"cores":2,"memory":300}`, `{"onboot":1}`} {
		title := "> JSON body with types"
		if body == `{"onboot":1}` {
			title = "> JSON body onboot:1"
		}
		a := r.do(http.MethodPut, "/api2/json/nodes/pve/qemu/9000/config", "application/json", body, nil)
		note(title, "HTTP/1.1 "+a.status, a.body)
	}
	out = append(out, "> bool spellings")
	for _, b := range []string{"1", "0", "yes", "no", "true", "false", "on", "off", "True"} {
		a := r.do(http.MethodPut, "/api2/json/nodes/pve/qemu/9000/config", form, "onboot="+b, nil)
		out = append(out, "onboot="+b+" "+a.status[:3])
	}
	return out
}

var scriptT8 = script{
	setup: func(r *replay) {
		template(r)
		r.sh("qm set 9000 --memory 300 --cores 2 --onboot 0")
		r.sh("pveum pool add agentlab")
		snippets(r)
		r.writeFile("/var/lib/vz/snippets/hook.sh", 0o755, "#!/bin/sh\nexit 0\n")
		r.qcow2("/var/lib/vz/import/cloud.qcow2", 64*mib, 196616)
	},
	steps: []hidden{
		// All numbers below 300 are taken then.
		{before: "GET /cluster/nextid", nth: 2, do: func(r *replay) { r.n.SetNextIDs(300, 1000000) }},
		{before: "== race: two clones to the same newid at once, by REST", do: func(r *replay) { r.n.SetNextIDs(100, 1000000) }},
		{before: "qm clone 9000 111 --name x", do: func(r *replay) { r.release = r.n.HoldLock("/var/lock/qemu-server/lock-9000.conf") }},
		{before: "qm set 9000 --onboot 1", do: func(r *replay) {
			const file = "/var/lock/qemu-server/lock-9000.conf"
			waited := r.n.Awaited(file)
			go func() { // lets go once the command waits
				for r.n.Awaited(file) == waited && r.t.Context().Err() == nil {
					time.Sleep(time.Millisecond)
				}
				r.release()
			}()
		}},
		{before: "== a storage lock held", do: func(r *replay) {
			r.release = r.n.HoldLock("/var/lock/pve-manager/pve-storage-local-zfs")
		}},
		{before: "== pools", do: func(r *replay) {
			r.release()
			for id := 102; id <= 110; id++ {
				r.sh(fmt.Sprintf("qm destroy %d", id))
			}
			r.sh("qm destroy 300")
			r.sh("qm create 101 --name sb --memory 300 --cores 2 --net0 virtio,bridge=vmbr1")
			r.sh("qm create 102 --name sb-102")
		}},
		{before: "DELETE /nodes/pve/storage/local/content/local:snippets/hook.sh", do: func(*replay) {}},
	},
	raw: map[string][]func(*replay) []string{
		"race: two clones to the same newid at once, by REST":      {rawRace},
		"eight clones of one template at once (distinct ids), CLI": {rawEight},
		"upload":   {rawUpload},
		"firewall": {rawFirewall, firewallNames, firewallNames},
		"TLS":      {rawTLS},
	},
}

// rawRace clones twice to one number at once.
func rawRace(r *replay) []string {
	answers := make([]answer, 2)
	begun := make(chan struct{}) // both are past their early checks
	r.n.Fail("qmclone", pvenode.Fault{VMID: 300, Hold: begun, Times: 2})
	var wg sync.WaitGroup
	for i := range answers {
		wg.Add(1)
		go func() {
			defer wg.Done()
			answers[i] = r.call(http.MethodPost, "/nodes/pve/qemu/9000/clone", [][2]string{{"newid", "300"}, {"name", "a"}})
		}()
	}
	wg.Wait()
	close(begun)
	out := []string{answers[0].body, answers[1].body}
	var ends []string
	for _, a := range answers {
		ends = append(ends, r.waitTask(upidOf(a.body)))
	}
	sort.Slice(ends, func(i, _ int) bool { return strings.Contains(ends[i], `"OK"`) })
	for i, e := range ends {
		ends[i] = jsonLines(e)[0]
	}
	return append(out, ends...)
}

// rawEight clones eight times at once. How many wait, and in which order they
// end, is chance.
func rawEight(r *replay) []string {
	codes := make([]string, 8)
	var wg sync.WaitGroup
	for i := range codes {
		wg.Add(1)
		go func() {
			defer wg.Done()
			_, _, rc := r.run([]string{"qm", "clone", "9000", fmt.Sprint(103 + i), "--name", fmt.Sprintf("c%d", 103+i)})
			codes[i] = fmt.Sprintf("%d rc=%d", 103+i, rc)
		}()
	}
	wg.Wait()
	return codes
}
