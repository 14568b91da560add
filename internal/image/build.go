package image

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/agentlab-vm/agentlab"
)

// The files of an image.
const (
	fileRoot    = "root.img"
	fileKernel  = "vmlinux"
	fileModules = "modules.cpio"
	fileStamp   = "image.json"
)

// builder builds one image in one directory.
type builder struct {
	recipe *Recipe
	work   string // the build's own directory
	log    string // path of the log, for hints
	out    *output
	now    func() time.Time

	downloads, layers string // the store's caches
	force             bool   // use no layers
}

func (b *builder) path(elem ...string) string {
	return filepath.Join(append([]string{b.work}, elem...)...)
}

// build fills work/image and returns its stamp.
func (b *builder) build(ctx context.Context) (*Stamp, error) {
	b.makeRoom()
	if err := b.recipe.preflight(ctx, b.work); err != nil {
		return nil, err
	}
	if err := b.prepare(ctx); err != nil {
		return nil, classify("preparing", err, b.log)
	}
	if err := b.gather(ctx); err != nil {
		return nil, firstCause(ctx, err)
	}
	b.out.step("setting up users, services and links")
	if err := b.finish(ctx); err != nil {
		return nil, classify("finishing the root file system", err, b.log)
	}
	stamp, err := b.inspect(ctx)
	if err != nil {
		return nil, classify("inspecting the root file system", err, b.log)
	}
	if err := b.kernel(stamp); err != nil {
		return nil, classify("extracting the kernel", err, b.log)
	}
	stamp.seal()
	b.out.step("writing the root disk")
	if err := b.disk(ctx, stamp); err != nil {
		return nil, classify("writing the root disk", err, b.log)
	}
	if err := stamp.write(b.path("image", fileStamp)); err != nil {
		return nil, classify("writing the stamp", err, b.log)
	}
	return stamp, nil
}

// gather makes everything that the image consists of, from layers where they
// exist.
func (b *builder) gather(ctx context.Context) error {
	r := b.recipe
	g, gctx := errgroup.WithContext(ctx)
	g.Go(func() error { return b.packages(gctx) })
	l := layer{"npm", layerKey(nil, r.npmSpecs(), r.Arch, npmRegistry(), b.now().Unix()/int64(layerAge/time.Second)), []string{"npm", "npm.list"}}
	npm := func(ctx context.Context, install func(context.Context) error) error {
		return classify("installing agents", b.reusable(ctx, l, install), b.log)
	}
	hostNPM := lookPath("npm") != "" || !r.bringsNPM()
	if r.usesNPM() && hostNPM {
		g.Go(func() error { return npm(gctx, b.npmInstall) })
	}
	if err := g.Wait(); err != nil {
		return err
	}
	if r.usesNPM() && !hostNPM {
		if err := npm(ctx, b.npmInTree); err != nil {
			return err
		}
	}
	if _, err := os.Stat(b.path("wheels")); len(r.Pip) > 0 && err != nil { // not fetched yet
		if err := classify("fetching Python packages", b.fetch(ctx), b.log); err != nil {
			return err
		}
	}
	if r.Go.Toolchain == "" {
		return nil
	}
	return classify("building Go programs", b.makeGo(ctx), b.log)
}

// firstCause returns the error of the caller's context instead of errors that
// it caused.
func firstCause(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return err
}

// withheld lists capabilities on the host that scripts of packages do not
// need. Those for mounting and for creating devices are needed.
const withheld = "-dac_read_search,-sys_module,-sys_rawio,-sys_ptrace,-sys_boot,-sys_time,-syslog,-mac_admin,-mac_override"

// prepare creates the directories of the build and stages the recipe.
func (b *builder) prepare(ctx context.Context) error {
	for _, dir := range []string{"image", "tmp"} {
		if err := os.Mkdir(b.path(dir), 0o755); err != nil {
			return err
		}
	}
	for _, f := range b.recipe.Files {
		if f.URL != "" {
			b.out.step("fetching %s", f.URL)
		}
	}
	return b.recipe.Stage(ctx, StageOptions{Kind: Direct, Downloads: b.downloads}, b.work)
}

