package fleet

import (
	"context"
	"net"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

// The types of this file are the driver and the groups of a backend with bounded calls. Info,
// Validate and Close do no I/O. Check and ConsoleLog have no limit here: the first one
// examines a backend that may be down, the second one lasts as long as its reader. So
// have no limit but their caller's: connections to one guest.

type driver struct {
	backend.Driver
	w *watch
}

func (d driver) Create(ctx context.Context, spec backend.Spec) error {
	return change(ctx, d.w, "Create", copyLimit, func(ctx context.Context) error { return d.Driver.Create(ctx, spec) })
}

func (d driver) Start(ctx context.Context, ref backend.Ref) error {
	return change(ctx, d.w, "Start", changeLimit, func(ctx context.Context) error { return d.Driver.Start(ctx, ref) })
}

func (d driver) Stop(ctx context.Context, ref backend.Ref, grace time.Duration) error {
	return curb(ctx, d.w, "Stop", changeLimit+grace, func(ctx context.Context) error { return d.Driver.Stop(ctx, ref, grace) })
}

func (d driver) Destroy(ctx context.Context, ref backend.Ref) error {
	return curb(ctx, d.w, "Destroy", copyLimit, func(ctx context.Context) error { return d.Driver.Destroy(ctx, ref) })
}

func (d driver) Inspect(ctx context.Context, ref backend.Ref) (backend.Instance, error) {
	return ask(ctx, d.w, "Inspect", func(ctx context.Context) (backend.Instance, error) { return d.Driver.Inspect(ctx, ref) })
}

func (d driver) List(ctx context.Context) ([]backend.Instance, error) {
	return list(ctx, d.w, "List", d.Driver.List)
}

func (d driver) ListenGuest(ctx context.Context, ref backend.Ref) (net.Listener, error) {
	return bound(ctx, d.w, "ListenGuest", askLimit, agentlab.CodeUnavailable, func(ctx context.Context) (net.Listener, error) { return d.Driver.ListenGuest(ctx, ref) })
}

type power struct {
	backend.Power
	w *watch
}

func (p power) Suspend(ctx context.Context, ref backend.Ref) error {
	return curb(ctx, p.w, "Suspend", changeLimit, func(ctx context.Context) error { return p.Power.Suspend(ctx, ref) })
}

func (p power) Resume(ctx context.Context, ref backend.Ref) error {
	return change(ctx, p.w, "Resume", copyLimit, func(ctx context.Context) error { return p.Power.Resume(ctx, ref) })
}

func (p power) SuspendToDisk(ctx context.Context, ref backend.Ref) error {
	return curb(ctx, p.w, "SuspendToDisk", copyLimit, func(ctx context.Context) error { return p.Power.SuspendToDisk(ctx, ref) })
}

func (p power) SetDeadline(ctx context.Context, ref backend.Ref, to backend.Deadline) error {
	return curb(ctx, p.w, "SetDeadline", changeLimit, func(ctx context.Context) error { return p.Power.SetDeadline(ctx, ref, to) })
}

type network struct {
	backend.Net
	w *watch
}

func (n network) UpdateNetwork(ctx context.Context, ref backend.Ref, to agentlab.Network) error {
	return curb(ctx, n.w, "UpdateNetwork", changeLimit, func(ctx context.Context) error { return n.Net.UpdateNetwork(ctx, ref, to) })
}

func (n network) EgressLog(ctx context.Context, ref backend.Ref, after int64, limit int) ([]agentlab.EgressRecord, error) {
	return ask(ctx, n.w, "EgressLog", func(ctx context.Context) ([]agentlab.EgressRecord, error) {
		return n.Net.EgressLog(ctx, ref, after, limit)
	})
}

func (n network) RecordEgress(ctx context.Context, ref backend.Ref, r agentlab.EgressRecord) error {
	return change(ctx, n.w, "RecordEgress", askLimit, func(ctx context.Context) error { return n.Net.RecordEgress(ctx, ref, r) })
}

type console struct {
	backend.Console
	w *watch
}

func (c console) ExportDisk(ctx context.Context, ref backend.Ref, path string) error {
	return change(ctx, c.w, "ExportDisk", copyLimit, func(ctx context.Context) error { return c.Console.ExportDisk(ctx, ref, path) })
}

type savers = backend.Snapshots // the name of the field: the group has a method Snapshots

type snapshots struct {
	savers
	w *watch
}

func (s snapshots) Snapshots(ctx context.Context) ([]backend.Snapshot, error) {
	return ask(ctx, s.w, "Snapshots", s.savers.Snapshots)
}

func (s snapshots) SaveSnapshot(ctx context.Context, ref backend.Ref, uid string) (backend.Snapshot, error) {
	return copying(ctx, s.w, "SaveSnapshot", func(ctx context.Context) (backend.Snapshot, error) { return s.savers.SaveSnapshot(ctx, ref, uid) })
}

func (s snapshots) RestoreSnapshot(ctx context.Context, ref backend.SnapshotRef) error {
	return change(ctx, s.w, "RestoreSnapshot", copyLimit, func(ctx context.Context) error { return s.savers.RestoreSnapshot(ctx, ref) })
}

func (s snapshots) DeleteSnapshot(ctx context.Context, ref backend.SnapshotRef) error {
	return change(ctx, s.w, "DeleteSnapshot", copyLimit, func(ctx context.Context) error { return s.savers.DeleteSnapshot(ctx, ref) })
}

type warmers = backend.Templates // the name of the field: the group has a method Templates

type templates struct {
	warmers
	w *watch
}

func (t templates) Templates(ctx context.Context) ([]backend.Template, error) {
	return ask(ctx, t.w, "Templates", t.warmers.Templates)
}

func (t templates) WarmTemplate(ctx context.Context, spec backend.Spec) (backend.Template, error) {
	return copying(ctx, t.w, "WarmTemplate", func(ctx context.Context) (backend.Template, error) { return t.warmers.WarmTemplate(ctx, spec) })
}

func (t templates) DeleteTemplate(ctx context.Context, key string) error {
	return change(ctx, t.w, "DeleteTemplate", copyLimit, func(ctx context.Context) error { return t.warmers.DeleteTemplate(ctx, key) })
}

type volumes struct {
	backend.Volumes
	w *watch
}

func (v volumes) CreateVolume(ctx context.Context, spec backend.VolumeSpec) (backend.Volume, error) {
	return copying(ctx, v.w, "CreateVolume", func(ctx context.Context) (backend.Volume, error) { return v.Volumes.CreateVolume(ctx, spec) })
}

func (v volumes) DeleteVolume(ctx context.Context, ref backend.VolumeRef) error {
	return change(ctx, v.w, "DeleteVolume", copyLimit, func(ctx context.Context) error { return v.Volumes.DeleteVolume(ctx, ref) })
}

func (v volumes) GrowVolume(ctx context.Context, ref backend.VolumeRef, sizeGB int) error {
	return change(ctx, v.w, "GrowVolume", copyLimit, func(ctx context.Context) error { return v.Volumes.GrowVolume(ctx, ref, sizeGB) })
}

func (v volumes) InspectVolume(ctx context.Context, ref backend.VolumeRef) (backend.Volume, error) {
	return ask(ctx, v.w, "InspectVolume", func(ctx context.Context) (backend.Volume, error) { return v.Volumes.InspectVolume(ctx, ref) })
}

func (v volumes) ListVolumes(ctx context.Context) ([]backend.Volume, error) {
	return ask(ctx, v.w, "ListVolumes", v.Volumes.ListVolumes)
}

func (v volumes) AttachVolume(ctx context.Context, ref backend.Ref, volume backend.VolumeRef) error {
	return change(ctx, v.w, "AttachVolume", changeLimit, func(ctx context.Context) error { return v.Volumes.AttachVolume(ctx, ref, volume) })
}

func (v volumes) DetachVolume(ctx context.Context, ref backend.Ref, volume backend.VolumeRef) error {
	return change(ctx, v.w, "DetachVolume", changeLimit, func(ctx context.Context) error { return v.Volumes.DetachVolume(ctx, ref, volume) })
}

func (v volumes) SnapshotVolume(ctx context.Context, ref backend.VolumeRef, uid string) (backend.VolumeSnapshot, error) {
	return copying(ctx, v.w, "SnapshotVolume", func(ctx context.Context) (backend.VolumeSnapshot, error) {
		return v.Volumes.SnapshotVolume(ctx, ref, uid)
	})
}

func (v volumes) VolumeSnapshots(ctx context.Context) ([]backend.VolumeSnapshot, error) {
	return ask(ctx, v.w, "VolumeSnapshots", v.Volumes.VolumeSnapshots)
}

func (v volumes) RestoreVolume(ctx context.Context, snapshot backend.VolumeSnapshotRef) error {
	return change(ctx, v.w, "RestoreVolume", copyLimit, func(ctx context.Context) error { return v.Volumes.RestoreVolume(ctx, snapshot) })
}

func (v volumes) CloneVolume(ctx context.Context, ref backend.VolumeRef, uid string) (backend.Volume, error) {
	return copying(ctx, v.w, "CloneVolume", func(ctx context.Context) (backend.Volume, error) { return v.Volumes.CloneVolume(ctx, ref, uid) })
}

func (v volumes) CloneVolumeSnapshot(ctx context.Context, snapshot backend.VolumeSnapshotRef, uid string) (backend.Volume, error) {
	return copying(ctx, v.w, "CloneVolumeSnapshot", func(ctx context.Context) (backend.Volume, error) {
		return v.Volumes.CloneVolumeSnapshot(ctx, snapshot, uid)
	})
}

func (v volumes) DeleteVolumeSnapshot(ctx context.Context, snapshot backend.VolumeSnapshotRef) error {
	return change(ctx, v.w, "DeleteVolumeSnapshot", copyLimit, func(ctx context.Context) error { return v.Volumes.DeleteVolumeSnapshot(ctx, snapshot) })
}

type host struct {
	backend.Host
	w *watch
}

func (h host) Accel(ctx context.Context) string {
	accel, _ := ask(ctx, h.w, "Accel", func(ctx context.Context) (string, error) { return h.Host.Accel(ctx), nil })
	return accel
}

func (h host) Nested(ctx context.Context) error {
	return check(ctx, h.w, "Nested", h.Host.Nested)
}

func (h host) Room(ctx context.Context, r agentlab.Resources) error {
	return check(ctx, h.w, "Room", func(ctx context.Context) error { return h.Host.Room(ctx, r) })
}

func (h host) Memory(ctx context.Context, ref backend.Ref) (backend.Memory, error) {
	return ask(ctx, h.w, "Memory", func(ctx context.Context) (backend.Memory, error) { return h.Host.Memory(ctx, ref) })
}

func (h host) Taken(ctx context.Context, first, last int) ([]int, error) {
	return ask(ctx, h.w, "Taken", func(ctx context.Context) ([]int, error) { return h.Host.Taken(ctx, first, last) })
}
