package image

import (
	"archive/tar"
	"compress/gzip"
	"context"
	"crypto/sha512"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"strings"

	"github.com/agentlab-vm/agentlab"
)

// defaultRegistry is npm's own default.
const defaultRegistry = "https://registry.npmjs.org"

// Limits of a package that is unpacked here, and of its description in a registry.
const (
	maxNPMFiles = 50_000
	maxNPMBytes = 1 << 30
	maxNPMText  = 4 << 20
)

// bringsNPM reports whether the recipe has Node.js and npm, so that a build needs no npm of
// this machine.
func (r *Recipe) bringsNPM() bool {
	_, ok := r.ownNPM()
	return ok && r.Agents.Node != ""
}

func (r *Recipe) ownNPM() (NPMPackage, bool) {
	for _, p := range r.npm() {
		if p.Package == "npm" {
			return p, true
		}
	}
	return NPMPackage{}, false
}

// npmInTree installs the npm packages below work/npm with the Node.js and the npm of the
// recipe, which run in the tree, as an unprivileged user (fetch.sh). It also fetches the
// Python packages.
func (b *builder) npmInTree(ctx context.Context) error {
	r := b.recipe
	own, _ := r.ownNPM()
	b.out.step("fetching Node.js %s and npm %s", r.Agents.Node, own.Version)
	for _, p := range []NPMPackage{{Package: r.nodePackage(), Version: r.Agents.Node}, own} {
		if err := fetchNPM(ctx, p, b.path("npm")); err != nil {
			return err
		}
	}
	if err := writeFile(b.path("npm.specs"), strings.Join(r.npmSpecs(), "\n")+"\n", 0o644); err != nil {
		return err
	}
	if err := b.fetch(ctx); err != nil {
		return err
	}
	return writeFile(b.path("npm.list"), strings.Join(b.npmList(), "\n")+"\n", 0o644)
}

// fetchNPM installs one package of the registry, which needs no other one, below prefix, as
// 'npm install --global --ignore-scripts' does.
func fetchNPM(ctx context.Context, p NPMPackage, prefix string) error {
	ctx, cancel := context.WithTimeout(ctx, downloadTimeout)
	defer cancel()
	registry := defaultRegistry
	for _, url := range npmRegistry() {
		registry = strings.TrimSuffix(url, "/")
	}
	about := registry + "/" + p.Package + "/" + p.Version
	fail := func(code agentlab.Code, format string, args ...any) error {
		return agentlab.Errorf(code, "cannot fetch %s@%s from npm: %w", p.Package, p.Version, fmt.Errorf(format, args...)).
			WithHint("check the network and npm_config_registry, or install npm")
	}
	var manifest struct {
		Dist struct{ Tarball, Integrity string } `json:"dist"`
	}
	body, err := open(ctx, about)
	if err != nil {
		return fail(agentlab.CodeUnavailable, "%w", err)
	}
	err = json.NewDecoder(io.LimitReader(body, maxNPMText)).Decode(&manifest)
	_ = body.Close()
	want, ok := strings.CutPrefix(manifest.Dist.Integrity, "sha512-")
	if err != nil || !ok {
		return fail(agentlab.CodeInvalid, "%s has no SHA-512 of the package (%v)", about, err)
	}
	if body, err = open(ctx, manifest.Dist.Tarball); err != nil {
		return fail(agentlab.CodeUnavailable, "%w", err)
	}
	defer func() { _ = body.Close() }()
	dir := filepath.Join(prefix, "lib", "node_modules", p.Package)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	sum := sha512.New()
	all := io.TeeReader(body, sum)
	if err = unpackNPM(all, dir); err == nil {
		_, err = io.Copy(io.Discard, io.LimitReader(all, maxNPMBytes))
	}
	if err != nil {
		return fail(agentlab.CodeUnavailable, "%w", err)
	}
	if got := base64.StdEncoding.EncodeToString(sum.Sum(nil)); got != want {
		return fail(agentlab.CodeDenied, "it has the SHA-512 %s, not %s as the registry says", got, want)
	}
	return linkCommands(p.Package, prefix)
}

// unpackNPM unpacks the regular files of a package; the first directory of their names is
// not part of the package.
func unpackNPM(r io.Reader, dir string) error {
	z, err := gzip.NewReader(r)
	if err != nil {
		return err
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer func() { _ = root.Close() }()
	t := tar.NewReader(io.LimitReader(z, maxNPMBytes))
	for n := 0; ; n++ {
		h, err := t.Next()
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return err
		case n > maxNPMFiles:
			return fmt.Errorf("the package has more than %d files", maxNPMFiles)
		}
		_, name, ok := strings.Cut(path.Clean(h.Name), "/")
		if !ok || h.Typeflag != tar.TypeReg {
			continue
		}
		if err := root.MkdirAll(path.Dir(name), 0o755); err != nil {
			return err
		}
		f, err := root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o644|os.FileMode(h.Mode&0o111))
		if err != nil {
			return err
		}
		_, err = io.Copy(f, t) //nolint:gosec // limited above
		if err := errors.Join(err, f.Close()); err != nil {
			return err
		}
	}
}

// linkCommands links the commands of a package into bin of prefix.
func linkCommands(pkg, prefix string) error {
	root, err := os.OpenRoot(prefix)
	if err != nil {
		return err
	}
	defer func() { _ = root.Close() }()
	text, err := root.ReadFile(path.Join("lib/node_modules", pkg, "package.json"))
	if err != nil {
		return err
	}
	var m struct{ Bin map[string]string }
	if err := json.Unmarshal(text, &m); err != nil || len(m.Bin) == 0 {
		return fmt.Errorf("package %s has no commands (%w)", pkg, err)
	}
	if err := root.MkdirAll("bin", 0o755); err != nil {
		return err
	}
	for name, file := range m.Bin {
		file = path.Join("lib/node_modules", pkg, path.Join("/", file))
		if err := errors.Join(root.Chmod(file, 0o755), root.Symlink("../"+file, path.Join("bin", name))); err != nil {
			return err
		}
	}
	return nil
}
