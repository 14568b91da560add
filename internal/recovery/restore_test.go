package recovery

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/auth"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/fleet"
	"github.com/agentlab-vm/agentlab/internal/sandbox"
	"github.com/agentlab-vm/agentlab/internal/store"
)

// A token that was revoked, or a bootstrap token that was spent, after the backup
// was made is not valid again. What an attempt that was killed left behind does no
// harm.
func TestRestoreRevivesNoToken(t *testing.T) {
	h, job := lived(t)
	backup := filepath.Join(t.TempDir(), "backup.db")
	spent := agentlab.BootstrapToken{Hash: strings.Repeat("a", 64), ExpiresAt: time.Now().Add(agentlab.MaxBootstrapTTL)}
	change(t, h, func(st *store.Store) {
		sb := recoverSandbox(backend.Spec{UID: agentlab.NewUID(), Name: "booting", Network: agentlab.Network{Mode: "nat"},
			Resources: agentlab.Resources{Cores: 1, MemoryMB: 1024, RootSizeGB: 10}}, "fake", time.Now().UTC())
		sb.State, sb.Reason = agentlab.SandboxBooting, ""
		sb, err := st.AllocateSandbox(t.Context(), sb, agentlab.Allocation{First: 2000, Last: 2999})
		if err != nil {
			t.Fatal(err)
		}
		spent.VMID = sb.VMID
		if err := errors.Join(st.PutBootstrapToken(t.Context(), spent, nil), st.CheckBootstrap(t.Context(), spent.Hash, spent.VMID)); err != nil {
			t.Fatal(err)
		}
		made, _, err := auth.New(auth.Config{Store: st}).Create(t.Context(), auth.Request{Name: "ci", Role: agentlab.RoleAdmin, TTL: time.Hour})
		if err != nil {
			t.Fatal(err)
		}
		if err := st.Backup(t.Context(), backup); err != nil {
			t.Fatal(err)
		}
		if _, err := st.DeleteAPIToken(t.Context(), made.ID, func(agentlab.APIToken) []agentlab.Event { return nil }); err != nil {
			t.Fatal(err)
		}
		if err := st.ConsumeBootstrap(t.Context(), spent.Hash, spent.VMID, nil, nil); err != nil {
			t.Fatal(err)
		}
	})
	for _, suffix := range []string{"", "-wal", "-shm"} {
		if err := os.WriteFile(h.paths.Database()+".restore"+suffix, []byte("half of it"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	r := h.repair(backup)
	if err := r.do(t.Context(), "restore", false, io.Discard); err != nil {
		t.Fatal(err)
	}
	if len(r.out.Warnings) == 0 || !strings.Contains(r.out.Warnings[0], "agentlab token create") {
		t.Errorf("warnings: %q", r.out.Warnings)
	}
	change(t, h, func(st *store.Store) {
		if list, err := st.APITokens(t.Context()); err != nil || len(list) != 0 {
			t.Errorf("tokens after the restore: %v, %v", list, err)
		}
		if err := st.CheckBootstrap(t.Context(), spent.Hash, spent.VMID); agentlab.CodeOf(err) != agentlab.CodeDenied {
			t.Errorf("a bootstrap token that was spent: %v", err)
		}
		if _, err := st.Job(t.Context(), job); err != nil {
			t.Error(err)
		}
	})
	if left, _ := filepath.Glob(h.paths.Database() + ".restore*"); len(left) != 0 {
		t.Errorf("left behind: %v", left)
	}
}

// A repair that is killed before the database is filled leaves one that no
// daemon uses: it would take the files of all jobs for leftovers.
func TestUnfinishedRepairIsRefused(t *testing.T) {
	h, job := lived(t)
	backup := filepath.Join(t.TempDir(), "backup.db")
	change(t, h, func(st *store.Store) {
		err := errors.Join(st.DeleteArtifacts(t.Context(), job), st.DeleteJob(t.Context(), job)) // the backup is older than the job
		if err != nil {
			t.Fatal(err)
		}
		if err := st.Backup(t.Context(), backup); err != nil {
			t.Fatal(err)
		}
	})
	for name, step := range map[string]func(*repair) error{
		"restore": func(r *repair) error { return r.restore(t.Context()) },
		"rebuild": func(r *repair) error {
			remove(t, h.paths.Database())
			return r.rebuild(t.Context())
		},
	} {
		r := h.repair(backup)
		if err := step(&r); err != nil { // and then it is killed
			t.Fatal(err)
		}
		if st, err := h.open(t); agentlab.CodeOf(err) != agentlab.CodeConflict || !strings.Contains(agentlab.HintOf(err), "agentlab db rebuild") {
			t.Errorf("%s: the daemon starts: %v (%s)", name, err, agentlab.HintOf(err))
			if err == nil {
				_ = st.Close()
			}
		}
		r = h.repair()
		if err := r.do(t.Context(), "rebuild", false, io.Discard); err != nil {
			t.Fatal(err)
		}
		change(t, h, func(st *store.Store) {
			if _, err := st.Job(t.Context(), job); err != nil {
				t.Errorf("%s: after a rebuild: %v", name, err)
			}
		})
		h.use(t)
	}
}

// A sandbox of a backup is not given a looser network policy than its VM has: the
// policy of the backend counts, with the layers of both.
func TestRestoreLoosensNoNetwork(t *testing.T) {
	st, err := store.Open(t.Context(), filepath.Join(t.TempDir(), "agentlab.db"), store.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = st.Close() }()
	d := newDriver(t)
	spec := newSpec(1000, "box")
	row := recoverSandbox(spec, "fake", time.Now().UTC())
	if err := errors.Join(d.Create(t.Context(), spec), st.RecoverSandbox(t.Context(), row)); err != nil {
		t.Fatal(err)
	}
	now := row.Network
	now.Deny = append(slices.Clone(now.Deny), agentlab.NetworkRule{Rule: "since.example"})
	now.Layers = []agentlab.Network{{Mode: agentlab.NetworkAllowlist, Allow: []agentlab.NetworkRule{{Rule: "since.example"}}}}
	if err := backend.GroupsOf(d).Net.UpdateNetwork(t.Context(), backend.RefOf(row), now); err != nil {
		t.Fatal(err)
	}
	before := agentlab.Network{Mode: agentlab.NetworkAllowlist, Allow: []agentlab.NetworkRule{{Rule: "before.example"}}}
	if row, err = st.UpdateSandbox(t.Context(), row.VMID, func(sb *agentlab.Sandbox) ([]agentlab.Event, error) {
		sb.Network.Layers = []agentlab.Network{before}
		return nil, nil
	}); err != nil {
		t.Fatal(err)
	}
	recoverNow := func(restored bool) (agentlab.Sandbox, report) {
		out := report{restored: restored}
		err := recoverSandboxes(t.Context(), st, fleet.Of("fake", d, nil), time.Now().UTC(), &out)
		got, gerr := st.Sandbox(t.Context(), row.VMID)
		if err = errors.Join(err, gerr); err != nil {
			t.Fatal(err)
		}
		return got, out
	}
	if got, out := recoverNow(false); !sandbox.SameNetwork(got.Network, row.Network) || got.NetworkPending || len(out.Warnings) != 0 {
		t.Errorf("the row is no backup's: %+v, %+v", got.Network, out.Warnings)
	}
	want := now
	want.Layers = append(slices.Clone(now.Layers), before)
	for range 2 {
		got, _ := recoverNow(true)
		if !sandbox.SameNetwork(got.Network, want) || !got.NetworkPending {
			t.Errorf("%+v (pending %v), want %+v", got.Network, got.NetworkPending, want)
		}
	}
	if _, out := recoverNow(true); len(out.Warnings) != 1 || !strings.Contains(out.Warnings[0], "box") {
		t.Errorf("warnings %q", out.Warnings)
	}
}

// A restore that was interrupted is known as one to the rebuild that completes it:
// the fake backend cannot be asked here, so the policies are those of the backup.
func TestRebuildCompletesARestore(t *testing.T) {
	h, _ := lived(t)
	r := h.repair(filepath.Join(t.TempDir(), "backup.db"))
	change(t, h, func(st *store.Store) {
		if err := st.Backup(t.Context(), r.backup); err != nil {
			t.Fatal(err)
		}
	})
	if err := r.restore(t.Context()); err != nil { // and then it is killed
		t.Fatal(err)
	}
	for _, want := range []bool{true, false} { // the second time it no longer belongs to a backup
		r = h.repair()
		if err := r.do(t.Context(), "rebuild", false, io.Discard); err != nil {
			t.Fatal(err)
		}
		if got := strings.Contains(strings.Join(r.out.Warnings, "\n"), "network policies of sandboxes are those of the backup"); got != want {
			t.Errorf("warnings %q", r.out.Warnings)
		}
	}
}

// A sandbox that was in the warm pool when the backup was made may have been handed
// out since. It is not destroyed with the pool, also if the backend does not answer.
func TestRestoreKeepsThePool(t *testing.T) {
	h, _ := lived(t)
	r := h.repair(filepath.Join(t.TempDir(), "backup.db"))
	change(t, h, func(st *store.Store) {
		row := recoverSandbox(newSpec(1000, "pool-1"), "fake", time.Now().UTC())
		row.Profile, row.State, row.Reason = agentlab.ProfilePool, agentlab.SandboxPooled, ""
		if err := errors.Join(st.RecoverSandbox(t.Context(), row), st.Backup(t.Context(), r.backup)); err != nil {
			t.Fatal(err)
		}
	})
	if err := r.do(t.Context(), "restore", false, io.Discard); err != nil {
		t.Fatal(err)
	}
	change(t, h, func(st *store.Store) {
		sb, err := st.Sandbox(t.Context(), 1000)
		if err != nil || sb.Pooled() || sb.Profile != agentlab.ProfileLost || sb.State != agentlab.SandboxFailed || !sb.Keepalive || time.Until(sb.LeaseExpiresAt) < time.Hour {
			t.Errorf("%+v, %v", sb, err)
		}
	})
	if !strings.Contains(strings.Join(r.out.Warnings, "\n"), "warm pool") {
		t.Errorf("warnings %q", r.out.Warnings)
	}
}
