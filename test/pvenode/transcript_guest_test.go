package pvenode_test

import (
	"context"
	"strings"
	"sync"

	"github.com/agentlab-vm/agentlab/test/pvenode"
)

// guest is what runs in one VM of a replay: the small guest of the recorded
// machine.
type guest struct {
	mu     sync.Mutex
	silent bool // its agent has not started
	closed bool // it hears neither the agent nor the power button
	now    *pvenode.ScriptedGuest
}

// guest returns the guest of a VM, also before it is started.
func (r *replay) guest(vmid int) *guest {
	r.guestsMu.Lock()
	defer r.guestsMu.Unlock()
	if r.guests[vmid] == nil {
		r.guests[vmid] = &guest{}
	}
	return r.guests[vmid]
}

// agent turns the guest agent on or off.
func (g *guest) agent(on bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.silent = !on
	if g.now != nil {
		g.now.SetAgent(on)
	}
}

// deaf makes every later start one of a guest that does not react.
func (g *guest) deaf() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.silent, g.closed = true, true
}

// boot starts the guest of a VM.
func (r *replay) boot(_ context.Context, b pvenode.Boot) (pvenode.Guest, error) {
	g := r.guest(b.VMID)
	g.mu.Lock()
	defer g.mu.Unlock()
	g.now = (&pvenode.ScriptedGuest{NoAgent: g.silent, Deaf: g.closed, OnAgent: recordedAgent}).Start(b)
	return g.now, nil
}

// recordedAgent answers what the guest of the recordings answered otherwise
// than a guest of the fake node.
func recordedAgent(command string, args map[string]any) (any, bool, error) {
	switch command {
	case "guest-exec":
		if argv, _ := args["arg"].([]string); args["path"] == "/bin/sleep" {
			return map[string]any{"pid": map[string]int{"5": 191, "1": 193}[argv[0]]}, true, nil
		}
	case "guest-exec-status":
		if args["pid"] == 191 || args["pid"] == 193 { // they still sleep
			return map[string]any{"exited": false}, true, nil
		}
	case "guest-network-get-interfaces":
		address := func(ip, kind string, prefix int) map[string]any {
			return map[string]any{"ip-address": ip, "ip-address-type": kind, "prefix": prefix}
		}
		statistics := map[string]any{}
		for _, k := range []string{"rx-bytes", "rx-packets", "rx-errs", "rx-dropped", "tx-bytes", "tx-packets", "tx-errs", "tx-dropped"} {
			statistics[k] = 0
		}
		return []any{
			map[string]any{"name": "lo", "hardware-address": "00:00:00:00:00:00", "statistics": statistics,
				"ip-addresses": []any{address("127.0.0.1", "ipv4", 8), address("::1", "ipv6", 128)}},
			map[string]any{"name": "eth0", "hardware-address": "bc:24:11:00:00:02", "statistics": statistics,
				"ip-addresses": []any{address("10.77.0.55", "ipv4", 16), address("fe80::be24:11ff:fe00:2", "ipv6", 64)}},
		}, true, nil
	case "guest-get-osinfo":
		return map[string]any{"kernel-release": "6.1.0-56-cloud-amd64", "machine": "x86_64",
			"kernel-version": "#1 SMP PREEMPT_DYNAMIC Debian 6.1.192-2 (2026-11-16)"}, true, nil
	case "guest-get-host-name":
		return map[string]any{"host-name": "guest1"}, true, nil
	case "guest-info":
		return map[string]any{"version": "7.2.22", "supported_commands": recordedCommands()}, true, nil
	}
	return nil, false, nil
}

// recordedCommands are the abilities of the recorded guest agent: those with a
// "-" are turned off, those with a "!" answer nothing when they succeed.
func recordedCommands() []any {
	var out []any
	for _, name := range strings.Fields(`get-cpustats get-diskstats ssh-remove-authorized-keys ssh-add-authorized-keys
		ssh-get-authorized-keys -get-devices get-osinfo get-timezone get-users get-host-name exec exec-status
		get-memory-block-info set-memory-blocks get-memory-blocks set-user-password get-fsinfo get-disks set-vcpus get-vcpus
		network-get-interfaces !suspend-hybrid !suspend-ram !suspend-disk fstrim fsfreeze-thaw fsfreeze-freeze-list
		fsfreeze-freeze fsfreeze-status file-flush file-seek file-write file-read file-close file-open !shutdown info set-time
		get-time ping sync sync-delimited`) {
		plain := strings.TrimLeft(name, "-!")
		out = append(out, map[string]any{"name": "guest-" + plain, "enabled": name[0] != '-', "success-response": name[0] != '!'})
	}
	return out
}
