package image

import (
	"cmp"
	"io/fs"
	"runtime"
	"slices"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/images"
	"github.com/agentlab-vm/agentlab/internal/strictyaml"
)

// MirrorHost as a recipe's mirror means the apt sources of the building
// machine if it runs the recipe's suite, otherwise the distribution's public
// mirror.
const MirrorHost = "host"

// Bounds of Recipe.SizeGB.
const (
	MinSizeGB = 2
	MaxSizeGB = 2048
)

// Recipe describes an image. Decoding is strict: an unknown key is an error.
// docs/images.md is generated from the doc tags.
type Recipe struct {
	Name       string       `yaml:"name" json:"name" doc:"Required. Name of the image: lower-case letters, digits and hyphens."`
	Extends    string       `yaml:"extends" json:"-" doc:"A shipped recipe: base, agents or dev. Keys that are missing here have its values; its lists come before the lists here."`
	Suite      string       `yaml:"suite" json:"suite" doc:"Required without extends. Code name of a Debian or Ubuntu release: bookworm, trixie or noble. A template has the release of its cloud image."`
	Mirror     string       `yaml:"mirror" json:"mirror" doc:"URL of the distribution's mirror. The default, host, means the apt sources of the build host if it runs the same suite, and the public mirror otherwise."`
	Components []string     `yaml:"components" json:"components" doc:"Components of the distribution's archive. Default: the free ones."`
	Arch       string       `yaml:"arch" json:"arch" doc:"Architecture. Default, and only valid value: the architecture of the build host."`
	Kernel     string       `yaml:"kernel" json:"kernel" doc:"Package of the kernel. Default: the distribution's kernel for virtual machines. Templates keep the kernel of the cloud image."`
	Packages   []string     `yaml:"packages" json:"packages" doc:"Packages to install from the distribution and from the repositories in apt."`
	Apt        []Repository `yaml:"apt" json:"apt,omitempty" doc:"More apt repositories, at most 32."`
	Agents     Agents       `yaml:"agents" json:"agents" doc:"Coding agents from npm. Their own install scripts run, as the user agent and without network."`
	NPM        []NPMPackage `yaml:"npm" json:"npm,omitempty" doc:"More npm packages, installed globally. Their install scripts do not run. Packages that are not native programs need Node.js: set agents.node, or add nodejs to packages."`
	Pip        []PipPackage `yaml:"pip" json:"pip,omitempty" doc:"Python packages, installed as wheels into a virtual environment of their own, /usr/local/lib/agentlab-python."`
	Go         Go           `yaml:"go" json:"go" doc:"Go, and programs in Go. The checksum database sum.golang.org verifies all downloads."`
	Shell      string       `yaml:"shell" json:"shell,omitempty" doc:"Login shell of the user agent, an absolute path. Default: /bin/bash."`
	Files      []File       `yaml:"files" json:"files,omitempty" doc:"Files to write, at most 64."`
	Run        []string     `yaml:"run" json:"run,omitempty" doc:"Shell commands, at most 32 of at most 64 KiB, in this order and last. Each runs in its own sh -eu as the user agent, without network, for at most 10 minutes. They can write to /home/agent, /work and /usr/local."`
	SizeGB     int          `yaml:"size_gb" json:"size_gb" doc:"Virtual size of the root disk in GiB, 2 to 2048; default 20. The file on the host is sparse. Templates have the size that the script gets."`

	parent *Recipe // the recipe that this one extends
}

// Agents is what an image gets from npm, installed globally.
type Agents struct {
	Node     string       `yaml:"node" json:"node,omitempty" doc:"Exact version of Node.js, from npm. Default: none, for agents that are native programs or use the distribution's."`
	Packages []NPMPackage `yaml:"packages" json:"packages,omitempty" doc:"The agents."`
}

// NPMPackage is one npm package.
type NPMPackage struct {
	Package string `yaml:"package" json:"package" doc:"Name in the registry."`
	Version string `yaml:"version" json:"version" doc:"Exact version; ranges and tags are not valid."`
	Command string `yaml:"command" json:"command,omitempty" doc:"A command of the package. The build fails unless it exits 0 with the argument --version."`
}

