package image

import (
	"context"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"golang.org/x/mod/module"
	"golang.org/x/mod/sumdb"
	"golang.org/x/mod/sumdb/dirhash"
	modzip "golang.org/x/mod/zip"

	"github.com/agentlab-vm/agentlab"
)

// goSum is the name and the public key of the checksum database.
const goSum = "sum.golang.org+033de0ae+Ac4zctda0e5eza+HJyk9SxEdh+s3Ux18htTTAD8OuAn8"

// maxSumAnswer limits an answer of the checksum database.
const maxSumAnswer = 1 << 20

// goModule returns the module that contains Go's own programs.
func (r *Recipe) goModule() module.Version {
	return module.Version{Path: "golang.org/toolchain", Version: "v0.0.1-go" + r.Go.Toolchain + ".linux-" + r.Arch}
}

// goPrograms returns the lines of go.list, which go.sh documents.
func (r *Recipe) goPrograms() []string {
	var out []string
	for _, p := range r.Go.Programs {
		line := p.Command + " " + p.Module + " v" + p.Version + " ./" + p.Package
		for _, name := range slices.Sorted(maps.Keys(p.Set)) {
			line += " -X " + name + "=" + p.Set[name]
		}
		out = append(out, line)
	}
	return out
}

// goProxies returns the URLs of the Go module proxies of this process.
func goProxies() ([]string, error) {
	text := os.Getenv("GOPROXY")
	if text == "" {
		text = "https://proxy.golang.org"
	}
	var out []string
	for _, p := range strings.FieldsFunc(text, func(c rune) bool { return c == ',' || c == '|' }) {
		if validURL(p) {
			out = append(out, strings.TrimSuffix(p, "/"))
		}
	}
	if len(out) == 0 {
		return nil, agentlab.Errorf(agentlab.CodeUnsupported, "GOPROXY has no http or https URL without credentials").WithField("go").
			WithHint("a build gets Go and its modules from a module proxy only; unset GOPROXY, or set it to one")
	}
	return out, nil
}

// fetchGo writes Go to dir. downloads is a directory of earlier downloads, ""
// for none.
func (r *Recipe) fetchGo(ctx context.Context, dir, downloads string) error {
	m := r.goModule()
	prefix := filepath.Join(downloads, strings.TrimPrefix(m.Version, "v0.0.1-")+"-")
	known, _ := filepath.Glob(prefix + "*.zip") // the pattern is valid
	for _, path := range known {
		if sum, err := dirhash.HashZip(path, dirhash.Hash1); downloads != "" && err == nil && path == prefix+hexSum(sum)+".zip" {
			touch(path)
			return unpackGo(m, path, dir)
		}
	}
	path := dir + ".zip"
	defer func() { _ = os.Remove(path) }()
	proxies, err := goProxies()
	if err != nil {
		return err
	}
	sum, err := downloadModule(ctx, proxies, goSum, m, path)
	if err != nil {
		return err
	}
	if downloads != "" { // a build does not fail because of the cache
		_ = os.MkdirAll(downloads, 0o700)
		_ = os.Link(path, prefix+hexSum(sum)+".zip")
	}
	return unpackGo(m, path, dir)
}

// hexSum returns a sum of package dirhash as a part of a file name.
func hexSum(sum string) string {
	raw, _ := base64.StdEncoding.DecodeString(strings.TrimPrefix(sum, "h1:"))
	return hex.EncodeToString(raw)
}

// downloadModule writes the zip file of a module from one of the proxies to path, and
// returns its sum, which is that of the checksum database with the key.
func downloadModule(ctx context.Context, proxies []string, key string, m module.Version, path string) (string, error) {
	const hint = "check go in the recipe, the network, and GOPROXY in the environment of the daemon"
	var failed error
	for _, proxy := range proxies {
		if _, failed = get(ctx, proxy+"/"+m.Path+"/@v/"+m.Version+".zip", path); failed == nil {
			break
		}
	}
	if e, ok := errors.AsType[*agentlab.Error](failed); ok {
		return "", e.WithField("go").WithHint(hint)
	}
	if failed != nil {
		return "", failed
	}
	sum, err := dirhash.HashZip(path, dirhash.Hash1)
	if err != nil {
		return "", agentlab.Errorf(agentlab.CodeDenied, "the module proxy has sent a damaged %s: %w", m, err).WithField("go").WithHint(hint)
	}
	db := &sumOps{ctx: ctx, proxies: proxies, key: key}
	lines, err := sumdb.NewClient(db).Lookup(m.Path, m.Version)
	if err != nil {
		return "", agentlab.Errorf(agentlab.CodeUnavailable, "the checksum database does not answer for %s: %w", m, err).
			WithField("go").WithHint(hint)
	}
	if !slices.Contains(lines, m.Path+" "+m.Version+" "+sum) {
		return "", agentlab.Errorf(agentlab.CodeDenied, "%s has the sum %s, not the one in the checksum database", m, sum).
			WithField("go").WithHint("the module proxy sends other files than their publisher; check GOPROXY")
	}
	return sum, nil
}

