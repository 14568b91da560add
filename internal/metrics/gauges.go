package metrics

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"time"

	"github.com/prometheus/procfs"
	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/reconcile"
)

// Store counts rows in the database, without loading them; *store.Store implements
// it.
type Store interface {
	CountSandboxes(ctx context.Context) (map[agentlab.SandboxState]int, error)
	SandboxMemoryMB(ctx context.Context) (map[agentlab.SandboxState]int, error)
	CountJobs(ctx context.Context) (map[agentlab.JobStatus]int, error)
	CountSnapshots(ctx context.Context) (map[agentlab.SnapshotState]int, error)
	SnapshotBytes(ctx context.Context) (map[agentlab.SnapshotState]int, error)
	CountWorkspaces(ctx context.Context) (map[agentlab.WorkspaceState]int, error)
	WorkspaceGB(ctx context.Context) (map[agentlab.WorkspaceState]int, error)
	CountWorkspaceLeases(ctx context.Context) (map[agentlab.LeaseStep]int, error)
}

// Queue is the loop of a service.
type Queue interface{ Queue() reconcile.Stats }

// Messages counts the readers of messages; *message.Service implements it.
type Messages interface {
	Read() int64  // messages that were read since the start
	Waiting() int // readers that wait for the next message
}

// Boots is the queue of the sandboxes that wait until they may boot;
// *sandbox.Service implements it.
type Boots interface {
	// BootQueue returns the length of the queue, and how long the first has waited.
	BootQueue() (waiting int, first time.Duration)
}

// VMs measures the processes of VMs; *doctor.Service implements it.
type VMs interface {
	// VMMemory returns the memory of the host, in bytes, that only one sandbox has,
	// and that which several have or the host can drop, each page counted once.
	VMMemory(ctx context.Context) (unique, shared int64, err error)
}

// Workspaces knows the loop of workspaces, and their use of the backend; *workspace.Service
// implements it.
type Workspaces interface {
	Queue
	UsedBytes() int64
}

// Images counts images and their bytes on the host, by whether they are current.
type Images func(ctx context.Context) (count map[bool]int, bytes map[bool]int64, err error)

// Fleet knows which backends answer; *fleet.Fleet implements it.
type Fleet interface {
	// Answering reports for each backend, by name, whether it answers.
	Answering() map[string]bool
}

// Sources are what gauges are read from.
type Sources struct {
	Store           Store
	Sandboxes, Jobs Queue
	Messages        Messages
	Boots           Boots
	VMs             VMs
	Workspaces      Workspaces
	ImageUse        Images
	Fleet           Fleet
	PoolWanted      int    // sandboxes that the warm pool should have
	State, Images   string // directories
	Database        string // path of its file
}

// gaugeMetric is a metric that is read when it is requested.
type gaugeMetric struct {
	metric
	// read returns the values by the label, with the key "" if the metric has no
	// label. It must be quick: the cost must not grow with the number of rows that
	// are loaded.
	read func(ctx context.Context, from Sources) (map[string]float64, error)
}

// backendLabel is the label of metrics by backend; its values are the names of the daemon's
// backends (Set.Backends).
const backendLabel = "backend"

var (
	loops         = []string{"sandboxes", "jobs", "workspaces"}
	disks         = []string{"state", "images"}
	snapshotRows  = []string{string(agentlab.SnapshotSaving), string(agentlab.SnapshotReady), string(agentlab.SnapshotDeleting)}
	leaseRows     = texts([]agentlab.LeaseStep{agentlab.LeaseStepAcquired, agentlab.LeaseStepQueued})
	imageStates   = []string{"current", "old"}
	databaseFiles = []string{"database", "wal"}
)

