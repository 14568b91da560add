package regcache

import (
	"bufio"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
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
	Digest      string    `json:"digest,omitempty"` // sha256:HEX of the content of an index of Docker
}

// maxMeta is the maximum length of the line of a meta, in bytes.
const maxMeta = 16 << 10

// store has the objects on disk, each in the file objects/KIND/XX/ID. A file in tmp
// is being written; it is not an object.
type store struct {
	dir   string
	max   int64
	space *hostspace.Guard

	mu      sync.Mutex
	entries map[string]*entry // by kind/id
	total   int64
	epoch   int // changes when objects are cleared
}

// entry is a stored object.
type entry struct {
	kind    Kind
	size    int64     // of the file
	used    time.Time // last use
	checked time.Time // when the upstream was last asked; the file's time of modification
}

// object is an open object.
type object struct {
	file *os.File
	meta meta
	off  int64 // of the content in the file
	size int64 // of the content

	checked time.Time
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

// openStore reads the names and sizes of all objects, and removes incomplete ones.
func openStore(dir string, most int64, space *hostspace.Guard) (*store, error) {
	st := &store{dir: dir, max: most, space: space, entries: map[string]*entry{}}
	if err := claim(dir); err != nil {
		return nil, err
	}
	if err := errors.Join(os.RemoveAll(st.tmp()), os.MkdirAll(st.tmp(), 0o700)); err != nil {
		return nil, err
	}
	for _, kind := range Kinds {
		base := filepath.Join(dir, "objects", string(kind))
		err := filepath.WalkDir(base, func(path string, d fs.DirEntry, err error) error {
			if err != nil || !d.Type().IsRegular() {
				return err
			}
			info, err := d.Info()
			if err != nil {
				return err
			}
			if len(d.Name()) != 2*sha256.Size {
				return os.Remove(path) //nolint:gosec // the directory belongs to the cache alone
			}
			st.entries[string(kind)+"/"+d.Name()] = &entry{kind, info.Size(), info.ModTime(), info.ModTime()}
			st.total += info.Size()
			return nil
		})
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
	}
	st.evict()
	return st, nil
}

// open returns an object, nil if it is not stored. An invalid file is removed.
func (st *store) open(kind Kind, key string) *object {
	name := id(key)
	full := string(kind) + "/" + name
	for {
		st.mu.Lock()
		e := st.entries[full]
		if e == nil {
			st.mu.Unlock()
			return nil
		}
		e.used = time.Now()
		size, checked := e.size, e.checked
		st.mu.Unlock()
		o, err := readObject(st.path(kind, name), size)
		if err == nil {
			o.checked = checked
			return o
		}
		st.mu.Lock()
		if st.entries[full] == e { // otherwise the file is that of a newer object
			_ = st.removeLocked(full) // it is invalid also if it stays
			e = nil
		}
		st.mu.Unlock()
		if e == nil {
			return nil
		}
	}
}

func readObject(path string, size int64) (*object, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	o := &object{file: f}
	info, err := f.Stat()
	if err == nil && info.Size() != size {
		err = io.ErrUnexpectedEOF
	}
	if err == nil {
		err = o.readMeta()
	}
	if err != nil {
		_ = f.Close()
		return nil, err
	}
	o.size = size - o.off
	return o, nil
}

func (o *object) readMeta() error {
	line, err := bufio.NewReaderSize(io.NewSectionReader(o.file, 0, maxMeta), maxMeta).ReadSlice('\n')
	if err != nil {
		return err
	}
	o.off = int64(len(line))
	return json.Unmarshal(line, &o.meta)
}

func (o *object) content() *io.SectionReader { return io.NewSectionReader(o.file, o.off, o.size) }

func (o *object) close() { _ = o.file.Close() }

// draft is an object that is being written.
type draft struct {
	st    *store
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
	d := &draft{st: st, file: f, off: int64(len(line) + 1), epoch: epoch}
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
func (d *draft) keep(kind Kind, key string) error {
	name := id(key)
	path := d.st.path(kind, name)
	err := d.file.Sync()
	if err == nil {
		err = os.MkdirAll(filepath.Dir(path), 0o700)
	}
	if err != nil {
		d.drop()
		return err
	}
	d.st.mu.Lock()
	defer d.st.mu.Unlock()
	if d.epoch != d.st.epoch { // the cache was cleared since the download began
		d.drop()
		return nil
	}
	if err := os.Rename(d.file.Name(), path); err != nil {
		d.drop()
		return err
	}
	full := string(kind) + "/" + name
	if old := d.st.entries[full]; old != nil {
		d.st.total -= old.size
	}
	now := time.Now()
	d.st.entries[full] = &entry{kind, d.off + d.size, now, now}
	d.st.total += d.off + d.size
	d.st.evict()
	return nil
}

// evict removes the objects that were used least recently until the rest fits.
// The caller holds the lock, or is alone.
func (st *store) evict() {
	if st.total <= st.max {
		return
	}
	byUse := func(a, b string) int { return st.entries[a].used.Compare(st.entries[b].used) }
	for _, name := range slices.SortedFunc(maps.Keys(st.entries), byUse) {
		if st.total <= st.max-st.max/20 { // a little more, so that it is rarely done
			return
		}
		_ = st.removeLocked(name)
	}
}

func (st *store) removeLocked(full string) error {
	e := st.entries[full]
	if e == nil {
		return nil
	}
	err := os.Remove(st.path(e.kind, strings.TrimPrefix(full, string(e.kind)+"/")))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	st.total -= e.size
	delete(st.entries, full)
	return nil
}

// touch records that the upstream has confirmed an object.
func (st *store) touch(kind Kind, key string) {
	name := id(key)
	now := time.Now()
	st.mu.Lock()
	defer st.mu.Unlock()
	if e := st.entries[string(kind)+"/"+name]; e != nil {
		e.checked, e.used = now, now
		_ = os.Chtimes(st.path(kind, name), now, now) // otherwise it is checked again after a restart
	}
}

func (st *store) usage(kind Kind) Usage {
	st.mu.Lock()
	defer st.mu.Unlock()
	u := Usage{Kind: kind}
	for _, e := range st.entries {
		if e.kind == kind {
			u.Objects++
			u.Bytes += e.size
		}
	}
	return u
}

func (st *store) clear(kind Kind) (Usage, error) {
	st.mu.Lock()
	defer st.mu.Unlock()
	st.epoch++
	gone := Usage{Kind: kind}
	for name, e := range st.entries {
		if kind != "" && e.kind != kind {
			continue
		}
		if err := st.removeLocked(name); err != nil {
			return gone, agentlab.Errorf(agentlab.CodeUnavailable, "an object of the registry cache cannot be removed: %w", err).
				WithHint("check the permissions of %s", st.dir)
		}
		gone.Objects++
		gone.Bytes += e.size
	}
	return gone, nil
}
