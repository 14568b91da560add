package pve_test

import (
	"net/url"
	"slices"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend/proxmox/pve"
	"github.com/agentlab-vm/agentlab/test/pvenode"
)

// Trap 10: pvesh prints the log of the task before its name. A client that
// decodes the whole output treats a successful clone as failed.
func TestTrap10(t *testing.T) {
	b := newBench(t, pvenode.Config{Waits: pvenode.ShortWaits()})
	tr := pve.NewShell(pve.ShellOptions{Bin: b.Bin()})
	c := pve.New(tr).WithPoll(quickPoll)
	u, err := c.Clone(b.ctx(), "pve", 9000, pve.CloneOptions{NewID: 101, Name: "sb-101", Description: "two\nlines"})
	if err != nil || u.Type() != "qmclone" {
		t.Fatal(u, err)
	}
	b.do(u, nil)
	cfg, err := c.Config(b.ctx(), "pve", 101)
	if err != nil || cfg["description"] != "two\nlines" {
		t.Error(cfg, err)
	}
	if log, err := c.TaskLog(b.ctx(), u, 0, 50); err != nil || len(log) < 2 {
		t.Errorf("the task had no log: %q %v", log, err)
	}
	// pvesh exits with 0 also where its task has failed (trap 9): the task
	// tells.
	u, err = c.Start(b.ctx(), "pve", 9000)
	if err != nil {
		t.Fatal(err)
	}
	_, err = c.Wait(b.ctx(), u)
	b.code(err, agentlab.CodeConflict)
}

// Of a task on another node pvesh prints log and name as one JSON string.
func TestTrap10OnAnotherNode(t *testing.T) {
	b := newBench(t, pvenode.Config{Nodes: []string{"pve", "pve2"}, Waits: pvenode.ShortWaits()})
	b.AddTemplate(t, pvenode.Template{VMID: 9002, Node: "pve2"})
	c := b.shell()
	b.do(c.Clone(b.ctx(), "pve2", 9002, pve.CloneOptions{NewID: 101, Name: "sb-101", Description: "it's \"two\"\n$lines"}))
	if err := c.Set(b.ctx(), "pve2", 101, pve.Changes{Set: map[string]string{"cores": "2"}}); err != nil {
		t.Error(err)
	}
	cfg, err := c.Config(b.ctx(), "pve2", 101)
	if err != nil || cfg["description"] != "it's \"two\"\n$lines" || cfg["cores"] != "2" {
		t.Error(cfg, err)
	}
	b.do(c.Start(b.ctx(), "pve2", 101))
	st, err := c.Status(b.ctx(), "pve2", 101)
	if err != nil || !st.Running() {
		t.Error(st, err)
	}
	_, err = c.Destroy(b.ctx(), "pve2", 101, false)
	b.code(err, agentlab.CodeConflict)
	_, err = c.Config(b.ctx(), "pve2", 777)
	b.code(err, agentlab.CodeNotFound)
}

// Trap 11: every fault is status 500, also a VM that does not exist, with two
// different messages. A client that checks only the status treats a locked VM,
// or a storage that does not answer, as a removed VM, and forgets it while it
// runs.
func TestTrap11(t *testing.T) {
	both(t, pvenode.Config{Waits: pvenode.ShortWaits()}, func(t *testing.T, b *bench) {
		ctx := b.ctx()
		_, err := b.c.Config(ctx, "pve", 777)
		b.code(err, agentlab.CodeNotFound)
		_, err = b.c.Status(ctx, "pve", 777)
		b.code(err, agentlab.CodeNotFound)
		_, err = b.c.Clone(ctx, "pve", 777, pve.CloneOptions{NewID: 101})
		b.code(err, agentlab.CodeNotFound)
		_, err = b.c.Destroy(ctx, "pve", 777, false)
		b.code(err, agentlab.CodeNotFound)
		u, err := b.c.Start(ctx, "pve", 777)
		if err == nil {
			_, err = b.c.Wait(ctx, u)
		}
		b.code(err, agentlab.CodeNotFound)

		b.clone(101)
		b.Edit(101, map[string]string{"lock": "backup"})
		err = b.c.Set(ctx, "pve", 101, pve.Changes{Set: map[string]string{"name": "x"}})
		b.code(err, agentlab.CodeBusy)
		u, err = b.c.Start(ctx, "pve", 101)
		if err == nil {
			_, err = b.c.Wait(ctx, u)
		}
		b.code(err, agentlab.CodeBusy)
		_, err = b.c.Clone(ctx, "pve", 9000, pve.CloneOptions{NewID: 101})
		b.code(err, agentlab.CodeExists)
		_, err = b.c.Config(ctx, "other", 101)
		if code := agentlab.CodeOf(err); code == agentlab.CodeNotFound || err == nil {
			t.Errorf("a node that does not exist says that the VM is gone: %v", err)
		}
		_, err = b.c.StorageStatus(ctx, "pve", "nosuch")
		b.code(err, agentlab.CodeInvalid)
	})
}

