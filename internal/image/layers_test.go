package image

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/test/disk"
)

// layerBuilder is a builder of dev whose steps are never run. Its layers are on the same
// disk.
func layerBuilder(t *testing.T) *builder {
	t.Helper()
	if err := checkNamespaces(t.Context()); err != nil {
		t.Skipf("no namespaces here: %v", err)
	}
	work := disk.Dir(t) // layers have extended attributes
	if err := os.Chmod(work, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(work, "tmp"), 0o755); err != nil {
		t.Fatal(err)
	}
	return &builder{recipe: mustShipped(t, "dev"), work: work, layers: filepath.Join(work, "layers"), now: time.Now, out: &output{log: io.Discard, progress: func(string) {}}}
}

// A layer restores files with everything that an image needs of them.
func TestLayerRestoresFiles(t *testing.T) {
	b := layerBuilder(t)
	tree := b.path("tree")
	fill := isolated("sh", "-euc", `mkdir -p "$1/dir" "$1/dev" && cd "$1"
echo text >file && chmod 4755 file && chown 0:42 dir && ln -s missing link && ln file dir/hard
truncate -s 64M sparse && : >dev/null`, "sh", tree)
	if err := run(t.Context(), b.out, buildEnv(b.path("tmp")), fill...); err != nil {
		t.Fatal(err)
	}
	if err := unix.Setxattr(filepath.Join(tree, "file"), "user.test", []byte("value"), 0); err != nil {
		t.Fatal(err)
	}
	l := layer{"packages", strings.Repeat("ab", 16), []string{"tree"}}
	if b.unpack(t.Context(), l) {
		t.Fatal("there is a layer")
	}
	b.store(t.Context(), l)
	removeTree(t.Context(), tree)
	if !b.unpack(t.Context(), l) {
		t.Fatal("no layer")
	}
	look := isolated("sh", "-euc", `cd "$1" && stat -c '%n %a %u:%g %h' file dir && readlink link && du -k sparse && ls dev`, "sh", tree)
	capture := &output{log: io.Discard, progress: func(string) {}}
	if err := run(t.Context(), capture, buildEnv(b.path("tmp")), look...); err != nil {
		t.Fatal(err)
	}
	if got, want := strings.Join(capture.last(), "\n"), "file 4755 0:0 2\ndir 755 0:42 2\nmissing\n0\tsparse"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
	value := make([]byte, 16)
	if n, err := unix.Getxattr(filepath.Join(tree, "file"), "user.test", value); err != nil || string(value[:n]) != "value" {
		t.Errorf("the attribute: %q, %v", value, err)
	}
	if all := listLayers(b.layers); len(all) != 1 || all[0].Kind != "packages" || all[0].Bytes > 1<<20 {
		t.Errorf("%+v", all)
	}
	b.force = true
	if b.unpack(t.Context(), l) {
		t.Error("a forced build uses a layer")
	}
}