// PipPackage is one Python package.
type PipPackage struct {
	Package string `yaml:"package" json:"package" doc:"Name in the index."`
	Version string `yaml:"version" json:"version" doc:"Exact version."`
	Command string `yaml:"command" json:"command,omitempty" doc:"A command of the package, which is linked into /usr/local/bin. The build fails unless it exits 0 with the argument --version."`
}

// Go is what an image gets from the Go module proxy.
type Go struct {
	Toolchain string      `yaml:"toolchain" json:"toolchain,omitempty" doc:"Exact version of Go, for /usr/local/go. Required if programs are listed."`
	Programs  []GoProgram `yaml:"programs" json:"programs,omitempty" doc:"Programs to build without cgo, at most 32. Their code runs first with --version."`
}

// GoProgram is one main package of a Go module.
type GoProgram struct {
	Module  string            `yaml:"module" json:"module" doc:"Path of the module."`
	Version string            `yaml:"version" json:"version" doc:"Exact version, without the v."`
	Package string            `yaml:"package" json:"package,omitempty" doc:"Directory of the main package in the module. Default: the module's root."`
	Command string            `yaml:"command" json:"command" doc:"Name of the program in /usr/local/bin. The build fails unless it exits 0 with the argument --version."`
	Set     map[string]string `yaml:"set" json:"set,omitempty" doc:"String variables to set, as with -ldflags -X: IMPORTPATH.NAME and the value."`
}

// Repository is an apt repository.
type Repository struct {
	Name       string   `yaml:"name" json:"name" doc:"Name of its files in /etc/apt: sources.list.d/NAME.sources and keyrings/NAME.asc."`
	URL        string   `yaml:"url" json:"url" doc:"http or https URL without credentials. {distribution} is replaced with debian or ubuntu."`
	Suite      string   `yaml:"suite" json:"suite" doc:"Suite, or a path that ends in / for a repository without suites. Default: {suite}, which is replaced with the code name of the system."`
	Components []string `yaml:"components" json:"components,omitempty" doc:"Components. Required, except with a suite that ends in /."`
	Key        string   `yaml:"key" json:"key" doc:"The ASCII-armoured OpenPGP public key that signs the repository, at most 64 KiB. It is accepted for this repository only."`
}

// File is one file of an image.
type File struct {
	Path    string `yaml:"path" json:"path" doc:"Absolute path. Not below /proc, /sys, /dev, /run, /tmp, /etc/agentlab and /etc/sudoers.d."`
	Content string `yaml:"content" json:"content,omitempty" doc:"The text of the file. A file needs either content or url."`
	URL     string `yaml:"url" json:"url,omitempty" doc:"http or https URL without credentials to download the file from, at most 2 GiB."`
	SHA256  string `yaml:"sha256" json:"sha256,omitempty" doc:"SHA-256 of the download. Required with url."`
	Mode    string `yaml:"mode" json:"mode,omitempty" doc:"Permissions in octal; default 0644. No setuid, setgid and sticky bit."`
	Owner   string `yaml:"owner" json:"owner,omitempty" doc:"root, the default, or agent. Files of agent must be below /home/agent or /work."`
}

// ParseRecipe decodes, completes and checks the text of a recipe. Errors have
// code invalid or unsupported, and the key.
func ParseRecipe(text []byte) (*Recipe, error) {
	r, err := decodeRecipe(text)
	if err != nil {
		return nil, err
	}
	if r.Extends != "" {
		base, err := Shipped(r.Extends)
		if err != nil {
			return nil, agentlab.Errorf(agentlab.CodeInvalid, "no shipped recipe is named %q", r.Extends).
				WithField("extends").WithHint("the shipped ones are %s", strings.Join(ShippedNames(), ", "))
		}
		r.inherit(base)
	}
	r.complete()
	if err := r.validate(); err != nil {
		return nil, err
	}
	return r, nil
}

func decodeRecipe(text []byte) (*Recipe, error) {
	var r Recipe
	doc, err := strictyaml.Parse(text)
	if err == nil {
		err = doc.Decode(&r)
	}
	if err != nil {
		return nil, err
	}
	return &r, nil
}

