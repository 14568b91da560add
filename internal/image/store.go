package image

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/lazyre"
)

// Image is one built image. Its files are read-only and never change.
type Image struct {
	Stamp
	// Dir is the directory of the image's files.
	Dir string
	// Current is true if the bare name means this image.
	Current bool
}

// Ref returns the image's full reference, name@digest.
func (i Image) Ref() string { return i.Name + "@" + i.Digest }

// RootDisk returns the path of the raw root disk.
func (i Image) RootDisk() string { return filepath.Join(i.Dir, fileRoot) }

// Kernel returns the path of the kernel that a hypervisor starts directly.
func (i Image) Kernel() string { return filepath.Join(i.Dir, fileKernel) }

// Modules returns the path of the cpio archive with the modules for the
// initrd.
func (i Image) Modules() string { return filepath.Join(i.Dir, fileModules) }

// DiskUsage returns how many bytes the image occupies on the host.
func (i Image) DiskUsage() int64 {
	var sum int64
	for _, f := range []string{fileRoot, fileKernel, fileModules, fileStamp} {
		var st unix.Stat_t
		if unix.Stat(filepath.Join(i.Dir, f), &st) == nil {
			sum += st.Blocks * 512
		}
	}
	return sum
}

// Options are the options of a Store; the zero value is valid.
type Options struct {
	// InUse reports whether the image name@digest is in use; such an image is
	// not removed. Default: none is.
	InUse func(ref string) (bool, error)
	// Now is the clock. Default: time.Now.
	Now func() time.Time
}

// Store is a directory of images. Any number of Stores, in any number of
// processes, may use one directory at once.
type Store struct {
	root string
	opts Options
	// make fills a build's directory: (*builder).build, or the function of a
	// test of the store.
	make func(*builder, context.Context) (*Stamp, error)

	mu       sync.Mutex
	building map[string]time.Time // when the builds of this process began, by the image's name
}

// Building returns when the builds that run in this process began, by the image's name.
func (s *Store) Building() map[string]time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	return maps.Clone(s.building)
}

// begun records a build in Building until ended is called.
func (s *Store) begun(name string) (ended func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.building[name] = s.opts.Now()
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.building, name)
	}
}

// NewStore returns the Store at root, which is created at the first write.
func NewStore(root string, opts Options) *Store {
	if abs, err := filepath.Abs(root); err == nil { // fails only without a working directory
		root = abs
	}
	if opts.InUse == nil {
		opts.InUse = func(string) (bool, error) { return false, nil }
	}
	if opts.Now == nil {
		opts.Now = time.Now
	}
	return &Store{root: root, opts: opts, make: (*builder).build, building: map[string]time.Time{}}
}

var digestRE = lazyre.New(`^[0-9a-f]{20}$`)

// ParseRef splits a reference, name or name@digest; digest is "" for a bare
// name.
func ParseRef(ref string) (name, digest string, err error) {
	name, digest, pinned := strings.Cut(ref, "@")
	if err := agentlab.ValidateName(name); err != nil || pinned && !digestRE.MatchString(digest) {
		return "", "", agentlab.Errorf(agentlab.CodeInvalid, "%q is not an image", ref).WithField("image").
			WithHint("write NAME or NAME@DIGEST as 'agentlab image list' shows them")
	}
	return name, digest, nil
}

// Check returns nil if ref is an image that exists or could be built from a
// shipped recipe; otherwise an error with code not_found or invalid.
func (s *Store) Check(ref string) error {
	name, digest, err := ParseRef(ref)
	if err != nil {
		return err
	}
	if digest == "" && slices.Contains(ShippedNames(), name) {
		return nil
	}
	_, err = s.resolve(name, digest)
	return err
}

// Resolve finds a built image by name or name@digest. Code not_found if it is
// not built, even if it could be.
func (s *Store) Resolve(_ context.Context, ref string) (Image, error) {
	name, digest, err := ParseRef(ref)
	if err != nil {
		return Image{}, err
	}
	return s.resolve(name, digest)
}

func (s *Store) resolve(name, digest string) (Image, error) {
	current, err := s.current(name)
	if err != nil {
		return Image{}, err
	}
	if digest == "" {
		digest = current
	}
	if digest == "" {
		return Image{}, s.notFound(name)
	}
	img, err := s.load(name, digest)
	img.Current = digest == current
	return img, err
}

func (s *Store) notFound(ref string) error {
	e := agentlab.Errorf(agentlab.CodeNotFound, "there is no image %q", ref).WithField("image")
	if name, _, _ := strings.Cut(ref, "@"); slices.Contains(ShippedNames(), name) {
		return e.WithHint("build it: agentlab image build %s", name)
	}
	var built []string
	if list, err := s.List(context.Background()); err == nil {
		for _, i := range list {
			built = append(built, i.Name)
		}
	}
	slices.Sort(built)
	built = slices.Compact(built)
	missing := slices.DeleteFunc(ShippedNames(), func(name string) bool { return slices.Contains(built, name) })
	var hints []string
	if len(built) > 0 {
		hints = append(hints, "there are "+strings.Join(built, ", "))
	}
	if len(missing) > 0 {
		hints = append(hints, "not built yet: "+strings.Join(missing, ", "))
	}
	return e.WithHint("%s", strings.Join(hints, "; "))
}

