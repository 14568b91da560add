package image

import (
	"io/fs"
	"net/url"
	"regexp"
	"runtime"
	"slices"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/images"
	"github.com/agentlab-vm/agentlab/internal/strictyaml"
)

// MirrorHost as a recipe's mirror means the apt sources of the machine that
// builds, when it runs the recipe's suite, and the distribution's public
// mirror otherwise.
const MirrorHost = "host"

// Bounds of Recipe.SizeGB.
const (
	MinSizeGB = 2
	MaxSizeGB = 2048
)

// Recipe says how to make an image. Decoding is strict: an unknown key is an
// error.
type Recipe struct {
	// Name of the image, a DNS label.
	Name string `yaml:"name" json:"name"`
	// Extends names a shipped recipe whose values stand where this one says
	// nothing; its packages and agents are added to.
	Extends string `yaml:"extends" json:"-"`
	// Suite is the code name of a Debian or Ubuntu release.
	Suite string `yaml:"suite" json:"suite"`
	// Mirror is an http or https URL, or MirrorHost, the default.
	Mirror string `yaml:"mirror" json:"mirror"`
	// Components of the archive; default: the distribution's free ones.
	Components []string `yaml:"components" json:"components"`
	// Arch is a Debian architecture; default and only choice: the host's.
	Arch string `yaml:"arch" json:"arch"`
	// Kernel is the package whose kernel is booted; default: the
	// distribution's for virtual machines.
	Kernel string `yaml:"kernel" json:"kernel"`
	// Packages to install from the distribution.
	Packages []string `yaml:"packages" json:"packages"`
	// Agents to install from npm.
	Agents Agents `yaml:"agents" json:"agents"`
	// SizeGB is the virtual size of the root disk in GiB; default 20. The
	// file on the host is sparse.
	SizeGB int `yaml:"size_gb" json:"size_gb"`
}

// Agents is what an image gets from npm, installed globally.
type Agents struct {
	// Node is the exact version of Node.js, from npm too; "": none, for
	// agents that are native programs or run on the distribution's.
	Node string `yaml:"node" json:"node,omitempty"`
	// Packages from npm.
	Packages []Agent `yaml:"packages" json:"packages,omitempty"`
}

// Agent is one npm package.
type Agent struct {
	// Package is its name in the registry.
	Package string `yaml:"package" json:"package"`
	// Version is an exact version, no range and no tag.
	Version string `yaml:"version" json:"version"`
	// Command, when given, is run with --version inside the image; a build
	// whose commands fail is no image.
	Command string `yaml:"command" json:"command,omitempty"`
}

var (
	componentRE  = regexp.MustCompile(`^[a-z][a-z0-9./-]*$`)
	packageRE    = regexp.MustCompile(`^[a-z0-9][a-z0-9+.-]+$`)
	npmPackageRE = regexp.MustCompile(`^(@[a-z0-9][a-z0-9._~-]*/)?[a-z0-9][a-z0-9._~-]*$`)
	versionRE    = regexp.MustCompile(`^[0-9]+\.[0-9]+\.[0-9]+(-[0-9A-Za-z.-]+)?$`)
	commandRE    = regexp.MustCompile(`^[a-z0-9][a-z0-9._-]*$`)
)

// ParseRecipe decodes, completes and checks the text of a recipe. Errors have
// code invalid or unsupported and name the key.
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
	files, _ := fs.Glob(images.Recipes, "*.yaml") // the pattern is good
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
	if r.Agents.Node == "" {
		r.Agents.Node = base.Agents.Node
	}
	r.Packages = append(slices.Clone(base.Packages), r.Packages...)
	r.Agents.Packages = append(slices.Clone(base.Agents.Packages), r.Agents.Packages...)
}

// complete fills in what the recipe leaves to us, so that two recipes that
// mean the same hash the same.
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
	r.Packages = append(slices.Clone(r.Packages), essential...)
	slices.Sort(r.Packages)
	r.Packages = slices.Compact(r.Packages)
}

func (r *Recipe) validate() error {
	if r.Name == "" {
		return invalid("name", "a recipe needs a name")
	}
	if err := agentlab.ValidateName(r.Name); err != nil {
		return err
	}
	if suites[r.Suite] == nil {
		return invalid("suite", "%q is not a suite that images can be made of", r.Suite).WithHint("choose one of %s", suiteNames())
	}
	if err := validateMirror(r.Mirror); err != nil {
		return err
	}
	if len(r.Components) == 0 {
		return invalid("components", "at least one component is needed")
	}
	if err := all("components", r.Components, componentRE, "a component of the archive"); err != nil {
		return err
	}
	if r.Arch != runtime.GOARCH {
		return agentlab.Errorf(agentlab.CodeUnsupported, "an image for %s cannot be built on %s", r.Arch, runtime.GOARCH).WithField("arch").
			WithHint("leave arch out, or build on a machine of that architecture")
	}
	if !packageRE.MatchString(r.Kernel) {
		return invalid("kernel", "%q is not a package name", r.Kernel)
	}
	if err := all("packages", r.Packages, packageRE, "a package name"); err != nil {
		return err
	}
	if r.SizeGB < MinSizeGB || r.SizeGB > MaxSizeGB {
		return invalid("size_gb", "%d is out of range; %d to %d GiB are possible", r.SizeGB, MinSizeGB, MaxSizeGB)
	}
	return r.Agents.validate()
}

func (a Agents) validate() error {
	if a.Node != "" && !versionRE.MatchString(a.Node) {
		return invalid("agents.node", "%q is not an exact version", a.Node).WithHint("write it as in 24.21.0")
	}
	seen := map[string]bool{}
	for _, p := range a.Packages {
		switch {
		case !npmPackageRE.MatchString(p.Package) || len(p.Package) > 214:
			return invalid("agents.packages", "%q is not the name of an npm package", p.Package)
		case !versionRE.MatchString(p.Version):
			return invalid("agents.packages", "%q is not an exact version of %s", p.Version, p.Package).WithHint("write it as in 1.2.3")
		case p.Command != "" && !commandRE.MatchString(p.Command):
			return invalid("agents.packages", "%q is not the name of a command", p.Command)
		case seen[p.Package]:
			return invalid("agents.packages", "%s is listed twice", p.Package)
		}
		seen[p.Package] = true
	}
	return nil
}

func validateMirror(mirror string) error {
	if mirror == MirrorHost {
		return nil
	}
	u, err := url.Parse(mirror)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.RawQuery != "" || u.Fragment != "" ||
		strings.ContainsAny(mirror, " \t[]") {
		return invalid("mirror", "the mirror is not an http or https URL").WithHint("write a URL as in http://deb.debian.org/debian, or host")
	}
	if u.User != nil {
		return invalid("mirror", "the mirror's URL holds credentials, which would end up in the image").
			WithHint("put them into /etc/apt/auth.conf.d and use the URL without")
	}
	return nil
}

func all(field string, values []string, re *regexp.Regexp, what string) error {
	for _, v := range values {
		if !re.MatchString(v) {
			return invalid(field, "%q is not %s", v, what)
		}
	}
	return nil
}

func invalid(field, format string, args ...any) *agentlab.Error {
	return agentlab.Errorf(agentlab.CodeInvalid, format, args...).WithField(field)
}

// distribution returns the family of the recipe's suite, which validate has
// checked.
func (r *Recipe) distribution() *distribution { return suites[r.Suite] }

// Key identifies the image that the recipe and this builder make for the qemu
// backend.
func (r *Recipe) Key() string { return r.StageKey(Direct) }
