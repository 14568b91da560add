package image

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/agentlab-vm/agentlab/images"
)

// builderVersion must change whenever this code would build a different image
// from the same recipe. Changes of the embedded files and scripts are detected
// automatically.
const builderVersion = "1"

// Kind is the way an image boots.
type Kind string

const (
	// Direct images are started by a hypervisor with a kernel and an initrd,
	// which contains agent-runner.
	Direct Kind = "direct"
	// Cloud images boot by themselves and get their identity from cloud-init:
	// templates, built from the cloud image of a distribution.
	Cloud Kind = "cloud"
)

// cloudPackages are in every template: most cloud images have them, but not
// every image has all.
var cloudPackages = []string{"cloud-guest-utils", "cloud-init", "qemu-guest-agent"}

// sharedFiles are those of images.Files that cloud images get too.
var sharedFiles = []string{"files/etc/direnv", "files/etc/profile.d", "files/etc/ssh", "files/etc/sudoers.d", "files/etc/systemd/journald.conf.d", "files/etc/tmpfiles.d"}

// StageOptions are the parameters of Recipe.Stage.
type StageOptions struct {
	Kind Kind
	// Suite is the code name of the system of a cloud image; "" means the
	// recipe's.
	Suite string
	// Runner is the path of the program agent-runner for a cloud image; ""
	// omits it.
	Runner string
	// Downloads is a directory of earlier downloads, which is made when it is
	// missing; "" means none.
	Downloads string
}

// StageKey returns an ID of what Stage writes, except the runner: two recipes
// with the same key result in the same image, except newer versions of
// unpinned packages.
func (r *Recipe) StageKey(kind Kind) string {
	h := sha256.New()
	text, _ := json.Marshal(r) // strings, numbers and lists always marshal
	h.Write(text)
	switch kind {
	case Cloud:
		_, _ = fmt.Fprint(h, cloudPackages, sharedFiles, embeddedKey(images.Cloud))
	case Direct: // builderVersion would also make the layers again
		_, _ = fmt.Fprint(h, "reserved blocks: "+reservedPercent)
	}
	_, _ = fmt.Fprint(h, embeddedKey(images.Files, images.Scripts))
	return hex.EncodeToString(h.Sum(nil))[:32]
}

// embeddedKey returns an ID of the contents of embedded trees and the builder.
func embeddedKey(trees ...fs.FS) string {
	h := sha256.New()
	h.Write([]byte(builderVersion))
	for _, tree := range trees {
		// Walking an embedded tree cannot fail.
		_ = fs.WalkDir(tree, ".", func(path string, d fs.DirEntry, err error) error {
			if err == nil && !d.IsDir() {
				data, _ := fs.ReadFile(tree, path)
				_, _ = fmt.Fprintf(h, "%s %d\n%s", path, len(data), data)
			}
			return err
		})
	}
	return hex.EncodeToString(h.Sum(nil))
}

// Stage writes the files that the build scripts read to dir, which must
// exist. finish.sh documents them.
func (r *Recipe) Stage(ctx context.Context, o StageOptions, dir string) error {
	s := stage{recipe: r, dir: dir}
	s.write("kind", string(o.Kind)+"\n")
	s.tree(images.Scripts, "build", "")
	s.write("apt.conf", hostAptConf(ctx))
	s.lines("npm.packages", r.scripted())
	s.lines("commands", r.commands())
	s.lines("pip.specs", r.pipSpecs())
	s.lines("go.list", r.goPrograms())
	s.write("shell", cmp.Or(r.Shell, "/bin/bash")+"\n")
	s.apt(cmp.Or(o.Suite, r.Suite))
	s.extra(ctx, o.Downloads)
	for i, step := range r.Run {
		s.write(fmt.Sprintf("run/%02d", i+1), step)
	}
	if o.Kind == Cloud {
		s.cloud(o)
		if r.Go.Toolchain != "" && s.err == nil {
			s.err = r.fetchGo(ctx, filepath.Join(dir, "go"), o.Downloads)
		}
	} else {
		s.direct()
	}
	s.openDirs("files")
	return s.err
}

// direct stages the files of images of kind Direct only.
func (s *stage) direct() {
	s.tree(images.Files, "files", "files")
	s.write(filepath.Join("files", "etc", "apt", "sources.list.d", s.recipe.distribution().name+".sources"), s.recipe.sourcesFile())
	s.lines("packages", s.recipe.Packages)
}

// cloud stages the files of images of kind Cloud only.
func (s *stage) cloud(o StageOptions) {
	s.tree(images.Cloud, "cloud", "files")
	for _, dir := range sharedFiles {
		s.tree(images.Files, dir, dir)
	}
	s.lines("packages", slices.Concat(cloudPackages, s.recipe.Packages))
	s.lines("npm.specs", s.recipe.npmSpecs())
	s.write("withheld", withheld+"\n")
	if o.Runner != "" && s.err == nil {
		var runner []byte
		runner, s.err = os.ReadFile(o.Runner)
		s.write("agent-runner", string(runner))
	}
}

