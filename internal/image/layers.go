package image

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/klauspost/compress/zstd"
	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/images"
	"github.com/agentlab-vm/agentlab/internal/bounded"
	"github.com/agentlab-vm/agentlab/internal/fsfault"
	"github.com/agentlab-vm/agentlab/internal/hostos"
	"github.com/agentlab-vm/agentlab/internal/hostspace"
)

// layersDir is the directory of layers in a store's root: results of steps of
// earlier builds, as compressed tar archives KIND-KEY.tar.zst. A key is an ID of
// everything that the step depends on. Layers are a cache: each can be removed
// at any time.
const layersDir = ".layers"

const (
	layerSuffix = ".tar.zst"
	// maxLayers is how many bytes all layers of a store have; the ones that
	// were not used for the longest time are removed first.
	maxLayers = 8 << 30
	// layersUnused is the time after which the sweep removes a layer.
	layersUnused = 30 * 24 * time.Hour
	// layerAge is the time after which packages are installed again, so that
	// images do not get older ones than this.
	layerAge = 7 * 24 * time.Hour
	// layerReserve is how much disk space a build needs after it has stored a layer.
	layerReserve = 4 << 30
)

// layer is one result of a step.
type layer struct {
	kind  string   // packages, npm or go
	key   string   // hexadecimal
	paths []string // what it consists of, in the build's directory
}

func (l layer) file(dir string) string { return filepath.Join(dir, l.kind+"-"+l.key+layerSuffix) }

// layerKey returns an ID of its arguments and of some of the build scripts.
// Root's layers are not those of other users, who cannot restore every owner.
func layerKey(scripts []string, inputs ...any) string {
	h := sha256.New()
	text, _ := json.Marshal(inputs) // strings, numbers and lists always marshal
	_, _ = fmt.Fprintf(h, "%s %d %s\n", builderVersion, os.Geteuid(), text)
	for _, name := range scripts {
		data, _ := images.Scripts.ReadFile("build/" + name) // they are embedded
		_, _ = fmt.Fprintf(h, "%s %d\n%s", name, len(data), data)
	}
	return hex.EncodeToString(h.Sum(nil))[:32]
}

// levels returns the recipes along which the packages of r are installed: the
// first one that it extends, then those that add packages or repositories.
func (r *Recipe) levels() []*Recipe {
	p := r.parent
	if p == nil || p.Suite != r.Suite || p.Mirror != r.Mirror || p.Arch != r.Arch || p.Kernel != r.Kernel || !slices.Equal(p.Components, r.Components) {
		return []*Recipe{r}
	}
	all := p.levels()
	same := slices.EqualFunc(p.Apt, r.Apt, func(a, b Repository) bool { return layerKey(nil, a) == layerKey(nil, b) })
	if same && slices.Equal(p.Packages, r.Packages) {
		return all
	}
	return append(slices.Clip(all), r)
}

// packageLayers returns a layer for each level: the packages up to it.
func packageLayers(levels []*Recipe, now time.Time) []layer {
	key, scripts := "", []string{"packages.sh"}
	var out []layer
	for _, r := range levels {
		slim, _ := images.Files.ReadFile("files/etc/dpkg/dpkg.cfg.d/agentlab-slim") // it is embedded
		key = layerKey(scripts, key, now.Unix()/int64(layerAge/time.Second), string(slim),
			r.Suite, r.sources("/etc/apt"), r.Components, r.Arch, r.Kernel, r.Packages, r.Apt)
		out = append(out, layer{"packages", key, []string{"tree", "kernel", "kernel.packages"}})
		scripts = []string{"enter.sh", "apt.sh"}
	}
	return out
}

