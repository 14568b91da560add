package image

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// npmArch maps Debian's names of architectures to npm's.
var npmArch = map[string]string{"amd64": "x64", "arm64": "arm64"}

func (r *Recipe) usesNPM() bool { return r.Agents.Node != "" || len(r.npm()) > 0 }

// npm returns all npm packages but Node.js.
func (r *Recipe) npm() []NPMPackage { return slices.Concat(r.Agents.Packages, r.NPM) }

// commands returns the commands that are run with --version in the finished
// image.
func (r *Recipe) commands() []string {
	var out []string
	if r.Agents.Node != "" {
		out = append(out, "node")
	}
	for _, p := range r.npm() {
		out = append(out, p.Command)
	}
	for _, p := range r.Pip {
		out = append(out, p.Command)
	}
	for _, p := range r.Go.Programs {
		out = append(out, p.Command)
	}
	return slices.DeleteFunc(out, func(c string) bool { return c == "" })
}

// pipSpecs are the Python packages as pip takes them.
func (r *Recipe) pipSpecs() []string {
	var out []string
	for _, p := range r.Pip {
		out = append(out, p.Package+"=="+p.Version)
	}
	return out
}

// nodePackage returns the package with Node.js itself; the package "node"
// would select it in an install script.
func (r *Recipe) nodePackage() string { return "node-linux-" + npmArch[r.Arch] }

// npmSpecs returns the packages in npm's syntax.
func (r *Recipe) npmSpecs() []string {
	var out []string
	if r.Agents.Node != "" {
		out = append(out, r.nodePackage()+"@"+r.Agents.Node)
	}
	for _, p := range r.npm() {
		out = append(out, p.Package+"@"+p.Version)
	}
	return out
}

// scripted returns the npm packages whose install scripts run.
func (r *Recipe) scripted() []string {
	var out []string
	for _, a := range r.Agents.Packages {
		out = append(out, a.Package)
	}
	return out
}

// npmInstall installs the npm packages below work/npm with the host's npm,
// its registry, proxy and credentials; none of their code runs here, and npm
// runs no git for dependencies. Install scripts run later in the image, without
// a network or privileges (finish.sh).
func (b *builder) npmInstall(ctx context.Context) error {
	specs := b.recipe.npmSpecs()
	b.out.step("installing %s from npm", strings.Join(specs, ", "))
	prefix := b.path("npm")
	argv := append([]string{lookPath("npm"), "install", "--global", "--prefix", prefix, "--ignore-scripts", "--git=/bin/false",
		"--no-audit", "--no-fund", "--no-update-notifier", "--no-progress", "--loglevel=warn",
		"--os=linux", "--cpu=" + npmArch[b.recipe.Arch], "--libc=glibc"}, specs...)
	if err := run(ctx, b.out, npmEnv(b.path("tmp")), argv...); err != nil {
		return err
	}
	return writeFile(b.path("npm.list"), strings.Join(b.npmList(), "\n")+"\n", 0o644)
}

// npmEnv returns the environment of the host's npm: npm is the user's own, with
// the user's own configuration.
func npmEnv(tmp string) []string {
	env := buildEnv(tmp)
	for _, kv := range os.Environ() {
		name, _, _ := strings.Cut(kv, "=")
		upper := strings.ToUpper(name)
		if name == "HOME" || strings.HasPrefix(upper, "NPM_") || strings.HasPrefix(upper, "NODE_") || strings.HasPrefix(name, "SSL_CERT_") {
			env = append(env, kv) // the last value of a name counts
		}
	}
	return env
}

// npmRegistry returns the registry that the environment names.
func npmRegistry() (out []string) {
	for _, kv := range os.Environ() {
		if name, value, _ := strings.Cut(kv, "="); strings.EqualFold(name, "npm_config_registry") {
			out = append(out, value)
		}
	}
	return out
}

// npmList returns name@version of all that npm installed, by the packages'
// own manifests.
func (b *builder) npmList() []string {
	var out []string
	root := b.path("npm", "lib", "node_modules")
	// If a file cannot be read, the copy to the tree fails later.
	_ = filepath.WalkDir(root, func(path string, d os.DirEntry, err error) error {
		if err != nil || d.Name() != "package.json" {
			return nil //nolint:nilerr // see above
		}
		dir := filepath.Dir(path)
		parent := filepath.Dir(dir)
		if filepath.Base(parent) != "node_modules" && !strings.HasPrefix(filepath.Base(parent), "@") {
			return nil
		}
		if name, version := packageManifest(path); name != "" {
			out = append(out, name+"@"+version)
		}
		return nil
	})
	return out
}

// hostVersion returns the first line of a tool's output about its version.
func hostVersion(ctx context.Context, name string, args ...string) string {
	out, err := exec.CommandContext(ctx, lookPath(name), args...).CombinedOutput()
	if err != nil {
		return "unknown"
	}
	return strings.TrimPrefix(firstLine(out), name+" ")
}
