package transfer

import (
	"archive/tar"
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"time"

	"github.com/klauspost/compress/zstd"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/bounded"
	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/guestrun"
)

// The host never reads the file system of a workspace. These commands run e2fsck and
// tar in a maintenance sandbox, which has the workspace and nothing else: no network
// and no secrets. What comes out of it is hostile.

const (
	// maintenanceLease is the lease of a maintenance sandbox. It is renewed, and ends
	// the sandbox of a command that was killed.
	maintenanceLease = 15 * time.Minute
	// maintenanceEnd limits the wait for the destruction of a maintenance sandbox.
	maintenanceEnd = 3 * time.Minute
)

// Maintain runs fn while a new maintenance sandbox has a workspace, and destroys the
// sandbox. fn gets the sandbox.
func Maintain(ctx context.Context, ui work.UI, c *client.Client, r api.SandboxCreate, fn func(context.Context, api.Sandbox) error) (err error) {
	r.TTLMinutes = int(maintenanceLease / time.Minute)
	sb, err := c.CreateSandbox(ctx, r)
	if err != nil {
		return noWaitHint(ctx, c, r.Workspace, err)
	}
	defer func() { err = cmp.Or(err, endMaintenance(ctx, ui, c, sb)) }()
	if sb, err = work.WaitSandbox(ctx, ui, c, sb, 0, work.IsUp); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	var renewing sync.WaitGroup
	defer renewing.Wait()
	defer cancel()
	renewing.Go(func() { renewMaintenance(ctx, c, sb) })
	return fn(ctx, sb)
}

// noWaitHint replaces the hint of the error for a workspace that a sandbox has: these
// commands have no flag to wait for it.
func noWaitHint(ctx context.Context, c *client.Client, workspace string, err error) error {
	e, ok := errors.AsType[*agentlab.Error](err)
	if !ok || e.Code != agentlab.CodeConflict || e.Field != "workspace" {
		return err
	}
	w, werr := c.Workspace(ctx, workspace)
	if werr != nil || len(w.Leases) == 0 {
		return err
	}
	return e.WithHint("free it: agentlab workspace detach %s; or use a copy of a snapshot: agentlab workspace fork", workspace)
}

// renewMaintenance renews the lease of a maintenance sandbox until ctx ends.
func renewMaintenance(ctx context.Context, c *client.Client, sb api.Sandbox) {
	t := time.NewTicker(maintenanceLease / 3)
	defer t.Stop()
	for {
		select {
		case <-t.C:
			// The next attempt is in time after an error.
			_, _ = c.RenewLease(ctx, fmt.Sprint(sb.VMID), int(maintenanceLease/time.Minute))
		case <-ctx.Done():
			return
		}
	}
}

// endMaintenance destroys a maintenance sandbox, also if ctx has ended, and waits
// until others can use its workspace.
func endMaintenance(ctx context.Context, ui work.UI, c *client.Client, sb api.Sandbox) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), maintenanceEnd)
	defer cancel()
	r := work.RequestChange(ctx, c, fmt.Sprint(sb.VMID), true, c.DestroySandbox)
	if r.Err == nil && !work.IsDestroyed(r.Sb) {
		_, r.Err = work.WaitSandbox(ctx, ui, c, r.Sb, r.After, work.IsDestroyed)
	}
	if r.Err != nil {
		return agentlab.Errorf(agentlab.CodeOf(r.Err), "the maintenance sandbox %s (%d) has the workspace until it is destroyed: %w", sb.Name, sb.VMID, r.Err).
			WithHint("agentlab sandbox destroy %d", sb.VMID)
	}
	return nil
}

// guestTool runs 'agentlab-agent workspace' as root in a maintenance sandbox; the rest is
// as in guestrun.Tool.
func guestTool(ctx context.Context, c *client.Client, sb api.Sandbox, verb string, in io.Reader, out io.Writer) (code int, text string, err error) {
	req := guestapi.ExecRequest{User: "root", Dir: "/", Command: []string{"agentlab-agent", "workspace", verb}}
	code, text, err = guestrun.Tool(ctx, c, fmt.Sprint(sb.VMID), req, in, out, io.Discard)
	if err == nil && code == 127 {
		err = guestrun.GuestFault(req, code, text)
	}
	return code, text, err
}

// toolError is the error of a tool that has failed.
func toolError(what string, code int, text string) error {
	return agentlab.Errorf(agentlab.CodeUnavailable, "%s failed in the maintenance sandbox (exit code %d): %s", what, code, agentlab.Reason(guestrun.LastLine(text)))
}

// fsckResult is what e2fsck found.
type fsckResult struct {
	Workspace string `json:"workspace"` // ID
	State     string `json:"state"`     // clean, repaired or damaged
	ExitCode  int    `json:"exit_code"` // of e2fsck
	Output    string `json:"output"`    // its end
}

// FsckDamaged is the state of a file system with errors.
const FsckDamaged = "damaged"

