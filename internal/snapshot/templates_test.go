package snapshot_test

import (
	"context"
	"slices"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend/fake"
	"github.com/agentlab-vm/agentlab/internal/fleet"
	"github.com/agentlab-vm/agentlab/internal/sandbox/sandboxtest"
)

// A template has the image, which is built first, and the resources of a profile.
// The next sandbox of the profile uses it.
func TestWarm(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		ctx := context.Background()
		w.Profiles.List["large"] = agentlab.Profile{
			Resources: agentlab.Resources{Cores: 4, MemoryMB: 2048, RootSizeGB: 20}, Network: agentlab.Network{Mode: agentlab.NetworkNAT}, TTL: w.Profiles.List["plain"].TTL,
		}
		w.Images.Build = func(_ context.Context, _ string, progress func(string)) error {
			progress("building it")
			return nil
		}
		var lines []string
		made, err := w.Snaps.Warm(ctx, agentlab.SandboxRequest{Image: "agents", Profile: "large"}, func(l string) { lines = append(lines, l) })
		if err != nil || made.Image != "agents@sha256-1" || made.Resources.Cores != 4 || made.Resources.MemoryMB != 2048 {
			t.Fatalf("%+v, %v", made, err)
		}
		if len(lines) != 2 || lines[0] != "building it" || !strings.Contains(lines[1], "agents@sha256-1") {
			t.Errorf("progress %q", lines)
		}
		sb := w.Create(agentlab.SandboxRequest{Image: "agents", Profile: "large"})
		w.Until(sb.VMID, agentlab.SandboxReady)
		other := w.Create(agentlab.SandboxRequest{})
		w.Until(other.VMID, agentlab.SandboxReady)
		list, _, err := w.Snaps.Templates(ctx)
		if err != nil || len(list) != 2 || list[1].Key != made.Key || list[0].Image != "base@sha256-1" {
			t.Errorf("%+v, %v", list, err)
		}

		for _, r := range [][2]string{{"none", ""}, {"base", "none"}} {
			if _, err := w.Snaps.Warm(ctx, agentlab.SandboxRequest{Image: r[0], Profile: r[1]}, func(string) {}); agentlab.CodeOf(err) != agentlab.CodeNotFound {
				t.Errorf("%q: %v", r, err)
			}
		}
		w.Full.Store(true)
		_, err = w.Snaps.Warm(ctx, agentlab.SandboxRequest{Image: "base"}, func(string) {})
		sandboxtest.WantCode(t, err, agentlab.CodeNoSpace)
	})
}

// Templates are deleted by a unique prefix of their key, or all.
func TestDeleteTemplate(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		ctx := context.Background()
		for _, image := range []string{"base", "agents"} {
			if _, err := w.Snaps.Warm(ctx, agentlab.SandboxRequest{Image: image}, func(string) {}); err != nil {
				t.Fatal(err)
			}
		}
		keys := func(list []fleet.Template, err error) (out []string) {
			if err != nil {
				t.Fatal(err)
			}
			for _, one := range list {
				out = append(out, one.Key)
			}
			slices.Sort(out)
			return out
		}
		templates := func() []string {
			list, _, err := w.Snaps.Templates(ctx)
			return keys(list, err)
		}
		all := templates()
		_, err := w.Snaps.DeleteTemplate(ctx, "nothing")
		sandboxtest.WantCode(t, err, agentlab.CodeNotFound)
		n := 0 // what the two have in common, and one character
		for all[0][:n] == all[1][:n] {
			n++
		}
		if n > 1 {
			_, err = w.Snaps.DeleteTemplate(ctx, all[0][:n-1])
			sandboxtest.WantCode(t, err, agentlab.CodeInvalid)
		}
		if got := keys(w.Snaps.DeleteTemplate(ctx, all[0][:n])); !slices.Equal(got, all[:1]) {
			t.Errorf("deleted %q, want %q", got, all[:1])
		}
		if got := templates(); !slices.Equal(got, all[1:]) {
			t.Errorf("left: %q", got)
		}
		w.Host.Inject(fake.Fault{Op: fake.OpDeleteTemplate, Times: 1, Err: agentlab.Errorf(agentlab.CodeUnavailable, "not now")})
		_, err = w.Snaps.DeleteTemplate(ctx, "")
		sandboxtest.WantCode(t, err, agentlab.CodeUnavailable)
		for _, want := range [][]string{all[1:], nil} {
			if got := keys(w.Snaps.DeleteTemplate(ctx, "")); !slices.Equal(got, want) {
				t.Errorf("deleted %q, want %q", got, want)
			}
		}
	})
}

// A backend without templates says so.
func TestNoTemplates(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		w.Plain = true
		w.Restart()
		_, err1 := w.Snaps.Warm(context.Background(), agentlab.SandboxRequest{Image: "base"}, func(string) {})
		_, _, err2 := w.Snaps.Templates(context.Background())
		_, err3 := w.Snaps.DeleteTemplate(context.Background(), "")
		for _, err := range []error{err1, err2, err3} {
			if agentlab.CodeOf(err) != agentlab.CodeUnsupported || agentlab.HintOf(err) == "" {
				t.Errorf("%v (code %s, hint %q)", err, agentlab.CodeOf(err), agentlab.HintOf(err))
			}
		}
	})
}

// The memory of a sandbox is that of its processes: a stopped one has none.
func TestMemory(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		sb := w.Create(agentlab.SandboxRequest{})
		if m, ok := w.Svc.Memory(context.Background(), sb); ok {
			t.Errorf("a requested sandbox has %+v", m)
		}
		sb = w.Until(sb.VMID, agentlab.SandboxReady)
		if m, ok := w.Svc.Memory(context.Background(), sb); !ok || m.Unique != 40<<20 {
			t.Errorf("a running sandbox has %+v, %v", m, ok)
		}
		if _, err := w.Svc.Stop(context.Background(), sb.VMID, 0); err != nil {
			t.Fatal(err)
		}
		sb = w.Until(sb.VMID, agentlab.SandboxStopped)
		if m, ok := w.Svc.Memory(context.Background(), sb); ok {
			t.Errorf("a stopped sandbox has %+v", m)
		}
	})
}
