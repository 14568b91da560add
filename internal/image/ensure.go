package image

import (
	"bufio"
	"context"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/durable"
	"github.com/agentlab-vm/agentlab/internal/lock"
)

// buildDir is the directory of builds, below a store's root so that one rename
// publishes an image.
const buildDir = ".build"

// waitProgress is the interval between two reads of another process's log.
const waitProgress = 250 * time.Millisecond

// BuildRequest is a request to build an image.
type BuildRequest struct {
	// Name of a shipped recipe or, with Recipe, of the new image.
	Name string
	// Recipe is a recipe's text; if it has a name, the name must be Name.
	Recipe string
	// Force builds even if an image of this recipe exists.
	Force bool
}

// Ensure returns the image ref, and builds it first if it is a shipped one that
// is missing or was made by another recipe or builder. Callers in any number of
// processes build it once; those that wait get the progress of that build. progress gets one line at a time and may be nil.
func (s *Store) Ensure(ctx context.Context, ref string, progress func(string)) (Image, error) {
	name, digest, err := ParseRef(ref)
	if err != nil {
		return Image{}, err
	}
	if digest != "" || !slices.Contains(ShippedNames(), name) {
		return s.resolve(name, digest)
	}
	return s.Build(ctx, BuildRequest{Name: name}, progress)
}

// Build makes an image and sets its name to it. Unless forced, it returns the
// present image if the same recipe and builder made it.
func (s *Store) Build(ctx context.Context, req BuildRequest, progress func(string)) (Image, error) {
	if progress == nil {
		progress = func(string) {}
	}
	r, err := req.Parse()
	if err != nil {
		return Image{}, err
	}
	key := r.Key()
	if img, ok := s.fresh(r.Name, key); ok && !req.Force {
		return img, nil
	}
	unlock, err := s.lockName(ctx, r.Name, progress)
	if err != nil {
		return Image{}, err
	}
	defer unlock()
	if img, ok := s.fresh(r.Name, key); ok && !req.Force {
		return img, nil // another process has built it
	}
	return s.build(ctx, r, req.Force, progress)
}

// Parse returns the recipe of the request.
func (req BuildRequest) Parse() (*Recipe, error) {
	if err := agentlab.ValidateName(req.Name); err != nil {
		return nil, err
	}
	if req.Recipe == "" {
		return Shipped(req.Name)
	}
	if slices.Contains(ShippedNames(), req.Name) {
		return nil, agentlab.Errorf(agentlab.CodeInvalid, "%s is the name of a shipped recipe", req.Name).WithField("name").
			WithHint("choose another name for your image; 'extends: %s' extends the shipped one", req.Name)
	}
	text := req.Recipe
	r, err := decodeRecipe([]byte(text))
	if err != nil {
		return nil, err
	}
	switch r.Name {
	case req.Name:
	case "":
		text += "\nname: " + req.Name + "\n"
	default:
		return nil, agentlab.Errorf(agentlab.CodeInvalid, "the recipe has the name %q instead of %q", r.Name, req.Name).WithField("name")
	}
	return ParseRecipe([]byte(text))
}

// fresh returns the name's current image if it was built from a recipe with
// this key.
func (s *Store) fresh(name, key string) (Image, bool) {
	img, err := s.resolve(name, "")
	return img, err == nil && img.RecipeKey == key
}

// lockName takes the name's lock and removes directories of dead builds. While
// another process holds the lock, its build log is passed to progress.
func (s *Store) lockName(ctx context.Context, name string, progress func(string)) (func(), error) {
	dir := filepath.Join(s.root, buildDir)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, classify("making the image store", err, "")
	}
	path := filepath.Join(dir, name+".lock")
	l, err := lock.Try(path)
	if agentlab.CodeOf(err) == agentlab.CodeBusy {
		stop := s.follow(name, progress)
		l, err = lock.Acquire(ctx, path)
		stop()
		if ctx.Err() != nil && err != nil {
			err = ctx.Err()
		}
	}
	if err != nil {
		return nil, err
	}
	s.sweep(context.WithoutCancel(ctx), name)
	return func() { _ = l.Unlock() }, nil
}

// follow sends the log of another process's build to progress until it is
// stopped.
func (s *Store) follow(name string, progress func(string)) (stop func()) {
	if progress == nil {
		return func() {}
	}
	progress("another process is building " + name + "; waiting for it")
	ended, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		f, err := os.Open(s.logPath(name))
		if err != nil {
			return
		}
		defer func() { _ = f.Close() }()
		if _, err := f.Seek(0, io.SeekEnd); err != nil {
			return
		}
		r, part := bufio.NewReader(f), ""
		tick := time.NewTicker(waitProgress)
		defer tick.Stop()
		for {
			text, err := r.ReadString('\n')
			part += text
			if err == nil {
				if step, ok := progressLine(strings.TrimSuffix(part, "\n")); ok {
					progress(step)
				}
				part = ""
				continue
			}
			select {
			case <-ended:
				return
			case <-tick.C:
			}
		}
	}()
	return func() { close(ended); <-done }
}