// Fsck checks the file system of a workspace, and corrects all errors with repair.
func Fsck(ctx context.Context, ui work.UI, c *client.Client, workspace string, repair bool) (res fsckResult, err error) {
	verb := "check"
	if repair {
		verb = "repair"
	}
	out := &bounded.Tail{Max: guestrun.MaxToolOutput}
	r := api.SandboxCreate{Maintenance: agentlab.MaintenanceDisk, WorkspaceSelection: api.WorkspaceSelection{Workspace: workspace}}
	err = Maintain(ctx, ui, c, r, func(ctx context.Context, sb api.Sandbox) error {
		code, said, err := guestTool(ctx, c, sb, verb, nil, out)
		res = fsckResult{Workspace: sb.WorkspaceID, ExitCode: code, Output: strings.TrimSpace(work.SanitizeLines(out.String()))}
		// e2fsck(8): 1 and 2 mean that all errors were corrected, 4 that some were not.
		switch {
		case err != nil:
			return err
		case code == guestapi.MaintainNoFileSystem:
			return agentlab.Errorf(agentlab.CodeConflict, "workspace %s has no readable file system: its superblock and all copies of it are lost, or no sandbox has used it yet", workspace).
				WithHint("restore a snapshot: agentlab workspace snapshot list %[1]s, then agentlab workspace snapshot restore %[1]s --name NAME; or delete it: agentlab workspace delete %[1]s", workspace)
		case code&^7 != 0:
			return toolError("e2fsck", code, cmp.Or(said, res.Output))
		case code&4 != 0:
			res.State = FsckDamaged
		case code != 0:
			res.State = "repaired"
		default:
			res.State = "clean"
		}
		return nil
	})
	return res, err
}

// Pipe returns what fn writes. Its error is that of the last Read.
func Pipe(fn func(io.Writer) error) io.Reader {
	r, w := io.Pipe()
	go func() { _ = w.CloseWithError(fn(w)) }()
	return r
}

// Export writes the archive of a workspace that a maintenance sandbox has mounted. see is
// as in CopyArchive.
func Export(ctx context.Context, c *client.Client, sb api.Sandbox, w api.Workspace, to io.Writer, see func(*tar.Header, io.Reader) error) (entries int, err error) {
	zw, err := zstd.NewWriter(to, zstd.WithEncoderConcurrency(1))
	if err != nil {
		return 0, err
	}
	from, raw := io.Pipe()
	checked := make(chan error, 1)
	go func() {
		var err error
		entries, err = CopyArchive(zw, from, maxArchive(w), see)
		_ = from.CloseWithError(cmp.Or(err, io.ErrClosedPipe))
		checked <- err
	}()
	code, said, err := guestTool(ctx, c, sb, "export", nil, raw)
	_ = raw.Close()
	if bad := <-checked; bad != nil && (err != nil || code == 0) {
		err = bad // what the guest sent is why the transfer ended
	}
	if err == nil && code != 0 {
		err = toolError("tar", code, said)
	}
	return entries, errors.Join(err, zw.Close())
}

// ImportTo creates a workspace on a backend, "" is the default one, and calls fill while a
// maintenance sandbox has it. After an error it deletes the workspace.
func ImportTo(ctx context.Context, ui work.UI, c *client.Client, on string, use api.WorkspaceNew, fill func(context.Context, api.Sandbox, api.Workspace) error) (w api.Workspace, err error) {
	name := "import-" + agentlab.NewUID()[:8]
	r := api.SandboxCreate{Backend: on, Maintenance: agentlab.MaintenanceFiles, WorkspaceSelection: api.WorkspaceSelection{Workspace: name, WorkspaceCreate: &use}}
	err = Maintain(ctx, ui, c, r, func(ctx context.Context, sb api.Sandbox) (err error) {
		if w, err = c.Workspace(ctx, sb.WorkspaceID); err != nil {
			return err
		}
		return fill(ctx, sb, w)
	})
	if err != nil {
		dropImport(ctx, ui, c, name)
	}
	return w, err
}

// dropImport deletes a workspace that is not complete, also if ctx has ended.
func dropImport(ctx context.Context, ui work.UI, c *client.Client, name string) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), maintenanceEnd)
	defer cancel()
	if derr := dropWorkspace(ctx, ui, c, name); derr != nil && agentlab.CodeOf(derr) != agentlab.CodeNotFound {
		ui.Progressf("the incomplete workspace %s was not deleted: %s\n  → agentlab workspace delete %[1]s --purge", name, agentlab.WithoutControls(derr.Error()))
	}
}

// dropWorkspace deletes a workspace for good.
func dropWorkspace(ctx context.Context, ui work.UI, c *client.Client, workspace string) error {
	after, err := work.LastEvent(ctx, c, "")
	if err != nil {
		return err
	}
	w, err := c.DeleteWorkspace(ctx, workspace, true)
	if err == nil {
		_, err = work.WaitWorkspace(ctx, ui, c, w, after, []agentlab.WorkspaceState{agentlab.WorkspaceDeleted})
	}
	return err
}

// Extract sends an archive to the guest of a maintenance sandbox. see is as in CopyArchive.
func Extract(ctx context.Context, c *client.Client, sb api.Sandbox, w api.Workspace, in io.Reader, see func(*tar.Header, io.Reader) error) error {
	zr, err := zstd.NewReader(in, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(128<<20), zstd.WithDecoderMaxMemory(256<<20))
	if err != nil {
		return agentlab.Errorf(agentlab.CodeInvalid, "the archive is not a zst file: %w", err)
	}
	defer zr.Close()
	to, raw := io.Pipe()
	checked := make(chan error, 1)
	go func() {
		_, err := CopyArchive(raw, zr, maxArchive(w), see)
		_ = raw.CloseWithError(err)
		checked <- err
	}()
	code, said, err := guestTool(ctx, c, sb, "import", guestrun.Input{PipeReader: to}, &bytes.Buffer{})
	_ = to.CloseWithError(guestrun.ErrEnded) // if it did not run
	bad := <-checked
	switch {
	case bad != nil && !errors.Is(bad, guestrun.ErrEnded):
		return bad // the guest may have succeeded with what it got
	case err != nil:
		return err
	case code != 0:
		return toolError("tar", code, said)
	case bad != nil:
		return bad
	}
	return nil
}
