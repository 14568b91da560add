package image

import (
	"net/url"
	"path"
	"runtime"
	"slices"
	"strings"

	"golang.org/x/mod/module"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/lazyre"
)

// Bounds of the lists of a recipe and of their items.
const (
	maxRepositories = 32
	maxKeyBytes     = 64 << 10
	maxFiles        = 64
	maxSteps        = 32
	maxPrograms     = 32
	maxStepBytes    = 64 << 10
)

var (
	componentRE  = lazyre.New(`^[a-z][a-z0-9./-]*$`)
	packageRE    = lazyre.New(`^[a-z0-9][a-z0-9+.-]+$`)
	npmPackageRE = lazyre.New(`^(@[a-z0-9][a-z0-9._~-]*/)?[a-z0-9][a-z0-9._~-]*$`)
	versionRE    = lazyre.New(`^[0-9]+\.[0-9]+\.[0-9]+(-[0-9A-Za-z.-]+)?$`)
	pipPackageRE = lazyre.New(`^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$`)
	pipVersionRE = lazyre.New(`^[0-9][0-9A-Za-z.!+]*$`)
	aptSuiteRE   = lazyre.New(`^([A-Za-z0-9][A-Za-z0-9./_-]*|\./|/)$`)
	keyRE        = lazyre.New(`^-----BEGIN PGP PUBLIC KEY BLOCK-----\n(?:[A-Za-z]+: [ -~]*\n)*\n(?:[A-Za-z0-9+/=]+\n)+-----END PGP PUBLIC KEY BLOCK-----\n$`)
	pathRE       = lazyre.New(`^(/[A-Za-z0-9@+_.-]+)+$`)
	sha256RE     = lazyre.New(`^[0-9a-f]{64}$`)
	modeRE       = lazyre.New(`^0?[0-7]{3}$`)
	goVersionRE  = lazyre.New(`^[0-9]+\.[0-9]+\.[0-9]+$`)
	goPackageRE  = lazyre.New(`^[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)*$`)
	goVariableRE = lazyre.New(`^[A-Za-z0-9._~/-]+\.[A-Za-z_][A-Za-z0-9_]*$`)
	goValueRE    = lazyre.New(`^[A-Za-z0-9._:/+-]*$`)
	commandRE    = lazyre.New(`^[a-z0-9][a-z0-9._-]*$`)
)

