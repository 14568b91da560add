package pve

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/durable"
	"github.com/agentlab-vm/agentlab/internal/fsfault"
	"github.com/agentlab-vm/agentlab/internal/lazyre"
)

// snippets is the directory of the snippets storage. The node is asked once
// for its path.
type snippets struct {
	shell *shell
	mu    sync.Mutex
	dir   string
}

var snippetName = lazyre.New(`^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$`)

// unfinished is the suffix of a snippet that is not completely written.
const unfinished = ".tmp"

func checkSnippetName(name string) error {
	if !snippetName.MatchString(name) || strings.HasSuffix(name, unfinished) {
		return agentlab.Errorf(agentlab.CodeInvalid, "%q is not a valid snippet name", agentlab.OneLine(name, 80))
	}
	return nil
}

// Unlock implements Root.
func (s *shell) Unlock(ctx context.Context, vmid int) error {
	_, _, err := s.run(ctx, false, func() {}, "qm", "unlock", strconv.Itoa(vmid))
	if err == nil {
		return nil
	}
	return onlyAboutVM(callError(vmWhat("unlock", vmid), err), vmid)
}

// WriteSnippet implements Root.
func (s *shell) WriteSnippet(ctx context.Context, name string, content []byte) (string, error) {
	if err := checkSnippetName(name); err != nil {
		return "", err
	}
	dir, err := s.snippets.path(ctx)
	if err != nil {
		return "", err
	}
	volid := s.o.Snippets + ":snippets/" + name
	path := filepath.Join(dir, name)
	if there, err := sameFile(path, content); there || err != nil {
		return volid, err
	}
	if err := writeSynced(path+unfinished, content); err != nil {
		return "", snippetError("write", name, err)
	}
	// Unlike a rename, a link does not replace a file that was created in the
	// meantime.
	err = os.Link(path+unfinished, path)
	_ = os.Remove(path + unfinished)
	if errors.Is(err, fs.ErrExist) {
		if there, err := sameFile(path, content); there || err != nil {
			return volid, err
		}
	}
	if err == nil {
		err = durable.SyncPath(dir)
	}
	if err != nil {
		return "", snippetError("write", name, err)
	}
	return volid, nil
}

// RemoveSnippet implements Root.
func (s *shell) RemoveSnippet(ctx context.Context, name string) error {
	if err := checkSnippetName(name); err != nil {
		return err
	}
	dir, err := s.snippets.path(ctx)
	if err != nil {
		return err
	}
	for _, n := range []string{name + unfinished, name} {
		if err := os.Remove(filepath.Join(dir, n)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return snippetError("remove", name, err)
		}
	}
	if err := durable.SyncPath(dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return snippetError("remove", name, err)
	}
	return nil
}

// SnippetsStorage implements Root.
func (s *shell) SnippetsStorage() string { return s.o.Snippets }

// Snippets implements Root. A snippet that was not completely written is
// listed with its final name.
func (s *shell) Snippets(ctx context.Context) ([]string, error) {
	dir, err := s.snippets.path(ctx)
	if err != nil {
		return nil, err
	}
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, snippetError("list", "snippets", err)
	}
	var names []string
	for _, e := range entries {
		n := strings.TrimSuffix(e.Name(), unfinished)
		if e.Type().IsRegular() && (len(names) == 0 || names[len(names)-1] != n) {
			names = append(names, n)
		}
	}
	return names, nil
}

// path asks the node for the directory of snippets, by the path of a file that
// need not exist.
func (d *snippets) path(ctx context.Context) (string, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.dir != "" {
		return d.dir, nil
	}
	const probe = "agentlab-probe.yaml"
	out, _, err := d.shell.run(ctx, true, func() {}, "pvesm", "path", d.shell.o.Snippets+":snippets/"+probe)
	if err != nil {
		return "", callError("find the directory of snippets storage "+d.shell.o.Snippets, err)
	}
	path := string(lastLine(out))
	if !filepath.IsAbs(path) || filepath.Base(path) != probe {
		return "", agentlab.Errorf(agentlab.CodeInternal, "pvesm printed no path for a snippet on storage %s: %q", d.shell.o.Snippets, agentlab.OneLine(path, 200))
	}
	d.dir = filepath.Dir(path)
	return d.dir, nil
}

// sameFile reports whether a file with this content exists. The error has code
// exists for a file with other content and for anything that is not a regular
// file.
func sameFile(path string, content []byte) (bool, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err == nil {
		defer func() { _ = f.Close() }()
		var st fs.FileInfo
		if st, err = f.Stat(); err == nil && st.Mode().IsRegular() && st.Size() == int64(len(content)) {
			got := make([]byte, len(content))
			if _, err = f.ReadAt(got, 0); (err == nil || len(content) == 0) && bytes.Equal(got, content) {
				return true, nil
			}
		}
	}
	if err != nil && !errors.Is(err, syscall.ELOOP) {
		return false, snippetError("read", filepath.Base(path), err)
	}
	return false, agentlab.Errorf(agentlab.CodeExists, "a snippet %s with other content exists", filepath.Base(path)).WithHint("AgentLab did not create it: check %s", path)
}

// writeSynced writes a file that only root may read, and syncs it to disk. A
// partial file of an earlier attempt is replaced.
func writeSynced(path string, content []byte) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil { //nolint:gosec // as Proxmox itself makes it
		return err
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL|syscall.O_NOFOLLOW, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(content)
	if err == nil {
		err = f.Sync()
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	return err
}

func snippetError(what, name string, err error) error {
	code := agentlab.CodeUnavailable
	switch {
	case fsfault.Full(err):
		code = agentlab.CodeNoSpace
	case errors.Is(err, fs.ErrPermission):
		code = agentlab.CodeDenied
	case errors.Is(err, fs.ErrExist):
		code = agentlab.CodeExists
	}
	return agentlab.Errorf(code, "%s snippet %s: %w", what, name, err)
}