// gaugeMetrics are the metrics that are read when they are requested.
var gaugeMetrics = []gaugeMetric{
	{metric{name: "agentlab_sandboxes", help: "Sandboxes by state. DESTROYED ones are counted until retention deletes them.", label: "state", values: texts(agentlab.SandboxStates)},
		func(ctx context.Context, from Sources) (map[string]float64, error) {
			return numbers[agentlab.SandboxState](1)(from.Store.CountSandboxes(ctx))
		}},
	{metric{name: "agentlab_sandbox_memory_bytes", help: "Memory that the sandboxes may use together, as configured, by state.", label: "state", values: texts(agentlab.SandboxStates)},
		func(ctx context.Context, from Sources) (map[string]float64, error) {
			return numbers[agentlab.SandboxState](1 << 20)(from.Store.SandboxMemoryMB(ctx))
		}},
	{metric{name: "agentlab_pool_wanted", help: "Sandboxes that the warm pool should have; agentlab_sandboxes{state=\"POOLED\"} is how many it has."},
		func(_ context.Context, from Sources) (map[string]float64, error) {
			return map[string]float64{"": float64(from.PoolWanted)}, nil
		}},
	{metric{name: "agentlab_backend_up", help: "1 if the backend answered when its sandboxes were last listed, 0 if it did not.", label: backendLabel},
		func(_ context.Context, from Sources) (map[string]float64, error) {
			out := map[string]float64{}
			for name, answers := range from.Fleet.Answering() {
				if answers {
					out[name] = 1
				}
			}
			return out, nil
		}},
	{metric{name: "agentlab_jobs", help: "Jobs by status. QUEUED ones wait for their sandbox.", label: "status", values: texts(agentlab.JobStatuses)},
		func(ctx context.Context, from Sources) (map[string]float64, error) {
			return numbers[agentlab.JobStatus](1)(from.Store.CountJobs(ctx))
		}},
	{metric{name: "agentlab_snapshots", help: "Snapshots of sandboxes by state.", label: "state", values: snapshotRows},
		func(ctx context.Context, from Sources) (map[string]float64, error) {
			return numbers[agentlab.SnapshotState](1)(from.Store.CountSnapshots(ctx))
		}},
	{metric{name: "agentlab_snapshot_bytes", help: "Size of the snapshots of sandboxes by state.", label: "state", values: snapshotRows},
		func(ctx context.Context, from Sources) (map[string]float64, error) {
			return numbers[agentlab.SnapshotState](1)(from.Store.SnapshotBytes(ctx))
		}},
	{metric{name: "agentlab_workspaces", help: "Workspaces by state. TRASHED ones were deleted and can be returned.", label: "state", values: texts(agentlab.WorkspaceStates)},
		func(ctx context.Context, from Sources) (map[string]float64, error) {
			return numbers[agentlab.WorkspaceState](1)(from.Store.CountWorkspaces(ctx))
		}},
	{metric{name: "agentlab_workspace_size_bytes", help: "Size of the workspaces, as configured, by state.", label: "state", values: texts(agentlab.WorkspaceStates)},
		func(ctx context.Context, from Sources) (map[string]float64, error) {
			return numbers[agentlab.WorkspaceState](1 << 30)(from.Store.WorkspaceGB(ctx))
		}},
	{metric{name: "agentlab_workspace_leases", help: "Leases of workspaces: acquired are those of the sandboxes that have one, queued those of sandboxes that wait for one.", label: "state", values: leaseRows},
		func(ctx context.Context, from Sources) (map[string]float64, error) {
			return numbers[agentlab.LeaseStep](1)(from.Store.CountWorkspaceLeases(ctx))
		}},
	{metric{name: "agentlab_reconcile_ready", help: "Sandboxes, jobs or workspaces whose next step can run and waits for a worker.", label: "loop", values: loops},
		queues(func(s reconcile.Stats) float64 { return float64(s.Ready) })},
	{metric{name: "agentlab_reconcile_running", help: "Steps of sandboxes, jobs or workspaces that run now.", label: "loop", values: loops},
		queues(func(s reconcile.Stats) float64 { return float64(s.Running) })},
	{metric{name: "agentlab_reconcile_delayed", help: "Sandboxes, jobs or workspaces whose next step has a time, also after a failure.", label: "loop", values: loops},
		queues(func(s reconcile.Stats) float64 { return float64(s.Delayed) })},
	{metric{name: "agentlab_reconcile_failing", help: "Sandboxes, jobs or workspaces whose last step failed and is tried again.", label: "loop", values: loops},
		queues(func(s reconcile.Stats) float64 { return float64(s.Failing) })},
	{metric{name: "agentlab_reconcile_lag_seconds", help: "How long the first step that can run has waited for a worker.", label: "loop", values: loops},
		queues(func(s reconcile.Stats) float64 { return s.Lag.Seconds() })},
	{metric{name: "agentlab_boot_queue", help: "Sandboxes that wait for a slot, because only a limited number boots at a time."},
		func(_ context.Context, from Sources) (map[string]float64, error) {
			n, _ := from.Boots.BootQueue()
			return map[string]float64{"": float64(n)}, nil
		}},
	{metric{name: "agentlab_boot_queue_wait_seconds", help: "How long the first sandbox that waits for a slot has waited."},
		func(_ context.Context, from Sources) (map[string]float64, error) {
			_, first := from.Boots.BootQueue()
			return map[string]float64{"": first.Seconds()}, nil
		}},
	{metric{name: "agentlab_vm_memory_bytes", help: "Memory of the host that the processes of all VMs occupy: unique belongs to one sandbox, shared to several or to files, each page counted once. 0 if the backend does not know it.", label: "kind", values: []string{"unique", "shared"}},
		func(ctx context.Context, from Sources) (map[string]float64, error) {
			unique, shared, err := from.VMs.VMMemory(ctx)
			return map[string]float64{"unique": float64(unique), "shared": float64(shared)}, err
		}},
	{metric{name: "agentlab_images", help: "Images on the host: current ones are those that a name means, old ones remain for sandboxes that use them or until they are removed.", label: "state", values: imageStates},
		func(ctx context.Context, from Sources) (map[string]float64, error) {
			count, _, err := from.ImageUse(ctx)
			return map[string]float64{"current": float64(count[true]), "old": float64(count[false])}, err
		}},
	{metric{name: "agentlab_image_bytes", help: "Space on the disk that the images on the host occupy.", label: "state", values: imageStates},
		func(ctx context.Context, from Sources) (map[string]float64, error) {
			_, bytes, err := from.ImageUse(ctx)
			return map[string]float64{"current": float64(bytes[true]), "old": float64(bytes[false])}, err
		}},
	{metric{name: "agentlab_workspace_used_bytes", help: "Space that the volumes of the workspaces occupied on the backend when they were last compared with it, every few minutes."},
		func(_ context.Context, from Sources) (map[string]float64, error) {
			return map[string]float64{"": float64(from.Workspaces.UsedBytes())}, nil
		}},
	{metric{name: "agentlab_messages_read", help: "Messages that were sent to readers since the start of the daemon."},
		func(_ context.Context, from Sources) (map[string]float64, error) {
			return map[string]float64{"": float64(from.Messages.Read())}, nil
		}},
	{metric{name: "agentlab_message_tails", help: "Readers, people and agents, that wait for the next message."},
		func(_ context.Context, from Sources) (map[string]float64, error) {
			return map[string]float64{"": float64(from.Messages.Waiting())}, nil
		}},
	{metric{name: "agentlab_disk_free_bytes", help: "Free space on the disk of the state directory and of the images.", label: "disk", values: disks},
		onDisks(func(st unix.Statfs_t) float64 { return float64(st.Bavail) * float64(st.Bsize) })},
	{metric{name: "agentlab_disk_size_bytes", help: "Size of the disk of the state directory and of the images.", label: "disk", values: disks},
		onDisks(func(st unix.Statfs_t) float64 { return float64(st.Blocks) * float64(st.Bsize) })},
	{metric{name: "agentlab_store_bytes", help: "Size of the database and of its write-ahead log.", label: "file", values: databaseFiles}, databaseSizes},
	{metric{name: "agentlab_host_memory_bytes", help: "Memory of the host of the daemon.", label: "kind", values: []string{"total", "available"}}, hostMemory},
}

