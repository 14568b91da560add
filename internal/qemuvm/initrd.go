package qemuvm

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/u-root/u-root/pkg/cpio"
	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/durable"
	"github.com/agentlab-vm/agentlab/internal/supervisor"
)

// keepInitrds is how many Initrds the cache has: the last used ones. It has as
// many links to them: the newest ones.
const keepInitrds = 4

// linkSuffix ends the name of a link to an initrd (findOrMake).
const linkSuffix = ".link"

// Initrds builds and caches Initrds: the archive of the image's modules, followed
// by one with agent-runner as /init. The kernel unpacks both in order.
type Initrds struct {
	dir    string
	runner string
	boot   string // identifies the run of the host's kernel

	mu    sync.Mutex
	known map[initrdKey]string // to path
}

// NewInitrds returns the cache in dir of initrds with the agent-runner at a path.
func NewInitrds(dir, runner string) *Initrds {
	return &Initrds{dir: dir, runner: runner, boot: supervisor.BootID()}
}

// initrdKey is what an initrd is made from: the modules, agent-runner and this
// program, which writes the archive.
type initrdKey [3]FileStamp

// FileStamp identifies a version of a file.
type FileStamp struct {
	path     string
	dev, ino uint64
	Size     int64 // in bytes
	Mtime    int64 // in nanoseconds since 1970
}

// StampOf returns the version of the file at path.
func StampOf(path string) (FileStamp, error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return FileStamp{}, &fs.PathError{Op: "stat", Path: path, Err: err}
	}
	return FileStamp{path: path, dev: uint64(st.Dev), ino: st.Ino, Size: st.Size, Mtime: st.Mtim.Nano()}, nil //nolint:unconvert // on macOS the device is an int32
}

// File returns the path of the initrd for an archive of modules.
func (r *Initrds) File(ctx context.Context, modules string) (string, error) {
	m, err := StampOf(modules)
	if err != nil {
		return "", err
	}
	n, err := StampOf(r.runner)
	if errors.Is(err, fs.ErrNotExist) {
		return "", agentlab.Errorf(agentlab.CodeUnavailable, "the guest program %s is missing", r.runner).
			WithHint("install agent-runner next to agentlabd, or run 'make build'")
	}
	if err != nil {
		return "", err
	}
	self, err := StampOf("/proc/self/exe")
	if err != nil {
		return "", err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	key := initrdKey{m, n, self}
	path, ok := r.known[key]
	if !ok || !fileExists(path) {
		if path, err = r.findOrMake(ctx, key); err != nil {
			return "", err
		}
		if r.known == nil {
			r.known = map[initrdKey]string{}
		}
		r.known[key] = path
	}
	now := time.Now()
	_ = os.Chtimes(path, now, now) // mark as used; see prune
	return path, nil
}

// findOrMake returns the path of the initrd that an earlier process has made, or
// makes it. A symbolic link leads from a key to an initrd, so that a new process
// reads and writes no large file. Initrds are not synced: after a restart of the
// host one may be incomplete, and no link of before counts.
func (r *Initrds) findOrMake(ctx context.Context, key initrdKey) (string, error) {
	sum := sha256.Sum256(fmt.Appendf(nil, "%s %v", r.boot, key))
	link := filepath.Join(r.dir, hex.EncodeToString(sum[:])+linkSuffix)
	if name, err := os.Readlink(link); err == nil && r.boot != "" {
		if path := filepath.Join(r.dir, filepath.Base(name)); fileExists(path) {
			return path, nil
		}
	}
	path, err := r.make(ctx, key[0].path)
	if err == nil {
		_ = os.Remove(link) // without the link, the next process makes the initrd again
		_ = os.Symlink(filepath.Base(path), link)
	}
	return path, err
}

// make writes the initrd to a temporary file, and renames it to the hash of its
// content.
func (r *Initrds) make(ctx context.Context, modules string) (_ string, err error) {
	if err := os.MkdirAll(r.dir, 0o700); err != nil {
		return "", err
	}
	f, err := os.CreateTemp(r.dir, "*"+durable.Suffix)
	if err != nil {
		return "", err
	}
	defer func() {
		if err != nil {
			_ = os.Remove(f.Name())
		}
	}()
	sum := sha256.New()
	err = errors.Join(r.write(ctx, io.MultiWriter(f, sum), modules), f.Close())
	if err != nil {
		return "", err
	}
	path := filepath.Join(r.dir, hex.EncodeToString(sum.Sum(nil))+".cpio")
	if err := os.Rename(f.Name(), path); err != nil {
		return "", err
	}
	r.prune(path)
	return path, nil
}

func (r *Initrds) write(ctx context.Context, w io.Writer, modules string) error {
	m, err := os.Open(modules)
	if err != nil {
		return err
	}
	defer func() { _ = m.Close() }()
	n, err := io.Copy(w, m)
	if err != nil {
		return err
	}
	if pad := n % 4; pad != 0 { // an archive starts at a multiple of four
		if _, err := w.Write(make([]byte, 4-pad)); err != nil {
			return err
		}
	}
	if err := ctx.Err(); err != nil {
		return context.Cause(ctx)
	}
	runner, err := os.ReadFile(r.runner)
	if err != nil {
		return err
	}
	return writeRunner(w, runner)
}

// writeRunner writes the archive with /init. It has device nodes because a Go
// program ends at once if the kernel opened no console for it and /dev/null does
// not exist.
func writeRunner(w io.Writer, runner []byte) error {
	records := []cpio.Record{
		cpio.Directory("dev", 0o755),
		cpio.CharDev("dev/console", 0o600, 5, 1),
		cpio.CharDev("dev/null", 0o666, 1, 3),
		cpio.StaticRecord(runner, cpio.Info{Name: "init", Mode: cpio.S_IFREG | 0o755}),
	}
	rw := cpio.Newc.Writer(&writerOnly{w})
	for i, rec := range records {
		rec.Info.Ino, rec.Info.NLink = uint64(i)+1, 1
		if err := rw.WriteRecord(rec); err != nil {
			return err
		}
	}
	return cpio.WriteTrailer(rw)
}

// writerOnly hides other methods of a writer, because cpio would seek in it.
type writerOnly struct{ io.Writer }

// prune removes old files of the cache. QEMU reads an initrd only when it starts,
// so the newest one is enough for the current start.
func (r *Initrds) prune(keep string) {
	entries, err := os.ReadDir(r.dir)
	if err != nil {
		return
	}
	type aged struct {
		path string
		at   time.Time
	}
	var all []aged
	for _, e := range entries {
		info, err := e.Info()
		path := filepath.Join(r.dir, e.Name())
		if err != nil || path == keep {
			continue
		}
		if filepath.Ext(path) == durable.Suffix && time.Since(info.ModTime()) < time.Hour {
			continue // another process may be writing it
		}
		all = append(all, aged{path, info.ModTime()})
	}
	slices.SortFunc(all, func(a, b aged) int { return b.at.Compare(a.at) })
	kept := map[string]int{} // by suffix
	for _, a := range all {
		ext := filepath.Ext(a.path)
		if kept[ext]++; kept[ext] >= keepInitrds || ext == durable.Suffix {
			_ = os.Remove(a.path)
		}
	}
}

func fileExists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}
