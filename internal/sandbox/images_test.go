package sandbox_test

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/sandbox/sandboxtest"
)

// A sandbox whose image cannot be built says what to do about it.
func TestImageThatCannotBeBuilt(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		w.Images.Build = func(context.Context, string, func(string)) error {
			return agentlab.Errorf(agentlab.CodeUnavailable, "a tool is missing").WithHint("install it")
		}
		sb := w.Create(agentlab.SandboxRequest{})
		sb = w.Until(sb.VMID, agentlab.SandboxFailed)
		if sb.Reason != "image base: a tool is missing (install it)" {
			w.Errorf("reason %q", sb.Reason)
		}
	})
}

// A disk that is smaller than its image is refused at the request, in one unit and
// with the profile's key. The size of an image that is not built is not known.
func TestDiskSmallerThanImage(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		w.Profiles.List["small"] = agentlab.Profile{Name: "small", Resources: agentlab.Resources{Cores: 1, MemoryMB: 512, RootSizeGB: 4}, Network: agentlab.Network{Mode: agentlab.NetworkNAT}}
		for bytes, refused := range map[int64]bool{0: false, 4 << 30: false, 4<<30 + 1: true} {
			w.Images.Bytes = bytes
			_, _, err := w.Svc.Plan(t.Context(), agentlab.SandboxRequest{Profile: "small"})
			if !refused {
				if err != nil {
					t.Errorf("%d bytes: %v", bytes, err)
				}
				continue
			}
			sandboxtest.WantCode(t, err, agentlab.CodeInvalid)
			if text := agentlab.TextWithHint(err); !strings.Contains(text, "4 GiB is smaller than its image (5 GiB)") || !strings.Contains(text, "storage.root_size_gb in the profile to at least 5") {
				t.Error(text)
			}
		}
	})
}

// An image that no sandbox waits for any more is not built to its end. The next
// sandbox that needs it has a build of its own.
func TestImageBuildIsAbandoned(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		canceled, finish := make(chan struct{}), make(chan struct{})
		w.Images.Build = func(ctx context.Context, _ string, _ func(string)) error {
			select {
			case <-ctx.Done():
				close(canceled)
				return ctx.Err()
			case <-finish:
				return nil
			}
		}
		building := func() agentlab.Sandbox {
			sb := w.Until(w.Create(agentlab.SandboxRequest{}).VMID, agentlab.SandboxProvisioning)
			synctest.Wait()
			return sb
		}
		destroy := func(sb agentlab.Sandbox) {
			if _, err := w.Svc.Destroy(context.Background(), sb.VMID); err != nil {
				t.Fatal(err)
			}
			w.Until(sb.VMID, agentlab.SandboxDestroyed)
			synctest.Wait()
		}
		one, two := building(), building()
		destroy(one)
		select {
		case <-canceled:
			t.Fatal("the build was canceled while a sandbox waited for it")
		default:
		}
		destroy(two)
		<-canceled
		three := building()
		close(finish)
		w.Until(three.VMID, agentlab.SandboxReady)
		if w.Images.Calls != 2 {
			t.Errorf("%d builds", w.Images.Calls)
		}
	})
}
