package proxmox

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/backendtest"
	"github.com/agentlab-vm/agentlab/internal/backend/proxmox/pve"
	"github.com/agentlab-vm/agentlab/test/sample"
)

// sampledCrashPoints is how many crash points all variants but one try in a
// run that is not full.
const sampledCrashPoints = 6

// The conformance suite, over both transports and on all kinds of storage.
func TestConformance(t *testing.T) {
	type variant struct{ transport, storage string }
	var others []variant
	for _, transport := range []string{"rest", "shell"} {
		for _, storage := range slices.Sorted(maps.Keys(storages)) {
			if v := (variant{transport, storage}); v != (variant{"rest", "zfspool"}) {
				others = append(others, v)
			}
		}
	}
	run := func(v variant, all bool) {
		t.Run(v.transport+"/"+v.storage, func(t *testing.T) {
			t.Parallel()
			backendtest.Run(t, backendtest.Config{
				New: func(t *testing.T) *backendtest.Harness {
					h := harness(newWorld(t, worldConfig{storage: v.storage, shell: v.transport == "shell"}))
					if !all {
						h.CrashPoints = sample.Of(t, sampledCrashPoints, h.CrashPoints)
					}
					return h
				},
				Parallel: 6,
			})
		})
	}
	run(variant{"rest", "zfspool"}, true)
	if sample.Short(t, "it repeats the suite with each transport and storage") {
		return
	}
	// A sample with each transport and each storage.
	for _, v := range sample.Cover(t, others, func(v variant) []string { return []string{v.transport, v.storage} }) {
		run(v, false)
	}
}

func harness(w *world) *backendtest.Harness {
	h := &backendtest.Harness{
		Driver: mortal{w.driver},

		Optional: []string{"Power", "Net", "Snapshots", "Volumes", "Host", "SharedNumbers"},

		Spec: w.spec,
		Unsupported: map[string]func(*backend.Spec){
			"resources.memory_mb": func(s *backend.Spec) { s.Resources.MemoryMB = 128 },
			"resources.cores":     func(s *backend.Spec) { s.Resources.Cores = 200 },
			"network.bridge":      func(s *backend.Spec) { s.Options = `{"bridge":"vmbr0"}` },
			"network.model":       func(s *backend.Spec) { s.Options = `{"nic_model":"rtl8139"}` },
			"network.mode":        func(s *backend.Spec) { s.Network.Mode = "bridge" },
		},
		Options: map[string]any{
			"resources.balloon": true, "network.bridge": "vmbr1", "network.model": "e1000", "network.firewall_group": "agents",
		},
		Reopen: func(*testing.T) backend.Driver { return mortal{w.open()} },
		Foreign: func(t *testing.T, s backend.Spec) func(*testing.T) {
			return w.foreign(t, s.VMID, s.Name, nil)
		},
		ForeignHidden: w.pool != "",
		NoCPU:         true, // TestNestedCPU checks the CPU type
		EgressCommand: []string{"egress", "deny", backendtest.EgressTarget, "always.documentation"},
		KillVM:        func(t *testing.T, ref backend.Ref) { w.farm.kill(t, ref) },
	}
	h.VolumeCommand = func(args ...string) []string { return append([]string{"volume"}, args...) }
	h.ForeignVolume = func(t *testing.T, spec backend.VolumeSpec) func(*testing.T) {
		vmid := 1999
		for w.node.Config(vmid) != nil {
			vmid--
		}
		return w.foreign(t, vmid, "agentlab-volume-"+spec.UID[:8], map[string]string{
			"tags": tagVolume, "description": w.driver.holderMark(&volume{UID: spec.UID, VMID: vmid - 1}),
		})
	}
	h.PresentSize = true
	if w.storage == "zfspool" {
		h.NoFrom, h.NewestOnly = agentlab.CodeUnsupported, true
	}
	if w.shell {
		h.Options["resources.cpulist"] = "0-1"
	} else {
		h.Unsupported["resources.cpulist"] = func(s *backend.Spec) { s.Options = `{"cpulist":"0-1"}` }
	}
	for _, p := range crashPoints(w.shell) {
		if p.method == backendtest.MethodCloneVolumeSnapshot && w.storage == "zfspool" {
			continue // which cannot copy a snapshot
		}
		h.CrashPoints = append(h.CrashPoints, backendtest.CrashPoint{Method: p.method, Name: p.name, Arm: func(*testing.T) {
			w.driver.crash = func(at string) {
				if at == p.name {
					panic(died{at})
				}
			}
		}})
	}
	return h
}

