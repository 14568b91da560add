package regcache

import (
	"bufio"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/hostspace"
)

// meta is the first line of the file of an object. What follows is its content.
type meta struct {
	URL         string    `json:"url"` // for people
	Via         []string  `json:"via"` // scope and HOST:PORT of each server that was asked
	ContentType string    `json:"content_type,omitempty"`
	ETag        string    `json:"etag,omitempty"`
	Modified    time.Time `json:"modified,omitzero"`
}

// maxMeta is the maximum length of the line of a meta, in bytes.
const maxMeta = 16 << 10

// store has the objects on disk, each in the file objects/KIND/XX/ID. The time of
// modification of a file is its last use. A file in tmp is being written; it is not an
// object.
type store struct {
	dir   string
	max   int64
	space *hostspace.Guard

	mu    sync.Mutex
	total int64 // of the sizes of all files
	epoch int   // changes when objects are cleared
}

// object is an open object.
type object struct {
	file *os.File
	meta meta
	off  int64 // of the content in the file
	size int64 // of the content
}

// id returns the name of the object with a key.
func id(key string) string {
	sum := sha256.Sum256([]byte(key))
	return hex.EncodeToString(sum[:])
}

func (st *store) tmp() string { return filepath.Join(st.dir, "tmp") }

func (st *store) path(kind Kind, id string) string {
	return filepath.Join(st.dir, "objects", string(kind), id[:2], id)
}

// tagFile marks the directory of a cache, also for programs that make backups.
const tagFile, tagText = "CACHEDIR.TAG", "Signature: 8a477f597d28d172789f06886806bc55\n# Registry cache of AgentLab, which deletes other files here.\n"

// claim returns an error for a directory that has files and is not that of a cache.
func claim(dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	all, err := os.ReadDir(dir)
	if err != nil || slices.ContainsFunc(all, func(e fs.DirEntry) bool { return e.Name() == tagFile }) {
		return err
	}
	if len(all) > 0 {
		return agentlab.Errorf(agentlab.CodeConflict, "%s is not empty and has no %s of a registry cache", dir, tagFile).
			WithHint("set cache.dir to a new directory, which the cache uses alone")
	}
	return os.WriteFile(filepath.Join(dir, tagFile), []byte(tagText), 0o600)
}

// openStore reads the sizes of all objects, and removes incomplete ones.
func openStore(dir string, most int64, space *hostspace.Guard) (*store, error) {
	st := &store{dir: dir, max: most, space: space}
	if err := claim(dir); err != nil {
		return nil, err
	}
	if err := errors.Join(os.RemoveAll(st.tmp()), os.MkdirAll(st.tmp(), 0o700)); err != nil {
		return nil, err
	}
	st.evict()
	return st, nil
}

// file is the file of an object.
type file struct {
	path string
	size int64
	used time.Time
}

// files returns the files of all objects of a kind, "*" means all. It removes others.
func (st *store) files(kind Kind) (all []file) {
	names, _ := fs.Glob(os.DirFS(st.dir), "objects/"+string(kind)+"/*/*") // the pattern is valid
	for _, name := range names {
		path := filepath.Join(st.dir, name)
		info, err := os.Lstat(path)
		switch {
		case err != nil: // it was removed
		case len(info.Name()) != 2*sha256.Size:
			_ = os.Remove(path)
		default:
			all = append(all, file{path, info.Size(), info.ModTime()})
		}
	}
	return all
}

// open returns an object, nil if it is not stored. An invalid file is removed.
func (st *store) open(kind Kind, key string) *object {
	path := st.path(kind, id(key))
	o, err := readObject(path)
	if err != nil {
		if !errors.Is(err, fs.ErrNotExist) {
			_ = os.Remove(path)
		}
		return nil
	}
	now := time.Now()
	_ = os.Chtimes(path, now, now)
	return o
}

func readObject(path string) (*object, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	o := &object{file: f}
	line, err := bufio.NewReaderSize(io.NewSectionReader(f, 0, maxMeta), maxMeta).ReadSlice('\n')
	if err == nil {
		err = json.Unmarshal(line, &o.meta)
	}
	info, serr := f.Stat()
	if err = errors.Join(err, serr); err != nil {
		_ = f.Close()
		return nil, err
	}
	o.off = int64(len(line))
	o.size = info.Size() - o.off
	return o, nil
}

func (o *object) content() *io.SectionReader { return io.NewSectionReader(o.file, o.off, o.size) }

func (o *object) close() { _ = o.file.Close() }

// draft is an object that is being written.
type draft struct {
	st    *store
	meta  meta
	file  *os.File
	off   int64
	size  int64 // of the content so far
	epoch int
}

// create begins an object.
func (st *store) create(m meta) (*draft, error) {
	line, err := json.Marshal(m)
	if err == nil && len(line) >= maxMeta {
		err = errors.New("the description of the object is too long")
	}
	if err != nil {
		return nil, err
	}
	f, err := os.CreateTemp(st.tmp(), "")
	if err != nil {
		return nil, err
	}
	st.mu.Lock()
	epoch := st.epoch
	st.mu.Unlock()
	d := &draft{st: st, meta: m, file: f, off: int64(len(line) + 1), epoch: epoch}
	if _, err := f.Write(append(line, '\n')); err != nil {
		_ = f.Close()
		d.drop()
		return nil, err
	}
	return d, nil
}

// drop deletes the file. Readers that have it open can read on.
func (d *draft) drop() { _ = os.Remove(d.file.Name()) }

// keep makes the draft the object of a key.
func (d *draft) keep(kind Kind, key string) (err error) {
	defer func() {
		if err != nil {
			d.drop()
		}
	}()
	path := d.st.path(kind, id(key))
	if err := errors.Join(d.file.Sync(), os.MkdirAll(filepath.Dir(path), 0o700)); err != nil {
		return err
	}
	d.st.mu.Lock()
	defer d.st.mu.Unlock()
	if d.epoch != d.st.epoch {
		return errors.New("the cache was cleared since the download began")
	}
	if err := os.Rename(d.file.Name(), path); err != nil {
		return err
	}
	if d.st.total += d.off + d.size; d.st.total > d.st.max {
		d.st.evict()
	}
	return nil
}

// evict reads the sizes of all files, and removes the least recently used
// until the rest fits. The caller holds the lock, or is alone.
func (st *store) evict() {
	all := st.files("*")
	st.total = 0
	for _, f := range all {
		st.total += f.size
	}
	if st.total <= st.max {
		return
	}
	slices.SortFunc(all, func(a, b file) int { return a.used.Compare(b.used) })
	for _, f := range all {
		if st.total <= st.max-st.max/20 { // a little more, so that it is rarely done
			return
		}
		if os.Remove(f.path) == nil {
			st.total -= f.size
		}
	}
}

func (st *store) usage(kind Kind) Usage {
	u := Usage{Kind: kind}
	for _, f := range st.files(kind) {
		u.Objects++
		u.Bytes += f.size
	}
	return u
}

// clear removes the objects of a kind, "*" means all.
func (st *store) clear(kind Kind) (Usage, error) {
	st.mu.Lock()
	defer st.mu.Unlock()
	st.epoch++
	gone := Usage{Kind: kind}
	for _, f := range st.files(kind) {
		if err := os.Remove(f.path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return gone, agentlab.Errorf(agentlab.CodeUnavailable, "an object of the registry cache cannot be removed: %w", err).
				WithHint("check the permissions of %s", st.dir)
		}
		gone.Objects++
		gone.Bytes += f.size
		st.total -= f.size
	}
	return gone, nil
}