// Shipped returns a recipe that is part of this program.
func Shipped(name string) (*Recipe, error) {
	text, err := images.Recipes.ReadFile(name + ".yaml")
	if err != nil {
		return nil, agentlab.Errorf(agentlab.CodeNotFound, "there is no image and no recipe named %q", name).
			WithField("image").WithHint("shipped recipes: %s", strings.Join(ShippedNames(), ", "))
	}
	return ParseRecipe(text)
}

// ShippedNames returns the names of the recipes that are part of this
// program, sorted.
func ShippedNames() []string {
	files, _ := fs.Glob(images.Recipes, "*.yaml") // the pattern is valid
	names := make([]string, 0, len(files))
	for _, f := range files {
		names = append(names, strings.TrimSuffix(f, ".yaml"))
	}
	return names
}

func (r *Recipe) inherit(base *Recipe) {
	if r.Suite == "" {
		r.Suite = base.Suite
	}
	sameSuite := r.Suite == base.Suite
	if r.Mirror == "" && sameSuite {
		r.Mirror = base.Mirror
	}
	if r.Components == nil && sameSuite {
		r.Components = base.Components
	}
	if r.Kernel == "" && sameSuite {
		r.Kernel = base.Kernel
	}
	if r.Arch == "" {
		r.Arch = base.Arch
	}
	if r.SizeGB == 0 {
		r.SizeGB = base.SizeGB
	}
	r.Agents.Node = cmp.Or(r.Agents.Node, base.Agents.Node)
	r.Go.Toolchain, r.Shell = cmp.Or(r.Go.Toolchain, base.Go.Toolchain), cmp.Or(r.Shell, base.Shell)
	r.Packages = slices.Concat(base.Packages, r.Packages)
	r.Agents.Packages = slices.Concat(base.Agents.Packages, r.Agents.Packages)
	r.parent, r.Go.Programs = base, slices.Concat(base.Go.Programs, r.Go.Programs)
	r.NPM, r.Pip = slices.Concat(base.NPM, r.NPM), slices.Concat(base.Pip, r.Pip)
	r.Apt, r.Files, r.Run = slices.Concat(base.Apt, r.Apt), slices.Concat(base.Files, r.Files), slices.Concat(base.Run, r.Run)
}

// complete fills in defaults, so that two recipes with the same meaning have the
// same hash.
func (r *Recipe) complete() {
	if r.Mirror == "" {
		r.Mirror = MirrorHost
	}
	r.Mirror = strings.TrimSuffix(r.Mirror, "/")
	if r.Arch == "" {
		r.Arch = runtime.GOARCH // Go's and Debian's names agree for amd64 and arm64
	}
	if r.SizeGB == 0 {
		r.SizeGB = 20
	}
	if d := suites[r.Suite]; d != nil {
		if r.Components == nil {
			r.Components = d.components
		}
		if r.Kernel == "" {
			r.Kernel = d.kernels[r.Arch]
		}
	}
	for i := range r.Apt {
		r.Apt[i].Suite = cmp.Or(r.Apt[i].Suite, "{suite}")
		r.Apt[i].Key = strings.TrimSpace(r.Apt[i].Key) + "\n"
	}
	for i := range r.Files {
		r.Files[i].Mode, r.Files[i].Owner = cmp.Or(r.Files[i].Mode, "0644"), cmp.Or(r.Files[i].Owner, "root")
	}
	if len(r.Pip) > 0 {
		r.Packages = slices.Concat(r.Packages, []string{"python3-pip", "python3-venv"})
	}
	r.Packages = slices.Concat(r.Packages, essential)
	slices.Sort(r.Packages)
	r.Packages = slices.Compact(r.Packages)
}

// distribution returns the family of the recipe's suite, which validate has
// checked.
func (r *Recipe) distribution() *distribution { return suites[r.Suite] }

// Key returns an ID of the image that this builder builds from the recipe for
// the qemu backend.
func (r *Recipe) Key() string { return r.StageKey(Direct) }