type crashPoint struct {
	method backendtest.Method
	name   string
}

// crashPoints are the places inside the driver's methods, by method.
func crashPoints(shell bool) []crashPoint {
	points := map[backendtest.Method][]string{
		backendtest.MethodCreate: {
			"nothing written", "clone about to be sent", "clone sent", "clone noted", "cloned", "about to be configured", "configured", "disk grown", "complete",
		},
		backendtest.MethodStart: {"network in force", "start about to be sent", "started", "start noted"},
		backendtest.MethodStop:  {"stop about to be sent", "stopped"},
		backendtest.MethodDestroy: {
			"end noted", "destroy about to be sent", "destroyed", "VM gone", "volumes gone", "snippet gone", "network gone",
		},
	}
	change := []string{"snapshot change about to be sent", "snapshot change sent", "snapshot change noted"}
	points[backendtest.MethodSaveSnapshot] = change
	points[backendtest.MethodRestoreSnapshot] = append(slices.Clone(change), "network in force for the restore", "rolled back")
	points[backendtest.MethodDeleteSnapshot] = append(slices.Clone(change), "snapshot deleted")
	points[backendtest.MethodCreateVolume] = append(slices.Clone(change), "volume noted", "volume about to be complete")
	points[backendtest.MethodDeleteVolume] = append(slices.Clone(change), "end of the volume noted", "holder gone")
	points[backendtest.MethodGrowVolume] = change
	points[backendtest.MethodAttachVolume] = []string{"attachment noted", "volume attached"}
	points[backendtest.MethodDetachVolume] = []string{"volume detached"}
	points[backendtest.MethodSnapshotVolume] = change
	points[backendtest.MethodRestoreVolume] = append(slices.Clone(change), "volume rolled back")
	points[backendtest.MethodCloneVolume] = points[backendtest.MethodCreateVolume]
	points[backendtest.MethodCloneVolumeSnapshot] = points[backendtest.MethodCreateVolume]
	points[backendtest.MethodDeleteVolumeSnapshot] = append(slices.Clone(change), "snapshot of the volume deleted")
	if shell {
		points[backendtest.MethodCreate] = append(points[backendtest.MethodCreate], "snippet noted", "snippet written")
	}
	var out []crashPoint
	for _, m := range []backendtest.Method{
		backendtest.MethodCreate, backendtest.MethodStart, backendtest.MethodStop, backendtest.MethodDestroy,
		backendtest.MethodSaveSnapshot, backendtest.MethodRestoreSnapshot, backendtest.MethodDeleteSnapshot,
		backendtest.MethodCreateVolume, backendtest.MethodDeleteVolume, backendtest.MethodGrowVolume, backendtest.MethodAttachVolume,
		backendtest.MethodDetachVolume, backendtest.MethodSnapshotVolume, backendtest.MethodRestoreVolume, backendtest.MethodCloneVolume,
		backendtest.MethodCloneVolumeSnapshot, backendtest.MethodDeleteVolumeSnapshot,
	} {
		for _, name := range points[m] {
			out = append(out, crashPoint{m, name})
		}
	}
	return out
}

// foreign creates a running foreign VM, and returns a check that nothing of it
// has changed.
func (w *world) foreign(t testing.TB, vmid int, name string, options map[string]string) func(*testing.T) {
	t.Helper()
	w.node.AddForeignVM(t, vmid, name, true, options)
	before := w.look(t, vmid)
	return func(t *testing.T) {
		t.Helper()
		if now := w.look(t, vmid); now != before {
			t.Errorf("the foreign VM was\n%s\nand is\n%s", before, now)
		}
	}
}

// look returns everything that can be read about a VM and its volumes.
func (w *world) look(t testing.TB, vmid int) string {
	t.Helper()
	c, node := pve.New(w.root), w.node.Name()
	st, err := c.Status(context.Background(), node, vmid)
	ok(t, "status", err)
	cfg, err := c.Config(context.Background(), node, vmid)
	ok(t, "config", err)
	stores, err := c.Storages(context.Background(), node)
	ok(t, "storages", err)
	text := fmt.Sprint(st.Status, st.QMPStatus, st.PID, cfg)
	for _, s := range stores {
		vols, err := c.Content(context.Background(), node, s.Name, "images", vmid)
		ok(t, "content", err)
		text += fmt.Sprint(vols)
	}
	return text
}
