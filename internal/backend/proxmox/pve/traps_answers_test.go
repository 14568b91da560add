package pve_test

import (
	"net/url"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend/proxmox/pve"
	"github.com/agentlab-vm/agentlab/internal/backend/proxmox/pvetest"
)

// Trap 10: pvesh prints the log of the task before its name. Whoever decodes
// the whole output takes a clone that was made for one that failed.
func TestTrap10(t *testing.T) {
	b := newBench(t, pvetest.Config{Waits: pvetest.ShortWaits()})
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
	b := newBench(t, pvetest.Config{Nodes: []string{"pve", "pve2"}, Waits: pvetest.ShortWaits()})
	b.AddTemplate(t, pvetest.Template{VMID: 9002, Node: "pve2"})
	c := pve.New(pve.NewShell(pve.ShellOptions{Bin: b.Bin()})).WithPoll(quickPoll)
	b.do(c.Clone(b.ctx(), "pve2", 9002, pve.CloneOptions{NewID: 101, Name: "sb-101", Description: "it's \"two\"\n$lines"}))
	if err := c.Set(b.ctx(), "pve2", 101, pve.Changes{Set: map[string]string{"cores": "2"}}); err != nil {
		t.Error(err)
	}
	cfg, err := c.Config(b.ctx(), "pve2", 101)
	if err != nil || cfg["description"] != "it's \"two\"\n$lines" || cfg.Int("cores", 0) != 2 {
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

// Trap 11: every fault is status 500, also a VM that does not exist, in two
// wordings. Whoever goes by the status takes a locked VM, or a storage that
// does not answer, for one that is gone, and forgets it while it runs.
func TestTrap11(t *testing.T) {
	b := newBench(t, pvetest.Config{Waits: pvetest.ShortWaits()})
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
}

// Trap 20: a token is never root, not even root's own. Whoever sets affinity
// or args with one fails in the middle of a creation, and nothing over REST
// takes a stale lock away.
func TestTrap20(t *testing.T) {
	b := newBench(t, pvetest.Config{Waits: pvetest.ShortWaits()})
	b.clone(101)
	for key, value := range map[string]string{"affinity": "0-1", "args": "-S"} {
		err := b.c.Set(b.ctx(), "pve", 101, pve.Changes{Set: map[string]string{key: value}})
		b.code(err, agentlab.CodeDenied)
		if !strings.Contains(agentlab.HintOf(err), "shell transport") {
			t.Errorf("%s: hint %q", key, agentlab.HintOf(err))
		}
	}
	err := b.c.Set(b.ctx(), "pve", 101, pve.Changes{Set: map[string]string{"name": "x", "skiplock": "1"}})
	b.code(err, agentlab.CodeDenied)
	if b.c.Root() != nil {
		t.Error("a token claims to be root")
	}
	shell := pve.New(pve.NewShell(pve.ShellOptions{Bin: b.Bin()}))
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
// for a blank. Whoever encodes once, or with "+", has no key in the guest.
func TestTrap21(t *testing.T) {
	const keys = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIPZ1Zk8nHk7p2mWq6Fh0K0cGzq1m0m3eDq0oU0r6J5aB agent@lab\n"
	for _, shell := range []bool{false, true} {
		b := newBench(t, pvetest.Config{Waits: pvetest.ShortWaits()})
		b.clone(101)
		c := b.c
		if shell {
			c = pve.New(pve.NewShell(pve.ShellOptions{Bin: b.Bin()}))
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

// Trap 37: truth values are 1 and 0, and the unit of a size depends on the
// call. Whoever sends "true" is refused, whoever forgets the G grows a disk to
// bytes.
func TestTrap37(t *testing.T) {
	b := newBench(t, pvetest.Config{Waits: pvetest.ShortWaits()})
	b.clone(101)
	for _, v := range []string{"true", "false", "yes", "no", "on", "off"} {
		b.code(b.c.Set(b.ctx(), "pve", 101, pve.Changes{Set: map[string]string{"onboot": v}}), agentlab.CodeInvalid)
	}
	for _, v := range []string{"1", "0"} {
		if err := b.c.Set(b.ctx(), "pve", 101, pve.Changes{Set: map[string]string{"onboot": v}}); err != nil {
			t.Error(err)
		}
	}
	b.do(b.c.Resize(b.ctx(), "pve", 101, "scsi0", "3G"))
	cfg, err := b.c.Config(b.ctx(), "pve", 101)
	if size, _ := pve.ParseProps(cfg["scsi0"]).Get("size"); err != nil || size != "3G" {
		t.Errorf("%q %v", cfg["scsi0"], err)
	}
	// The refusal of a smaller size is the task's.
	u, err := b.c.Resize(b.ctx(), "pve", 101, "scsi0", "1G")
	if err != nil {
		t.Fatal(err)
	}
	_, err = b.c.Wait(b.ctx(), u)
	if err == nil || !strings.Contains(err.Error(), "shrinking disks is not supported") {
		t.Error(err)
	}
}