// Trap 15: the list shows a paused VM as running, and a task that has stopped
// may have failed. A client that relies on the list resumes nothing. A client
// that relies on "stopped" treats a VM that did not start as running.
func TestTrap15(t *testing.T) {
	both(t, pvenode.Config{Waits: pvenode.ShortWaits()}, func(t *testing.T, b *bench) {
		b.clone(101)
		b.do(b.c.Start(b.ctx(), "pve", 101))
		b.do(b.c.Suspend(b.ctx(), "pve", 101))
		vms, err := b.c.VMs(b.ctx(), "pve")
		if err != nil {
			t.Fatal(err)
		}
		i := slices.IndexFunc(vms, func(v pve.VM) bool { return v.VMID == 101 })
		if i < 0 || vms[i].Status != "running" {
			t.Errorf("%+v", vms)
		}
		st, err := b.c.Status(b.ctx(), "pve", 101)
		if err != nil || !st.Running() || !st.Paused() {
			t.Errorf("%+v %v", st, err)
		}
		b.do(b.c.Resume(b.ctx(), "pve", 101))
		u, err := b.c.Start(b.ctx(), "pve", 101)
		if err != nil {
			t.Fatal(err)
		}
		task, err := b.c.Wait(b.ctx(), u)
		if task.Status != "stopped" || task.ExitStatus != "VM 101 already running" {
			t.Errorf("%+v", task)
		}
		b.code(err, agentlab.CodeConflict)
		for call := range b.Calls() {
			if strings.Contains(call, "/cluster/resources") {
				t.Error("the cluster's cached list was asked for a state")
			}
		}
	})
}

// Trap 20: a token is never root, not even root's own. A client that sets
// affinity or args with a token fails in the middle of a creation, and no REST
// call removes a stale lock.
func TestTrap20(t *testing.T) {
	b := newBench(t, pvenode.Config{Waits: pvenode.ShortWaits()})
	b.clone(101)
	for key, value := range map[string]string{"affinity": "0-1", "args": "-S"} {
		err := b.c.Set(b.ctx(), "pve", 101, pve.Changes{Set: map[string]string{key: value}})
		b.code(err, agentlab.CodeDenied)
		if !strings.Contains(agentlab.HintOf(err), "transport: shell") {
			t.Errorf("%s: hint %q", key, agentlab.HintOf(err))
		}
	}
	err := b.c.Set(b.ctx(), "pve", 101, pve.Changes{Set: map[string]string{"name": "x", "skiplock": "1"}})
	b.code(err, agentlab.CodeDenied)
	if b.c.Root() != nil {
		t.Error("a token claims to be root")
	}
	shell := b.shell()
	if err := shell.Set(b.ctx(), "pve", 101, pve.Changes{Set: map[string]string{"affinity": "0-1", "lock": "backup"}}); err != nil {
		t.Errorf("root on the node: %v", err)
	}
	if err := shell.Root().Unlock(b.ctx(), 101); err != nil {
		t.Error(err)
	}
	if cfg, err := shell.Config(b.ctx(), "pve", 101); err != nil || cfg["affinity"] != "0-1" || cfg["lock"] != "" {
		t.Errorf("%v %v", cfg, err)
	}
}

// Trap 21: keys are percent-encoded before the call's own encoding, with %20
// for a blank. If a client encodes once, or with "+", the guest gets no key.
func TestTrap21(t *testing.T) {
	const keys = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIPZ1Zk8nHk7p2mWq6Fh0K0cGzq1m0m3eDq0oU0r6J5aB agent@lab\n"
	for _, shell := range []bool{false, true} {
		b := newBench(t, pvenode.Config{Waits: pvenode.ShortWaits()})
		b.clone(101)
		c := b.c
		if shell {
			c = b.shell()
		}
		set := func(v string) error {
			return c.Set(b.ctx(), "pve", 101, pve.Changes{Set: map[string]string{"sshkeys": v}})
		}
		if err := set(pve.EncodeSSHKeys(keys)); err != nil {
			t.Error(err)
		}
		cfg, err := c.Config(b.ctx(), "pve", 101)
		if got, uerr := url.PathUnescape(cfg["sshkeys"]); err != nil || uerr != nil || got != keys {
			t.Errorf("%q %v", cfg["sshkeys"], err)
		}
		b.code(set(keys), agentlab.CodeInvalid)
		b.code(set(url.QueryEscape(keys)), agentlab.CodeInvalid)
	}
}