// packages fills work/tree and work/kernel: from the layer with the most of
// the recipe's packages, and what that lacks from the mirror.
func (b *builder) packages(ctx context.Context) error {
	levels := b.recipe.levels()
	if !addable(b.recipe.sources("/etc/apt")) {
		levels = []*Recipe{b.recipe}
	}
	layers := packageLayers(levels, b.now())
	last := len(levels) - 1
	have := last
	for have >= 0 && !b.unpack(ctx, layers[have]) {
		have--
	}
	if have < 0 {
		if err := b.installPackages(ctx, levels[0]); err != nil {
			return err
		}
		have = 0
		b.store(ctx, layers[0])
	}
	if have == last {
		return nil
	}
	if err := classify("installing packages", b.addPackages(ctx), b.log); err != nil {
		return err
	}
	b.store(ctx, layers[last])
	return nil
}

// addable reports whether packages of these sources can be installed from
// within a tree: it has neither the host's files nor its credentials.
func addable(from []source) bool {
	if matches, _ := filepath.Glob("/etc/apt/auth.conf.d/*"); len(matches) > 0 {
		return false
	}
	if _, err := os.Stat("/etc/apt/auth.conf"); err == nil {
		return false
	}
	return !slices.ContainsFunc(from, func(s source) bool { return !validURL(s.uri) })
}

// addPackages installs those of the recipe's packages that the tree lacks.
func (b *builder) addPackages(ctx context.Context) error {
	b.out.step("adding packages")
	s := stage{recipe: b.recipe, dir: b.work}
	s.treeSources()
	if s.err != nil {
		return s.err
	}
	argv := isolated("setpriv", "--bounding-set="+withheld, "sh", b.path("apt.sh"), b.work, b.path("tree"), "install")
	return run(ctx, b.out, buildEnv(b.path("tmp")), argv...)
}

// reusable runs a step unless its layer is there.
func (b *builder) reusable(ctx context.Context, l layer, step func(context.Context) error) error {
	if b.unpack(ctx, l) {
		return nil
	}
	if err := step(ctx); err != nil {
		return err
	}
	b.store(ctx, l)
	return nil
}

// unpack restores a layer, and reports whether it could. A damaged layer is
// removed.
func (b *builder) unpack(ctx context.Context, l layer) bool {
	if b.force {
		return false
	}
	f, err := os.Open(l.file(b.layers))
	if err != nil {
		return false
	}
	defer func() { _ = f.Close() }()
	b.out.step("reusing %s of an earlier build", l.kind)
	touch(f.Name())
	z, err := zstd.NewReader(f)
	if err == nil {
		err = b.tar(ctx, z, nil, "--extract", "--same-permissions")
		// tar does not read what follows the end of the archive.
		if n, rest := io.Copy(io.Discard, z); err == nil && (rest != nil || n > 1<<20) {
			err = cmp.Or(rest, errors.New("it has more than one archive"))
		}
		z.Close()
	}
	if err == nil {
		return true
	}
	for _, p := range l.paths {
		removeTree(context.WithoutCancel(ctx), b.path(p))
	}
	if ctx.Err() == nil && !fsfault.Full(err) {
		b.out.step("the layer is damaged (%v); removing it", err)
		_ = os.Remove(f.Name())
	}
	return false
}

// store keeps a layer for later builds. A build does not fail because of it.
func (b *builder) store(ctx context.Context, l layer) {
	free, err := hostspace.FreeBytes(b.work)
	if b.layers == "" || err != nil || free < 2*layerReserve {
		b.out.line("no layer is stored: the disk has too little space")
		return
	}
	path := b.path("layer-" + l.kind)
	defer func() { _ = os.Remove(path) }()
	if err := b.pack(ctx, l, path, free-layerReserve); err != nil {
		b.out.line("no layer is stored: " + err.Error())
		return
	}
	if err := os.MkdirAll(b.layers, 0o700); err == nil {
		_ = os.Rename(path, l.file(b.layers))
	}
	trimLayers(b.layers, maxLayers)
}