// debootstrap creates work/tree with the packages of r and downloads the kernel
// to work/kernel.
func (b *builder) debootstrap(ctx context.Context, r *Recipe) error {
	s := stage{recipe: r, dir: b.work}
	s.write("sources.list", s.sourcesList())
	if s.err != nil {
		return s.err
	}
	b.out.step("installing %d packages of %s and what they need", len(r.Packages), r.Suite)
	// --mode=root also in a user namespace: isolated has made us its root.
	// A shell splits the words of the hook. Only paths that contain the
	// user's directory can need quoting, hence the variables.
	argv := isolated("setpriv", "--bounding-set="+withheld, "mmdebstrap", "--mode=root", "--format=directory", "--variant=minbase", "--architectures="+r.Arch,
		"--components="+strings.Join(r.Components, ","), "--include="+strings.Join(r.Packages, ","),
		"--aptopt="+b.path("apt.conf"), "--dpkgopt="+b.path("files", "etc", "dpkg", "dpkg.cfg.d", "agentlab-slim"),
		"--dpkgopt=force-unsafe-io", // an interrupted build leaves nothing that is used
		`--extract-hook="$AGENTLAB_WORK/packages.sh" "$AGENTLAB_WORK" "$AGENTLAB_KERNEL" "$1" $AGENTLAB_PACKAGES`,
		"--skip=cleanup/reproducible", // seal.sh removes the machine-id and the like
		r.Suite, b.path("tree"), b.path("sources.list"))
	env := append(buildEnv(b.path("tmp")), "AGENTLAB_WORK="+b.work, "AGENTLAB_KERNEL="+r.Kernel, "AGENTLAB_PACKAGES="+strings.Join(r.Packages, " "))
	return run(ctx, b.out, env, argv...)
}

// installPackages runs debootstrap, and repeats it once if the mirror failed:
// apt does not retry after every temporary error of a mirror or a proxy.
func (b *builder) installPackages(ctx context.Context, r *Recipe) error {
	const step = "installing packages"
	err := classify(step, b.debootstrap(ctx, r), b.log)
	if agentlab.CodeOf(err) != agentlab.CodeUnavailable || ctx.Err() != nil {
		return err
	}
	b.out.step("the mirror failed; trying again")
	for _, dir := range []string{"tree", "kernel"} {
		removeTree(ctx, b.path(dir))
	}
	return classify(step, b.debootstrap(ctx, r), b.log)
}

// pipVariables are those of the environment that say where pip downloads from.
var pipVariables = []string{"PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_TRUSTED_HOST"}

// fetch runs fetch.sh, which downloads what is staged and not there yet: the npm packages
// with npm in work/npm, and the Python packages with the tree's pip.
func (b *builder) fetch(ctx context.Context) error {
	env := buildEnv(b.path("tmp"))
	for _, url := range npmRegistry() {
		env = append(env, "npm_config_registry="+url)
	}
	for _, name := range pipVariables {
		if v, ok := os.LookupEnv(name); ok {
			env = append(env, name+"="+v)
		}
	}
	return run(ctx, b.out, env, isolated("sh", b.path("fetch.sh"), b.work, b.path("tree"))...)
}

// finish runs finish.sh without a network.
func (b *builder) finish(ctx context.Context) error {
	argv := isolated("unshare", "--net", "--ipc", "--uts", "sh", b.path("finish.sh"), b.work, b.path("tree"))
	return run(ctx, b.out, buildEnv(b.path("tmp")), argv...)
}

// maxVersion is how many bytes of a program's answer to --version are kept.
const maxVersion = 256

// inspect reads the stamp's contents from the finished tree.
func (b *builder) inspect(ctx context.Context) (*Stamp, error) {
	r := b.recipe
	status, err := os.ReadFile(b.path("tree", "var", "lib", "dpkg", "status"))
	if err != nil {
		return nil, err
	}
	s := &Stamp{
		Name: r.Name, Arch: r.Arch, Suite: r.Suite, Distribution: r.distribution().name,
		RecipeKey: r.Key(), Recipe: *r, Builder: builderVersion, CreatedAt: b.now().UTC().Truncate(time.Second),
		Packages: installedPackages(status), Versions: map[string]string{}, SizeBytes: int64(r.SizeGB) << 30,
	}
	for _, line := range strings.Fields(readTrimmed(b.path("kernel.packages"))) {
		name, version, _ := strings.Cut(line, "=")
		s.KernelPackages = append(s.KernelPackages, line)
		if strings.HasPrefix(name, "linux-image-") {
			s.Versions["kernel"] = version
		}
	}
	for name, pkg := range map[string]string{"systemd": "systemd", "git": "git", "openssh": "openssh-server", "python3": "python3", "libc": "libc6"} {
		if v := s.Packages[pkg]; v != "" {
			s.Versions[name] = v
		}
	}
	for _, command := range r.commands() {
		line := firstLine([]byte(readTrimmed(b.path("versions", command))))
		s.Versions[command] = line[:min(len(line), maxVersion)]
	}
	s.NPM, s.Pip = strings.Fields(readTrimmed(b.path("npm.list"))), strings.Fields(readTrimmed(b.path("pip.list")))
	s.Versions["mmdebstrap"], s.Versions["e2fsprogs"] = hostVersion(ctx, "mmdebstrap", "--version"), hostVersion(ctx, "mke2fs", "-V")
	return s, nil
}