// apt stages the recipe's repositories for the system with that code name.
func (s *stage) apt(system string) {
	for _, a := range s.recipe.Apt {
		s.write(filepath.Join("files", a.keyring()), a.Key)
		s.write(filepath.Join("files", "etc", "apt", "sources.list.d", a.Name+".sources"), a.source(system).stanza())
	}
}

// extra stages the recipe's files, with a line "NAME MODE OWNER PATH" for each.
func (s *stage) extra(ctx context.Context, downloads string) {
	var list []string
	for i, f := range s.recipe.Files {
		name := fmt.Sprintf("%02d", i+1)
		list = append(list, strings.Join([]string{name, f.Mode, f.Owner, f.Path}, " "))
		name = filepath.Join("extra", name)
		s.write(name, f.Content)
		if f.URL != "" && s.err == nil {
			s.err = f.fetch(ctx, filepath.Join(s.dir, name), downloads)
		}
	}
	s.lines("extra.list", list)
}

// stage writes files below dir, up to the first error.
type stage struct {
	recipe *Recipe
	dir    string
	err    error
}

func (s *stage) write(name, text string) { s.writeMode(name, text, 0o644) }

// lines writes a list, one item per line.
func (s *stage) lines(name string, items []string) {
	var text strings.Builder
	for _, i := range items {
		text.WriteString(i + "\n")
	}
	s.write(name, text.String())
}

func (s *stage) writeMode(name, text string, mode fs.FileMode) {
	if s.err == nil {
		s.err = writeFile(filepath.Join(s.dir, name), text, mode)
	}
}

// writeFile writes a file and the directories above it.
func writeFile(path, text string, mode fs.FileMode) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(path, []byte(text), mode); err != nil {
		return err
	}
	return os.Chmod(path, mode) // regardless of the umask: the image gets this mode
}

// tree writes the files below root in an embedded tree to dir. Scripts and
// sudoers files get the modes that they need, because embedding does not
// preserve modes.
func (s *stage) tree(tree fs.FS, root, dir string) {
	err := fs.WalkDir(tree, root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		data, err := fs.ReadFile(tree, path)
		if err != nil {
			return err
		}
		mode := fs.FileMode(0o644)
		switch {
		case strings.HasSuffix(path, ".sh"):
			mode = 0o755
		case strings.Contains(path, "/sudoers.d/"):
			mode = 0o440
		}
		rel, _ := filepath.Rel(root, path) // path is below root
		s.writeMode(filepath.Join(dir, rel), string(data), mode)
		return s.err
	})
	if s.err == nil {
		s.err = err
	}
}

// openDirs sets the modes of the directories below a staged one to those of
// the image, regardless of the umask.
func (s *stage) openDirs(name string) {
	if _, err := os.Stat(filepath.Join(s.dir, name)); err != nil {
		return // there is none
	}
	err := filepath.WalkDir(filepath.Join(s.dir, name), func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() {
			err = os.Chmod(path, 0o755) //nolint:gosec // as in writeFile
		}
		return err
	})
	if s.err == nil {
		s.err = err
	}
}

// sourcesList returns the apt sources for mmdebstrap. If the host lacks the
// distribution's keyring, the embedded key verifies them.
func (s *stage) sourcesList() string {
	d := s.recipe.distribution()
	_, missing := os.Stat(d.keyring)
	own := ""
	if missing != nil && d.key != "" {
		key, _ := fs.ReadFile(images.Keys, d.key) // it is embedded
		s.write("archive.gpg", string(key))
		own = filepath.Join(s.dir, "archive.gpg")
	}
	var list strings.Builder
	for _, src := range s.recipe.sources("/etc/apt") {
		if own != "" && src.signedBy == d.keyring {
			src.signedBy = own
		}
		list.WriteString(src.line())
	}
	for _, a := range s.recipe.Apt {
		src := a.source(s.recipe.Suite)
		src.signedBy = filepath.Join(s.dir, "files", src.signedBy)
		list.WriteString(src.line())
	}
	return list.String()
}

// treeSources stages the apt sources, and their keys, as apt sees them in the
// tree.
func (s *stage) treeSources() {
	sources := s.recipe.sources("/etc/apt")
	for i, src := range sources {
		if src.signedBy == "" {
			continue // the keys of the tree's distribution
		}
		key, err := os.ReadFile(src.signedBy)
		if err != nil { // as in sourcesList
			key, err = fs.ReadFile(images.Keys, s.recipe.distribution().key)
		}
		if s.err == nil {
			s.err = err
		}
		name := fmt.Sprintf("keyrings/%02d%s", i, filepath.Ext(src.signedBy)) // apt reads the format from it
		s.write(name, string(key))
		sources[i].signedBy = "/run/build/" + name
	}
	for _, a := range s.recipe.Apt {
		src := a.source(s.recipe.Suite)
		src.signedBy = "/run/build/files" + src.signedBy
		sources = append(sources, src)
	}
	var list strings.Builder
	for _, src := range sources {
		list.WriteString(src.line())
	}
	s.write("tree.list", list.String())
	s.openDirs("keyrings")
}
