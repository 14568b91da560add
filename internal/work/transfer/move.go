package transfer

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"hash"
	"io"
	"maps"
	"path"
	"slices"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/internal/work"
)

// Move copies the files of a workspace to a new one on another backend, which then gets
// its name and its session; the first one goes to the trash. A maintenance sandbox has it
// all the time, so nothing changes it in the meantime, and it stays as it is until the copy was
// read again and has the same check sum. After an error the copy is deleted.
func Move(ctx context.Context, ui work.UI, c *client.Client, w api.Workspace, to string) (moved api.Workspace, err error) {
	if w.Backend == to {
		return w, agentlab.Errorf(agentlab.CodeConflict, "workspace %s is on backend %s already", w.Name, to)
	}
	all, err := c.Sessions(ctx)
	if err != nil {
		return w, err
	}
	for _, s := range all.Items {
		if s.WorkspaceID == w.ID && s.Sandbox != "" {
			return w, agentlab.Errorf(agentlab.CodeConflict, "workspace %s belongs to session %s, which has sandbox %s", w.Name, s.Name, s.Sandbox).
				WithHint("stop the session first: agentlab session stop %s", s.Name)
		}
	}
	r := api.SandboxCreate{Maintenance: agentlab.MaintenanceFiles, WorkspaceSelection: api.WorkspaceSelection{Workspace: w.ID}}
	err = Maintain(ctx, ui, c, r, func(ctx context.Context, from api.Sandbox) error {
		made, err := ImportTo(ctx, ui, c, to, api.WorkspaceNew{SizeGB: w.SizeGB}, func(ctx context.Context, sb api.Sandbox, made api.Workspace) error {
			return copyFiles(ctx, ui, c, from, w, sb, made)
		})
		if err != nil {
			return err
		}
		if moved, err = c.ReplaceWorkspace(ctx, w.ID, api.WorkspaceReplace{By: made.ID, VMID: from.VMID}); err == nil {
			return nil
		}
		if now, nerr := c.Workspace(context.WithoutCancel(ctx), made.ID); nerr == nil && now.Name == w.Name { // only the answer was lost
			moved = now
			return nil
		}
		dropImport(ctx, ui, c, made.Name)
		return err
	})
	return moved, err
}

// copyFiles copies the files of one workspace to another one, and compares them. The
// maintenance sandboxes from and to have them.
func copyFiles(ctx context.Context, ui work.UI, c *client.Client, from api.Sandbox, w api.Workspace, to api.Sandbox, made api.Workspace) error {
	sent, got := newArchiveSum(maxArchive(w)), newArchiveSum(maxArchive(w))
	ui.Progressf("copying the files of workspace %s", w.Name)
	in := Pipe(func(out io.Writer) error {
		_, err := Export(ctx, c, from, w, out, nil)
		return err
	})
	if err := Extract(ctx, c, to, made, in, sent.see); err != nil {
		return err
	}
	ui.Progressf("comparing the copy")
	if _, err := Export(ctx, c, to, made, io.Discard, got.see); err != nil {
		return err
	}
	if !bytes.Equal(sent.sum(), got.sum()) {
		return agentlab.Errorf(agentlab.CodeUnavailable, "the copy of workspace %s on backend %s differs from it, and is deleted", w.Name, made.Backend).
			WithHint("check the file system: agentlab workspace fsck %s; then try again", w.Name)
	}
	return nil
}

// archiveSum is the check sum of the files in archives: of their names, kinds, owners,
// permissions, times, extended attributes and contents, in their order.
type archiveSum struct {
	hash hash.Hash
	left int64 // bytes of contents that may follow: a file with holes can be very large
}

func newArchiveSum(most int64) *archiveSum { return &archiveSum{sha256.New(), most} }

func (s *archiveSum) sum() []byte { return s.hash.Sum(nil) }

// see adds an entry, for CopyArchive.
func (s *archiveSum) see(h *tar.Header, content io.Reader) error {
	if s.left -= h.Size; s.left < 0 {
		return agentlab.Errorf(agentlab.CodeUnsupported, "the workspace has files with holes that are too large to compare").
			WithHint("move it without a comparison: agentlab workspace export, then agentlab workspace import")
	}
	fields := []string{
		path.Clean(h.Name), h.Linkname,
		fmt.Sprintf("%c %o %d %d %d %d %d", h.Typeflag, h.Mode, h.Uid, h.Gid, h.ModTime.Unix(), h.ModTime.Nanosecond(), h.Size),
	}
	for _, key := range slices.Sorted(maps.Keys(h.PAXRecords)) {
		if strings.HasPrefix(key, "SCHILY.xattr.") {
			fields = append(fields, key, h.PAXRecords[key])
		}
	}
	fields = append(fields, "")
	for _, f := range fields {
		_, _ = s.hash.Write(binary.AppendUvarint(nil, uint64(len(f))))
		_, _ = io.WriteString(s.hash, f)
	}
	_, err := io.Copy(s.hash, content)
	return err
}