func (s *Store) logPath(name string) string { return filepath.Join(s.root, buildDir, name+".log") }

// sweep removes the directories of the name's dead builds, and of interrupted
// removals. The caller holds the name's lock.
func (s *Store) sweep(ctx context.Context, name string) {
	left, _ := filepath.Glob(filepath.Join(s.root, buildDir, name+".*.d")) // the pattern is valid
	for _, dir := range left {
		removeTree(ctx, dir)
	}
}

// Sweep removes the files of killed builds, except for names that are being
// built now, and downloads that were not used for 30 days. A build does this
// for its own name; a daemon calls Sweep when it starts.
func (s *Store) Sweep(ctx context.Context) {
	s.sweepDownloads()
	s.sweepLayers()
	locks, _ := filepath.Glob(filepath.Join(s.root, buildDir, "*.lock")) // the pattern is valid
	for _, path := range locks {
		if l, err := lock.Try(path); err == nil {
			s.sweep(ctx, strings.TrimSuffix(filepath.Base(path), ".lock"))
			_ = l.Unlock()
		}
	}
}

// removeTree deletes a build's directory. If an ordinary user built it, its
// files belong to subordinate user IDs, so the user needs the namespace again.
// After an error the next sweep tries again.
func removeTree(ctx context.Context, dir string) {
	if mounted(dir) {
		return // a build that is ending still uses it; never delete through a mount
	}
	if os.Geteuid() == 0 {
		_ = os.RemoveAll(dir)
		return
	}
	if err := os.RemoveAll(dir); err != nil {
		argv := isolated("rm", "-rf", "--one-file-system", "--", dir)
		_ = exec.CommandContext(ctx, argv[0], argv[1:]...).Run() //nolint:gosec // our own path
	}
}

// mounted reports whether this process sees a mount below dir.
func mounted(dir string) bool {
	data, err := os.ReadFile("/proc/self/mountinfo")
	return err != nil || strings.Contains(string(data), " "+dir+"/")
}

// build builds the image; the caller holds the name's lock.
func (s *Store) build(ctx context.Context, r *Recipe, force bool, progress func(string)) (Image, error) {
	defer s.begun(r.Name)()
	log, err := os.Create(s.logPath(r.Name))
	if err != nil {
		return Image{}, classify("making the build's log", err, "")
	}
	defer func() { _ = log.Close() }()
	work, remove, err := s.workDir(ctx, r.Name)
	if err != nil {
		return Image{}, err
	}
	defer remove()
	out := &output{log: log, progress: progress}
	b := &builder{recipe: r, work: work, log: log.Name(), out: out, now: s.opts.Now, force: force,
		downloads: filepath.Join(s.root, downloadsDir), layers: filepath.Join(s.root, layersDir)}
	begin := s.opts.Now()
	stamp, err := s.make(b, ctx)
	if err != nil {
		out.line("E: " + err.Error())
		return Image{}, err
	}
	img, err := s.publish(stamp, b.path("image"))
	if err != nil {
		return Image{}, classify("publishing the image", err, log.Name())
	}
	out.step("%s is built: %d MB in %d s", img.Ref(), img.DiskUsage()>>20, int(s.opts.Now().Sub(begin).Seconds()))
	return img, nil
}

// workDir makes a directory for a new image, which remove deletes with what is in it. The
// caller holds the name's lock.
func (s *Store) workDir(ctx context.Context, name string) (dir string, remove func(), err error) {
	dir, err = os.MkdirTemp(filepath.Join(s.root, buildDir), name+".*.d")
	if err != nil {
		return "", nil, classify("making the build's directory", err, "")
	}
	remove = func() { removeTree(context.WithoutCancel(ctx), dir) }
	if err := os.Chmod(dir, 0o755); err != nil {
		remove()
		return "", nil, classify("making the build's directory", err, "")
	}
	return dir, remove, nil
}

// publish moves a finished image to its place and sets the name to it. An image
// with the same content is left as it is, because sandboxes may use it.
func (s *Store) publish(stamp *Stamp, from string) (Image, error) {
	dir := filepath.Join(s.root, stamp.Name)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return Image{}, err
	}
	if _, err := s.load(stamp.Name, stamp.Digest); err != nil {
		to := filepath.Join(dir, stamp.Digest)
		if err := os.RemoveAll(to); err != nil { // damaged, or partially removed
			return Image{}, err
		}
		if err := os.Rename(from, to); err != nil {
			return Image{}, err
		}
	}
	if err := durable.Replace(filepath.Join(dir, "current"), []byte(stamp.Digest+"\n"), durable.Name); err != nil {
		return Image{}, err
	}
	return s.resolve(stamp.Name, "")
}