func (r *Recipe) validate() error {
	if r.Name == "" {
		return invalid("name", "a recipe needs a name")
	}
	if err := agentlab.ValidateName(r.Name); err != nil {
		return err
	}
	if suites[r.Suite] == nil {
		return invalid("suite", "%q is not a suite that images can be built from", r.Suite).WithHint("choose one of %s", suiteNames())
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
			WithHint("remove arch, or build on a machine of that architecture")
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
	if a := r.Agents.Node; a != "" && !versionRE.MatchString(a) {
		return invalid("agents.node", "%q is not an exact version", a).WithHint("write it as in 24.21.0")
	}
	for _, err := range []error{checkNPM("agents.packages", r.Agents.Packages), checkNPM("npm", r.NPM), unique("npm", r.npm(), func(p NPMPackage) string { return p.Package }),
		checkPip(r.Pip), r.checkGo(), r.checkShell(), r.checkApt(), checkFiles(r.Files), checkRun(r.Run)} {
		if err != nil {
			return err
		}
	}
	return nil
}

func checkNPM(field string, packages []NPMPackage) error {
	for _, p := range packages {
		switch {
		case !npmPackageRE.MatchString(p.Package) || len(p.Package) > 214:
			return invalid(field, "%q is not the name of an npm package", p.Package)
		case !versionRE.MatchString(p.Version):
			return invalid(field, "%q is not an exact version of %s", p.Version, p.Package).WithHint("write it as in 1.2.3")
		case p.Command != "" && !commandRE.MatchString(p.Command):
			return invalid(field, "%q is not the name of a command", p.Command)
		}
	}
	return nil
}

func checkPip(packages []PipPackage) error {
	for _, p := range packages {
		switch {
		case !pipPackageRE.MatchString(p.Package) || len(p.Package) > 214:
			return invalid("pip", "%q is not the name of a Python package", p.Package)
		case !pipVersionRE.MatchString(p.Version):
			return invalid("pip", "%q is not an exact version of %s", p.Version, p.Package).WithHint("write it as in 1.2.3")
		case p.Command != "" && !commandRE.MatchString(p.Command):
			return invalid("pip", "%q is not the name of a command", p.Command)
		}
	}
	return unique("pip", packages, func(p PipPackage) string { return strings.ToLower(p.Package) })
}

func (r *Recipe) checkGo() error {
	g := r.Go
	switch {
	case g.Toolchain != "" && !goVersionRE.MatchString(g.Toolchain):
		return invalid("go.toolchain", "%q is not an exact version", g.Toolchain).WithHint("write it as in 1.26.0")
	case g.Toolchain == "" && len(g.Programs) > 0:
		return invalid("go.toolchain", "programs in Go need a version of Go").WithHint("set go.toolchain")
	case len(g.Programs) > maxPrograms:
		return invalid("go.programs", "%d programs are listed; at most %d are possible", len(g.Programs), maxPrograms)
	}
	for _, p := range g.Programs {
		switch {
		case module.Check(p.Module, "v"+p.Version) != nil || !versionRE.MatchString(p.Version):
			return invalid("go.programs", "%q is not an exact version of a module %q", p.Version, p.Module).
				WithHint("write it as in 1.2.3; from version 2 on, the path of a module ends in /v2 and so on")
		case p.Package != "" && !goPackageRE.MatchString(p.Package):
			return invalid("go.programs", "%q is not a directory of a module", p.Package)
		case !commandRE.MatchString(p.Command):
			return invalid("go.programs", "%q is not the name of a command", p.Command)
		}
		for name, value := range p.Set {
			if !goVariableRE.MatchString(name) || !goValueRE.MatchString(value) {
				return invalid("go.programs", "%s=%s of %s is not a variable with a value of letters, digits and ._:/+-", name, value, p.Command)
			}
		}
	}
	return unique("go.programs", g.Programs, func(p GoProgram) string { return p.Command })
}

func (r *Recipe) checkShell() error {
	if r.Shell != "" && (!pathRE.MatchString(r.Shell) || path.Clean(r.Shell) != r.Shell) {
		return invalid("shell", "%q is not an absolute path of letters, digits and @+_.-", r.Shell)
	}
	return nil
}

func (r *Recipe) checkApt() error {
	if len(r.Apt) > maxRepositories {
		return invalid("apt", "%d repositories are listed; at most %d are possible", len(r.Apt), maxRepositories)
	}
	for _, a := range r.Apt {
		src := a.source(r.Suite)
		switch {
		case agentlab.ValidateName(a.Name) != nil || a.Name == debian.name || a.Name == ubuntu.name:
			return invalid("apt", "%q cannot be the name of a repository", a.Name).WithHint("use lower-case letters, digits and hyphens, but neither debian nor ubuntu")
		case src.uri == MirrorHost || validateMirror(src.uri) != nil:
			return invalid("apt", "the URL of %s is not an http or https URL without credentials", a.Name)
		case !aptSuiteRE.MatchString(src.suite):
			return invalid("apt", "%q is not a suite of %s", src.suite, a.Name)
		case strings.HasSuffix(src.suite, "/") != (len(a.Components) == 0):
			return invalid("apt", "%s needs either components or a suite that ends in /", a.Name)
		case len(a.Key) > maxKeyBytes || !keyRE.MatchString(a.Key):
			return invalid("apt", "%s needs the ASCII-armoured public key that signs it, of at most %d KiB", a.Name, maxKeyBytes>>10).
				WithHint("write the key as a block of text; 'gpg --armor --export KEY' prints it")
		}
		if err := all("apt", a.Components, componentRE, "a component of the archive"); err != nil {
			return err
		}
	}
	return unique("apt", r.Apt, func(a Repository) string { return a.Name })
}

// notBelow are directories whose files are not part of an image, or decide
// what a sandbox is.
var notBelow = []string{"/proc/", "/sys/", "/dev/", "/run/", "/tmp/", "/etc/agentlab/", "/etc/sudoers.d/"}

func checkFiles(files []File) error {
	if len(files) > maxFiles {
		return invalid("files", "%d files are listed; at most %d are possible", len(files), maxFiles)
	}
	for _, f := range files {
		below := func(dir string) bool { return strings.HasPrefix(f.Path, dir) }
		switch {
		case !pathRE.MatchString(f.Path) || path.Clean(f.Path) != f.Path || len(f.Path) > 1024:
			return invalid("files", "%q is not an absolute path of letters, digits and @+_.-", f.Path)
		case slices.ContainsFunc(notBelow, below):
			return invalid("files", "%s is in a directory that recipes cannot write to", f.Path)
		case (f.Content == "") == (f.URL == ""):
			return invalid("files", "%s needs either content or url", f.Path)
		case f.URL != "" && !validURL(f.URL):
			return invalid("files", "the URL of %s is not an http or https URL without credentials", f.Path)
		case (f.URL != "") != (f.SHA256 != "") || f.SHA256 != "" && !sha256RE.MatchString(f.SHA256):
			return invalid("files", "%s needs url together with the 64 hexadecimal digits of its sha256", f.Path)
		case !modeRE.MatchString(f.Mode):
			return invalid("files", "%q is not a mode of %s", f.Mode, f.Path).WithHint("write it as in 0755; setuid, setgid and sticky are not possible")
		case f.Owner != "root" && f.Owner != "agent":
			return invalid("files", "%q cannot own %s; root and agent can", f.Owner, f.Path)
		case f.Owner == "agent" && !below("/home/agent/") && !below("/work/"):
			return invalid("files", "%s cannot be owned by agent; that is possible below /home/agent and /work", f.Path)
		}
	}
	return unique("files", files, func(f File) string { return f.Path })
}

func checkRun(steps []string) error {
	if len(steps) > maxSteps {
		return invalid("run", "%d steps are listed; at most %d are possible", len(steps), maxSteps)
	}
	for i, s := range steps {
		if strings.TrimSpace(s) == "" || strings.ContainsRune(s, 0) || len(s) > maxStepBytes {
			return invalid("run", "step %d is empty, contains a zero byte or has more than %d KiB", i+1, maxStepBytes>>10)
		}
	}
	return nil
}

// unique fails if two items have the same name.
func unique[T any](field string, items []T, name func(T) string) error {
	seen := map[string]bool{}
	for _, i := range items {
		if n := name(i); seen[n] {
			return invalid(field, "%s is listed twice", n)
		}
		seen[name(i)] = true
	}
	return nil
}

// validURL reports whether text is an http or https URL without credentials.
func validURL(text string) bool {
	u, err := url.Parse(text)
	return err == nil && (u.Scheme == "http" || u.Scheme == "https") && u.Host != "" && u.User == nil
}

func validateMirror(mirror string) error {
	if mirror == MirrorHost {
		return nil
	}
	u, err := url.Parse(mirror)
	switch {
	case err == nil && u.User != nil:
		return invalid("mirror", "the mirror's URL contains credentials, which would become part of the image").
			WithHint("put them into /etc/apt/auth.conf.d and use the URL without")
	case !validURL(mirror) || u.RawQuery != "" || u.Fragment != "" || strings.ContainsAny(mirror, " \t[]"):
		return invalid("mirror", "the mirror is not an http or https URL").WithHint("write a URL as in http://deb.debian.org/debian, or host")
	}
	return nil
}

func all(field string, values []string, re *lazyre.Regexp, what string) error {
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
