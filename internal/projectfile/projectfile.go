// Package projectfile parses the file .agentlab.yaml of a repository, which the runner
// reads in the guest and the CLI on the host.
package projectfile

import (
	"path"
	"path/filepath"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/bmatcuk/doublestar/v4"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/strictyaml"
)

// Limits of the file.
const (
	Name       = ".agentlab.yaml"
	MaxBytes   = 64 << 10
	MaxOutputs = 100 // patterns
	MaxInputs  = 100 // patterns
	MaxSetup   = 50  // commands

	MaxSetupCommand = 4 << 10 // bytes

	maxPattern  = 512 // bytes
	maxServices = 256 // bytes
)

// File is the content of a project file.
type File struct {
	Image   string   // name of the image for the sandbox; "" means none
	Outputs []string // globs of files to store as artifacts
	Network *Network // narrows the network policy of the sandbox
	Setup   Setup

	Services string // Compose file of the services that the agent needs; "" means none
}

// Setup are the commands that prepare the checkout.
type Setup struct {
	Run    []string `yaml:"run"`    // shell commands
	Inputs []string `yaml:"inputs"` // globs of the files that they read, in addition to those that IsInput knows
}

// Network is the network policy in a project file: rules in the syntax of profiles,
// without presets and list files. The controller adds them as a layer to the
// profile's policy, so that they narrow it and cannot widen it.
type Network struct {
	Mode  string   `yaml:"mode"` // default: allowlist with an allow list, else nat
	Allow []string `yaml:"allow"`
	Deny  []string `yaml:"deny"`
	Ports []string `yaml:"ports"`

	Strict bool `yaml:"strict"` // do not add the job's own needs: the agent's model and the repository's host
}

// document has the keys of the file. S is the type of setup: a list of commands, or a
// mapping.
type document[S any] struct {
	Image   string   `yaml:"image"`
	Outputs []string `yaml:"outputs"`
	Network *Network `yaml:"network"`
	Setup   S        `yaml:"setup"`

	Services string `yaml:"services"`
}

// Parse parses and checks the text of a project file. It is strict: an unknown key is
// an error with its line. Codes: invalid, and limit for too many entries.
func Parse(text []byte) (File, error) {
	if len(text) > MaxBytes {
		return File{}, agentlab.Errorf(agentlab.CodeInvalid, "%d bytes exceed the limit of %d", len(text), MaxBytes)
	}
	doc, err := strictyaml.Parse(text)
	if err != nil {
		return File{}, err
	}
	var f File
	if slices.ContainsFunc(doc.Keys(), func(k strictyaml.Key) bool { return strings.HasPrefix(k.Path, "setup.") }) {
		var d document[Setup]
		err = doc.Decode(&d)
		f = File(d)
	} else {
		var d document[[]string]
		err = doc.Decode(&d)
		f = File{d.Image, d.Outputs, d.Network, Setup{Run: d.Setup}, d.Services}
	}
	if err == nil {
		err = doc.At(f.check())
	}
	if err != nil {
		return File{}, err
	}
	return f, nil
}

func (f File) check() error {
	if f.Image != "" {
		if err := agentlab.ValidateName(f.Image); err != nil {
			return agentlab.Errorf(agentlab.CodeInvalid, "%.60q is not the name of an image", f.Image).WithField("image").
				WithHint("name an image of this machine: agentlab image list")
		}
	}
	if err := CheckOutputs(f.Outputs); err != nil {
		return inField("outputs", err)
	}
	if err := CheckServices(f.Services); err != nil {
		return err
	}
	return f.Setup.check()
}

func (s Setup) check() error {
	if len(s.Run) > MaxSetup {
		return agentlab.Errorf(agentlab.CodeLimit, "%d commands are more than %d", len(s.Run), MaxSetup).WithField("setup")
	}
	for i, c := range s.Run {
		if strings.TrimSpace(c) == "" || len(c) > MaxSetupCommand || !utf8.ValidString(c) || strings.ContainsRune(c, 0) {
			return agentlab.Errorf(agentlab.CodeInvalid, "command %d: %.60q is not a shell command of 1 to %d bytes", i+1, c, MaxSetupCommand).WithField("setup")
		}
	}
	if err := checkPatterns(s.Inputs, MaxInputs); err != nil {
		return inField("setup.inputs", err)
	}
	return nil
}

// inField adds the key at fault to an error.
func inField(key string, err error) error {
	return agentlab.Errorf(agentlab.CodeOf(err), "%w", err).WithField(key).WithHint("%s", agentlab.HintOf(err))
}