// pack writes a layer of at most limit bytes to path, durably.
func (b *builder) pack(ctx context.Context, l layer, path string, limit int64) (err error) {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	z, err := zstd.NewWriter(&bounded.Writer{W: f, Left: limit, Fail: unix.ENOSPC}, zstd.WithEncoderLevel(zstd.SpeedFastest))
	if err != nil {
		return err
	}
	if err := b.tar(ctx, nil, z, append([]string{"--create", "--sparse", "--one-file-system", "--exclude=tree/dev/*"}, l.paths...)...); err != nil {
		return err
	}
	if err := z.Close(); err != nil {
		return err
	}
	return f.Sync()
}

// tar runs tar in the build's directory, as root of the namespace of the tree's
// owners.
func (b *builder) tar(ctx context.Context, in io.Reader, out io.Writer, args ...string) error {
	argv := isolated(append([]string{"tar", "--directory=" + b.work, "--numeric-owner", "--xattrs", "--xattrs-include=*", "--file=-"}, args...)...)
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Env = buildEnv(b.path("tmp"))
	cmd.Stdin, cmd.Stdout = in, out
	said := &bounded.Tail{Max: 4096}
	cmd.Stderr = said
	cmd.WaitDelay = 5 * time.Second
	cmd.SysProcAttr = &syscall.SysProcAttr{}
	if err := hostos.EndWithParent(cmd.SysProcAttr); err != nil {
		return err
	}
	if err := pinned(cmd.Run); err != nil {
		if strings.Contains(said.String(), "No space left on device") {
			err = unix.ENOSPC
		}
		return fmt.Errorf("tar: %w: %s", err, firstLine([]byte(said.String())))
	}
	return nil
}

// Layer is a result of a build step that later builds use again.
type Layer struct {
	Kind     string
	Path     string
	Bytes    int64
	LastUsed time.Time
}

// Layers returns the layers of the store, the one that was used last first.
func (s *Store) Layers() []Layer { return listLayers(filepath.Join(s.root, layersDir)) }

// RemoveLayers removes and returns all layers. Builds that read one continue.
func (s *Store) RemoveLayers() (removed []Layer, err error) {
	for _, l := range s.Layers() {
		if e := os.Remove(l.Path); e != nil && !errors.Is(e, fs.ErrNotExist) {
			err = agentlab.Errorf(agentlab.CodeInternal, "cannot remove a layer: %w", e)
			continue
		}
		removed = append(removed, l)
	}
	return removed, err
}

func listLayers(dir string) []Layer {
	entries, _ := os.ReadDir(dir) // none if it does not exist
	var out []Layer
	for _, e := range entries {
		kind, _, ok := strings.Cut(e.Name(), "-")
		info, err := e.Info()
		if err == nil && ok && info.Mode().IsRegular() && strings.HasSuffix(e.Name(), layerSuffix) {
			out = append(out, Layer{kind, filepath.Join(dir, e.Name()), info.Size(), info.ModTime()})
		}
	}
	slices.SortFunc(out, func(a, b Layer) int {
		return cmp.Or(b.LastUsed.Compare(a.LastUsed), cmp.Compare(a.Path, b.Path))
	})
	return out
}

// trimLayers removes layers until the rest has at most limit bytes, and returns
// how many bytes it removed.
func trimLayers(dir string, limit int64) (removed int64) {
	var sum int64
	for _, l := range listLayers(dir) {
		if sum += l.Bytes; sum > limit && os.Remove(l.Path) == nil {
			removed += l.Bytes
		}
	}
	return removed
}

// makeRoom removes layers if a build of the recipe has too little space.
func (b *builder) makeRoom() {
	all := listLayers(b.layers)
	for i := len(all) - 1; i >= 0 && b.recipe.checkSpace(b.work) != nil; i-- {
		b.out.step("removing a layer of %d MB, because the disk has too little space", all[i].Bytes>>20)
		_ = os.Remove(all[i].Path)
	}
}

// sweepLayers removes layers that no build has used for a while.
func (s *Store) sweepLayers() {
	for _, l := range s.Layers() {
		if s.opts.Now().Sub(l.LastUsed) > layersUnused {
			_ = os.Remove(l.Path)
		}
	}
}