// current returns digest of the image with the bare name, "" for none.
func (s *Store) current(name string) (string, error) {
	data, err := os.ReadFile(filepath.Join(s.root, name, "current"))
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	if err != nil {
		return "", agentlab.Errorf(agentlab.CodeInternal, "cannot read images: %w", err)
	}
	digest := strings.TrimSpace(string(data))
	if !digestRE.MatchString(digest) {
		return "", nil // as if it were not built; a build replaces it
	}
	return digest, nil
}

// load reads an image's stamp and checks that its files exist.
func (s *Store) load(name, digest string) (Image, error) {
	dir := filepath.Join(s.root, name, digest)
	// Disks refer to the image by its path for as long as they exist, and may be
	// in use below another link to this directory.
	if path, err := filepath.EvalSymlinks(dir); err == nil {
		dir = path
	}
	img := Image{Dir: dir}
	data, err := os.ReadFile(filepath.Join(img.Dir, fileStamp))
	if errors.Is(err, fs.ErrNotExist) {
		return Image{}, s.notFound(name + "@" + digest)
	}
	if err != nil {
		return Image{}, agentlab.Errorf(agentlab.CodeInternal, "cannot read images: %w", err)
	}
	if err := json.Unmarshal(data, &img.Stamp); err != nil || img.Name != name || img.Digest != digest {
		return Image{}, s.damaged(name, digest, fileStamp)
	}
	for _, f := range []string{fileRoot, fileKernel, fileModules} {
		st, err := os.Stat(filepath.Join(img.Dir, f))
		if err != nil || !st.Mode().IsRegular() || st.Size() == 0 || f == fileRoot && st.Size() != img.SizeBytes {
			return Image{}, s.damaged(name, digest, f)
		}
	}
	return img, nil
}

func (s *Store) damaged(name, digest, file string) error {
	return agentlab.Errorf(agentlab.CodeInternal, "image %s@%s is damaged (%s)", name, digest, file).
		WithField("image").WithHint("remove it and build it again: agentlab image rm %s@%s; agentlab image build %s", name, digest, name)
}

// List returns all built images by name, the current one first, then newest
// first. Damaged images are omitted.
func (s *Store) List(_ context.Context) ([]Image, error) {
	names, err := os.ReadDir(s.root)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, agentlab.Errorf(agentlab.CodeInternal, "cannot read images: %w", err)
	}
	var out []Image
	for _, n := range names {
		if n.IsDir() && agentlab.ValidateName(n.Name()) == nil {
			out = append(out, s.versionsOf(n.Name())...)
		}
	}
	return out, nil
}

func (s *Store) versionsOf(name string) []Image {
	current, _ := s.current(name) // unreadable: none is current
	var out []Image
	for _, digest := range s.digests(name) {
		if img, err := s.load(name, digest); err == nil {
			img.Current = digest == current
			out = append(out, img)
		}
	}
	slices.SortFunc(out, func(a, b Image) int {
		if a.Current != b.Current {
			if a.Current {
				return -1
			}
			return 1
		}
		return cmp.Or(b.CreatedAt.Compare(a.CreatedAt), cmp.Compare(a.Digest, b.Digest))
	})
	return out
}

// digests returns the directories of a name's images, including damaged ones.
func (s *Store) digests(name string) []string {
	entries, _ := os.ReadDir(filepath.Join(s.root, name)) // none if it does not exist
	var out []string
	for _, e := range entries {
		if e.IsDir() && digestRE.MatchString(e.Name()) {
			out = append(out, e.Name())
		}
	}
	return out
}

// Remove deletes name@digest, or all images of a bare name. An image in use is
// kept and the error has code conflict; the others are still deleted.
func (s *Store) Remove(ctx context.Context, ref string) error {
	name, digest, err := ParseRef(ref)
	if err != nil {
		return err
	}
	digests := s.digests(name)
	if digest != "" {
		if !slices.Contains(digests, digest) {
			return s.notFound(ref)
		}
		digests = []string{digest}
	}
	if len(digests) == 0 {
		return s.notFound(ref)
	}
	unlock, err := s.lockName(ctx, name, nil)
	if err != nil {
		return err
	}
	defer unlock()
	var errs []error
	for _, d := range digests {
		errs = append(errs, s.remove(name, d))
	}
	_ = os.Remove(filepath.Join(s.root, name)) // fails unless the directory is empty
	return errors.Join(errs...)
}

func (s *Store) remove(name, digest string) error {
	used, err := s.opts.InUse(name + "@" + digest)
	if err != nil {
		return agentlab.Errorf(agentlab.CodeUnavailable, "the users of %s@%s cannot be determined: %w", name, digest, err)
	}
	if used {
		return agentlab.Errorf(agentlab.CodeConflict, "sandboxes or snapshots use %s@%s", name, digest).WithField("image").
			WithHint("destroy or delete them first: agentlab sandbox list, agentlab sandbox snapshot list")
	}
	if current, err := s.current(name); err == nil && current == digest {
		if err := os.Remove(filepath.Join(s.root, name, "current")); err != nil {
			return agentlab.Errorf(agentlab.CodeInternal, "cannot remove the image: %w", err)
		}
	}
	dir := filepath.Join(s.root, name, digest)
	// The stamp is removed first: without it, the rest is no longer an image.
	err = os.Remove(filepath.Join(dir, fileStamp))
	if err == nil || errors.Is(err, fs.ErrNotExist) {
		err = os.RemoveAll(dir)
	}
	if err != nil {
		return agentlab.Errorf(agentlab.CodeInternal, "cannot remove the image: %w", err)
	}
	return nil
}