// installedPackages reads dpkg's status file.
func installedPackages(status []byte) map[string]string {
	out := map[string]string{}
	for _, st := range parseStanzas(status) {
		if strings.HasSuffix(st["status"], " installed") {
			out[st["package"]] = st["version"]
		}
	}
	return out
}

// kernel writes the image's kernel and boot modules.
func (b *builder) kernel(s *Stamp) error {
	files, err := filepath.Glob(b.path("kernel", "boot", "vmlinu[xz]-*"))
	if err != nil {
		return err
	}
	if len(files) != 1 {
		return fmt.Errorf("package %s installs %d kernels instead of one", b.recipe.Kernel, len(files))
	}
	_, release, _ := strings.Cut(filepath.Base(files[0]), "-")
	s.KernelRelease = release
	data, err := os.ReadFile(files[0])
	if err != nil {
		return err
	}
	elf, err := ExtractKernel(data)
	if err != nil {
		return fmt.Errorf("%s: %w", filepath.Base(files[0]), err)
	}
	if err := os.WriteFile(b.path("image", fileKernel), elf, 0o444); err != nil {
		return err
	}
	dir := b.path("tree", "usr", "lib", "modules", release)
	order, err := resolveModules(dir)
	if err != nil {
		return err
	}
	f, err := os.OpenFile(b.path("image", fileModules), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o444)
	if err != nil {
		return err
	}
	s.BootModules, err = writeModulesCPIO(f, dir, order)
	return errors.Join(err, f.Close())
}

// Stamp is image.json: the description of an image and of its build.
type Stamp struct {
	Name         string    `json:"name"`
	Digest       string    `json:"digest"`
	Arch         string    `json:"arch"`
	Suite        string    `json:"suite"`
	Distribution string    `json:"distribution"`
	SizeBytes    int64     `json:"size_bytes"` // virtual size of the root disk
	CreatedAt    time.Time `json:"created_at"`
	// KernelRelease is the output of uname -r in the guest.
	KernelRelease string `json:"kernel_release"`
	// BootModules are the names of the modules in modules.cpio, in load
	// order.
	BootModules []string `json:"modules"`
	// Versions of the important parts: the kernel, some packages, and the
	// output of each command of the recipe with --version.
	Versions map[string]string `json:"versions"`
	// RecipeKey is the recipe's StageKey; an image whose RecipeKey differs
	// from that of its current recipe is stale.
	RecipeKey string `json:"recipe_key"`
	// From is the image of the sandbox whose disk this is; "" for an image that
	// was built. Recipe, Versions and Packages are those of From.
	From    string `json:"from,omitempty"`
	Builder string `json:"builder"`
	Recipe  Recipe `json:"recipe"`
	// Packages maps all of the distribution's to their versions;
	// KernelPackages are name=version, NPM name@version, Pip name==version.
	Packages       map[string]string `json:"packages"`
	KernelPackages []string          `json:"kernel_packages"`
	NPM            []string          `json:"npm,omitempty"`
	Pip            []string          `json:"pip,omitempty"`
}

// seal computes the digest from the recipe and from the packages that were
// installed.
func (s *Stamp) seal() {
	slices.Sort(s.NPM)
	s.Digest = digestOf(s.RecipeKey, s.Packages, s.KernelPackages, s.NPM, s.Pip, s.SizeBytes, s.Arch)
}

// digestOf returns the digest of an image that values describe.
func digestOf(values ...any) string {
	text, _ := json.Marshal(values) // always marshals; maps are sorted
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:])[:digestLen]
}

// digestLen is how many hexadecimal digits a digest has.
const digestLen = 20

func (s *Stamp) write(path string) error {
	text, err := json.MarshalIndent(s, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(path, append(text, '\n'), 0o444)
}