// unpackGo unpacks the module with Go to dir, as the go command does.
func unpackGo(m module.Version, file, dir string) error {
	if err := modzip.Unzip(dir, m, file); err != nil {
		return err
	}
	return filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, _ := filepath.Rel(dir, path) // path is below dir
		mode := fs.FileMode(0o644)
		if d.IsDir() || strings.HasPrefix(rel, "bin/") || strings.HasPrefix(rel, "pkg/tool/") {
			mode = 0o755
		}
		if err := os.Chmod(path, mode); err != nil { //nolint:gosec // the directory is new, and no other process writes to it
			return err
		}
		if d.Name() == "_go.mod" { // a go.mod would have ended the module
			return os.Rename(path, filepath.Join(filepath.Dir(path), "go.mod")) //nolint:gosec // see above
		}
		return nil
	})
}

// sumOps is a client of the checksum database without a disk: every process
// starts from the signed tree that it gets first.
type sumOps struct {
	ctx     context.Context
	proxies []string
	key     string

	mu     sync.Mutex
	latest []byte
}

// ReadRemote asks the proxies, then the database itself.
func (o *sumOps) ReadRemote(path string) ([]byte, error) {
	name, _, _ := strings.Cut(o.key, "+")
	var errs []error
	for _, p := range o.proxies {
		body, err := o.get(p + "/sumdb/" + name + path)
		if err == nil {
			return body, nil
		}
		errs = append(errs, err)
	}
	body, err := o.get("https://" + name + path)
	if err != nil {
		return nil, errors.Join(append(errs, err)...)
	}
	return body, nil
}

func (o *sumOps) get(url string) ([]byte, error) {
	body, err := open(o.ctx, url)
	if err != nil {
		return nil, err
	}
	defer func() { _ = body.Close() }()
	return io.ReadAll(io.LimitReader(body, maxSumAnswer))
}

// ReadConfig returns the key, and the latest tree of this process.
func (o *sumOps) ReadConfig(file string) ([]byte, error) {
	if file == "key" {
		return []byte(o.key), nil
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.latest, nil
}

// WriteConfig replaces the latest tree.
func (o *sumOps) WriteConfig(_ string, old, latest []byte) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	if string(o.latest) != string(old) {
		return sumdb.ErrWriteConflict
	}
	o.latest = latest
	return nil
}

// ReadCache finds nothing.
func (o *sumOps) ReadCache(string) ([]byte, error) { return nil, fs.ErrNotExist }

// WriteCache does nothing.
func (o *sumOps) WriteCache(string, []byte) {}

// Log does nothing.
func (o *sumOps) Log(string) {}

// SecurityError does nothing: Lookup returns the error.
func (o *sumOps) SecurityError(string) {}

// makeGo makes Go and the Go programs. Each is a layer of its own, which does not
// depend on the tree: a build that is interrupted continues after the last program.
func (b *builder) makeGo(ctx context.Context) error {
	if err := b.reusable(ctx, b.toolchainLayer(), func(ctx context.Context) error { return b.recipe.fetchGo(ctx, b.path("go"), b.downloads) }); err != nil {
		return err
	}
	for _, p := range b.recipe.Go.Programs {
		l := layer{"gobin", layerKey([]string{"go.sh", "enter.sh"}, b.recipe.Go.Toolchain, p, b.recipe.Arch), []string{"gobin/" + p.Command}}
		if err := b.reusable(ctx, l, func(ctx context.Context) error { return b.buildGo(ctx, p.Command) }); err != nil {
			return err
		}
	}
	return nil
}

func (b *builder) toolchainLayer() layer {
	return layer{"go", layerKey(nil, b.recipe.Go.Toolchain, b.recipe.Arch), []string{"go"}}
}

// buildGo runs go.sh, which downloads the modules of a Go program and then builds it
// without a network.
func (b *builder) buildGo(ctx context.Context, command string) error {
	if _, err := goProxies(); err != nil {
		return err
	}
	env := buildEnv(b.path("tmp"))
	if v, ok := os.LookupEnv("GOPROXY"); ok {
		env = append(env, "GOPROXY="+v)
	}
	if err := run(ctx, b.out, env, isolated("sh", b.path("go.sh"), b.work, b.path("tree"), "fetch", command)...); err != nil {
		return err
	}
	return run(ctx, b.out, buildEnv(b.path("tmp")), isolated("unshare", "--net", "--ipc", "--uts", "sh", b.path("go.sh"), b.work, b.path("tree"), "build", command)...)
}