// CheckOutputs returns an error unless all patterns name files inside the repository.
// Codes: invalid, and limit for too many.
func CheckOutputs(patterns []string) error { return checkPatterns(patterns, MaxOutputs) }

func checkPatterns(patterns []string, most int) error {
	if len(patterns) > most {
		return agentlab.Errorf(agentlab.CodeLimit, "%d patterns are more than %d", len(patterns), most)
	}
	for _, p := range patterns {
		if p == "" || len(p) > maxPattern || path.IsAbs(p) || strings.ContainsRune(p, 0) || slices.Contains(strings.Split(p, "/"), "..") || !doublestar.ValidatePattern(p) {
			return agentlab.Errorf(agentlab.CodeInvalid, "%.60q is not a pattern of files inside the repository", p).
				WithHint("patterns are relative to the top of the work tree; * matches in a directory, and ** in all below")
		}
	}
	return nil
}

// CheckServices returns an error unless name is that of a file inside the repository, or
// empty. Code: invalid.
func CheckServices(name string) error {
	if name != "" && (len(name) > maxServices || !filepath.IsLocal(name) || !utf8.ValidString(name) || strings.ContainsFunc(name, unicode.IsControl) || strings.HasPrefix(name, "-")) {
		return agentlab.Errorf(agentlab.CodeInvalid, "%.60q is not a file inside the repository", name).WithField("services").
			WithHint("name a Compose file, e.g. services: compose.yaml")
	}
	return nil
}

// defaultInputs are the files that commands under setup usually read: what declares
// dependencies, in any directory, and what describes the environment. A file that is
// missing here, and whose name no command has, must be declared under inputs.
var defaultInputs = []string{
	Name, ".devcontainer.json", ".devcontainer/**", "**/Dockerfile", "**/Containerfile", "**/compose.{yml,yaml}", "**/docker-compose.{yml,yaml}", "**/Makefile",
	"**/package.json", "**/package-lock.json", "**/npm-shrinkwrap.json", "**/yarn.lock", "**/.yarnrc", "**/.yarnrc.yml", "**/pnpm-lock.yaml", "**/pnpm-workspace.yaml", "**/bun.lock", "**/bun.lockb", "**/.npmrc", "**/.nvmrc", "**/.node-version",
	"**/requirements*.txt", "**/constraints*.txt", "**/pyproject.toml", "**/poetry.lock", "**/uv.lock", "**/Pipfile", "**/Pipfile.lock", "**/setup.py", "**/setup.cfg", "**/environment.{yml,yaml}", "**/.python-version",
	"**/go.mod", "**/go.sum", "go.work", "go.work.sum", "**/Cargo.toml", "**/Cargo.lock", "**/rust-toolchain", "**/rust-toolchain.toml",
	"**/Gemfile", "**/Gemfile.lock", "**/*.gemspec", "**/.ruby-version", "**/composer.json", "**/composer.lock",
	"**/pom.xml", "**/build.gradle", "**/build.gradle.kts", "**/settings.gradle", "**/settings.gradle.kts", "**/gradle.lockfile", "**/gradle.properties",
	"**/mix.exs", "**/mix.lock", "**/*.csproj", "**/*.fsproj", "**/packages.lock.json", "**/global.json", "**/Package.swift", "**/Package.resolved",
	"**/flake.nix", "**/flake.lock", "**/.tool-versions", "**/mise.toml", ".gitattributes", ".gitmodules", "**/.gitignore",
}

// IsInput reports whether a file of the repository is an input of the commands: a
// pattern of the well-known ones or of Inputs matches its path, or a command has its name.
func (s Setup) IsInput(name string) bool {
	if slices.ContainsFunc(s.Run, func(c string) bool { return hasName(c, path.Base(name)) }) {
		return true
	}
	for _, list := range [][]string{defaultInputs, s.Inputs} {
		for _, p := range list {
			if ok, err := doublestar.Match(path.Clean(p), name); err == nil && ok {
				return true
			}
		}
	}
	return false
}

// hasName reports whether a word of a shell command ends with the name of a file, in any
// directory: the command may change its own.
func hasName(command, name string) bool {
	apart := func(r rune) bool { return unicode.IsSpace(r) || strings.ContainsRune("\"'`()[]{};&|<>=,:$", r) }
	return slices.ContainsFunc(strings.FieldsFunc(command, apart), func(word string) bool { return path.Base(word) == name })
}