// numbers converts counts to values, each multiplied by unit.
func numbers[K ~string](unit float64) func(map[K]int, error) (map[string]float64, error) {
	return func(counts map[K]int, err error) (map[string]float64, error) {
		out := map[string]float64{}
		for k, n := range counts {
			out[string(k)] = float64(n) * unit
		}
		return out, err
	}
}

func queues(of func(reconcile.Stats) float64) func(context.Context, Sources) (map[string]float64, error) {
	return func(_ context.Context, from Sources) (map[string]float64, error) {
		return map[string]float64{"sandboxes": of(from.Sandboxes.Queue()), "jobs": of(from.Jobs.Queue()), "workspaces": of(from.Workspaces.Queue())}, nil
	}
}

func onDisks(of func(unix.Statfs_t) float64) func(context.Context, Sources) (map[string]float64, error) {
	return func(_ context.Context, from Sources) (map[string]float64, error) {
		out := map[string]float64{}
		for name, dir := range map[string]string{"state": from.State, "images": from.Images} {
			var st unix.Statfs_t
			if err := unix.Statfs(dir, &st); err != nil {
				return nil, err
			}
			out[name] = of(st)
		}
		return out, nil
	}
}

func databaseSizes(_ context.Context, from Sources) (map[string]float64, error) {
	out := map[string]float64{}
	for name, path := range map[string]string{"database": from.Database, "wal": from.Database + "-wal"} {
		st, err := os.Stat(path)
		switch {
		case err == nil:
			out[name] = float64(st.Size())
		case !errors.Is(err, fs.ErrNotExist):
			return nil, err
		}
	}
	return out, nil
}

func hostMemory(context.Context, Sources) (map[string]float64, error) {
	proc, err := procfs.NewDefaultFS()
	if err != nil {
		return nil, err
	}
	m, err := proc.Meminfo()
	if err != nil {
		return nil, err
	}
	if m.MemTotalBytes == nil || m.MemAvailableBytes == nil {
		return nil, errors.New("/proc/meminfo does not tell the memory of the host")
	}
	return map[string]float64{"total": float64(*m.MemTotalBytes), "available": float64(*m.MemAvailableBytes)}, nil
}