// A damaged layer is removed and its step runs again; an interrupted one does not
// appear.
func TestLayerFaults(t *testing.T) {
	b := layerBuilder(t)
	l := layer{"npm", strings.Repeat("cd", 16), []string{"npm"}}
	steps := 0
	step := func(context.Context) error {
		steps++
		return writeFile(b.path("npm", "file"), strings.Repeat("text ", 1000), 0o644)
	}
	rebuild := func(want int) {
		t.Helper()
		removeTree(t.Context(), b.path("npm"))
		if err := b.reusable(t.Context(), l, step); err != nil || steps != want {
			t.Errorf("%v, %d steps, want %d", err, steps, want)
		}
		if !strings.HasPrefix(readTrimmed(b.path("npm", "file")), "text text") {
			t.Error("the step has no result")
		}
	}
	rebuild(1)
	rebuild(1)
	whole, err := os.ReadFile(l.file(b.layers))
	if err != nil {
		t.Fatal(err)
	}
	flipped := slices.Clone(whole)
	flipped[len(flipped)/2] ^= 0xff
	for _, damaged := range [][]byte{whole[:len(whole)/2], nil, flipped, []byte("not an archive")} {
		if err := os.WriteFile(l.file(b.layers), damaged, 0o600); err != nil {
			t.Fatal(err)
		}
		rebuild(steps + 1)
		rebuild(steps)
	}
	// A failed step leaves no layer.
	_ = os.Remove(l.file(b.layers))
	fault := errors.New("no network")
	if err := b.reusable(t.Context(), l, func(context.Context) error { return fault }); !errors.Is(err, fault) || len(listLayers(b.layers)) > 0 {
		t.Errorf("%v, %v", err, listLayers(b.layers))
	}
	// An interrupted, and a full disk: no layer, and nothing beside it.
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	b.store(ctx, l)
	if err := b.pack(t.Context(), l, b.path("layer-npm"), 10); !errors.Is(err, unix.ENOSPC) {
		t.Errorf("on a full disk: %v", err)
	}
	if left, _ := os.ReadDir(b.layers); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

// Layers are removed in the order of their last use.
func TestLayerLimits(t *testing.T) {
	root := t.TempDir()
	dir := filepath.Join(root, layersDir)
	names := []string{"go-3", "npm-2", "packages-1"}
	for i, name := range names {
		path := filepath.Join(dir, name+layerSuffix)
		if err := writeFile(path, strings.Repeat("x", 1000), 0o600); err != nil {
			t.Fatal(err)
		}
		used := time.Now().Add(-time.Duration(i) * 20 * 24 * time.Hour)
		if err := os.Chtimes(path, used, used); err != nil {
			t.Fatal(err)
		}
	}
	have := func() (out []string) {
		for _, l := range listLayers(dir) {
			out = append(out, strings.TrimSuffix(filepath.Base(l.Path), layerSuffix))
		}
		return out
	}
	if got := have(); !slices.Equal(got, names) {
		t.Errorf("%v", got)
	}
	NewStore(root, Options{}).Sweep(t.Context())
	if got := have(); !slices.Equal(got, names[:2]) {
		t.Errorf("after the sweep: %v", got)
	}
	if n := trimLayers(dir, 1500); n != 1000 || !slices.Equal(have(), names[:1]) {
		t.Errorf("%d bytes removed: %v", n, have())
	}
}

func parsed(t *testing.T, text string) *Recipe {
	t.Helper()
	r, err := ParseRecipe([]byte(text))
	if err != nil {
		t.Fatalf("%v; %s", err, agentlab.HintOf(err))
	}
	return r
}

// A recipe has the layers of those that it extends, and changes only those from its own
// change on.
func TestLayerKeys(t *testing.T) {
	now := time.Now()
	keys := func(r *Recipe) (out []string) {
		for _, l := range packageLayers(r.levels(), now) {
			out = append(out, l.key)
		}
		return out
	}
	base, agents, dev := keys(mustShipped(t, "base")), keys(mustShipped(t, "agents")), keys(mustShipped(t, "dev"))
	// agents has the packages of base, so that its first build installs packages once.
	if len(base) != 1 || !slices.Equal(agents, base) || len(dev) != 2 || dev[0] != base[0] || dev[1] == dev[0] {
		t.Fatalf("base %v, agents %v, dev %v", base, agents, dev)
	}
	for text, same := range map[string]int{
		"extends: dev\nrun: ['true']\nfiles: [{path: /a, content: b}]":                             2,
		"extends: dev\nnpm: [{package: x, version: 1.0.0}]\nsize_gb: 50":                           2,
		"extends: dev\npackages: [htop]":                                                           2,
		"extends: agents\npackages: [htop]":                                                        1,
		"extends: dev\nmirror: http://deb.debian.org/debian":                                       0,
		"extends: dev\nsuite: trixie":                                                              0,
		"extends: dev\npackages: [htop]\nkernel: linux-image-amd64":                                0,
		"extends: agents\npip: [{package: ruff, version: 0.14.2, command: ruff}]\nrun: ['true']\n": 1,
	} {
		got := keys(parsed(t, "name: x\n"+text+"\n"))
		n := 0
		for n < min(len(got), len(dev)) && got[n] == dev[n] {
			n++
		}
		if n != same {
			t.Errorf("%q has %d layers of dev, want %d", text, n, same)
		}
	}
	now = now.Add(layerAge)
	if later := keys(mustShipped(t, "base")); later[0] == base[0] {
		t.Error("packages get older and older")
	}
}

// The layer with the most packages is used, and what it lacks is added only if there is
// none with all.
func TestPackagesFromLayers(t *testing.T) {
	b := layerBuilder(t)
	levels := packageLayers(b.recipe.levels(), b.now())
	for i, l := range levels {
		for _, name := range []string{"tree/has", "kernel/boot/vmlinuz", "kernel.packages"} {
			if err := writeFile(b.path(name), string(rune('0'+i)), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		b.store(t.Context(), l)
	}
	for _, p := range levels[0].paths {
		removeTree(t.Context(), b.path(p))
	}
	if err := b.packages(t.Context()); err != nil || readTrimmed(b.path("tree", "has")) != "1" || readTrimmed(b.path("kernel.packages")) != "1" {
		t.Errorf("%v, %q", err, readTrimmed(b.path("tree", "has")))
	}
}

// A build that was interrupted after a Go program builds only the next ones.
func TestInterruptedGoBuildContinues(t *testing.T) {
	const script = `mkdir -p "$1/gobin"; [ "$3" = build ] || exit 0
[ -e "$1/stop" ] && [ "$4" = docker-compose ] && exit 1
echo "$4" >>"$1/built"; echo "program $4" >"$1/gobin/$4"`
	b := layerBuilder(t)
	if err := errors.Join(writeFile(b.path("go.sh"), script, 0o755), writeFile(b.path("stop"), "", 0o644), writeFile(b.path("go", "VERSION"), "go", 0o644)); err != nil {
		t.Fatal(err)
	}
	b.store(t.Context(), b.toolchainLayer())
	if err := b.makeGo(t.Context()); err == nil {
		t.Fatal("the build was not interrupted")
	}
	for _, name := range []string{"gobin", "go", "stop"} {
		removeTree(t.Context(), b.path(name))
	}
	if err := b.makeGo(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := readTrimmed(b.path("built")); got != "lazygit\ndocker-compose" {
		t.Errorf("built %q", got)
	}
	for _, p := range b.recipe.Go.Programs {
		if got := readTrimmed(b.path("gobin", p.Command)); got != "program "+p.Command {
			t.Errorf("%s is %q", p.Command, got)
		}
	}
}
