package image

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"

	"github.com/u-root/u-root/pkg/cpio"
)

// bootModules are the modules that the initrd's init needs before it can mount
// the root disk and connect to the controller, in order: buses, disk, control
// channel, network, then the rest. Built-in modules, and missing optional
// ones, are omitted.
var bootModules = []struct {
	name     string
	optional bool
}{
	{"virtio_mmio", false},
	{"virtio_pci", false},
	{"virtio_blk", false},
	{"virtio_console", false},
	{"crc32c_intel", true}, // ext4's checksums, several times faster
	{"ext4", false},
	{"virtio_net", false},
	{"virtio_rng", true},
	{"virtio_balloon", true},
}

// ModulesDir is the directory of the modules in the initrd, each as NN-name.ko
// in load order.
const ModulesDir = "lib/agentlab/modules"

// maxDepLine limits the length of a line of modules.dep; the longest of a
// distribution kernel has a few kilobytes.
const maxDepLine = 1 << 20

// moduleDeps is a parsed modules.dep: for each module's normalised name the
// files to load, with its own file last.
type moduleDeps map[string][]string

// moduleName returns the kernel's name of a module: the file's base name
// without suffixes, with underscores.
func moduleName(file string) string {
	base, _, _ := strings.Cut(path.Base(file), ".ko")
	return strings.ReplaceAll(base, "-", "_")
}

// parseModulesDep reads modules.dep: "file: dep dep …" where the last
// dependency must be loaded first.
func parseModulesDep(r io.Reader) (moduleDeps, error) {
	deps := moduleDeps{}
	s := bufio.NewScanner(r)
	s.Buffer(nil, maxDepLine)
	for n := 1; s.Scan(); n++ {
		line := strings.TrimSpace(s.Text())
		if line == "" {
			continue
		}
		file, rest, ok := strings.Cut(line, ":")
		if !ok {
			return nil, fmt.Errorf("line %d: no colon", n)
		}
		fields := strings.Fields(rest)
		load := make([]string, 0, len(fields)+1)
		for i := len(fields) - 1; i >= 0; i-- {
			load = append(load, fields[i])
		}
		load = append(load, file)
		for _, f := range load {
			if !filepath.IsLocal(f) {
				return nil, fmt.Errorf("line %d: %q leaves the modules' directory", n, f)
			}
		}
		deps[moduleName(file)] = load
	}
	return deps, s.Err()
}

// parseModulesBuiltin reads modules.builtin: one file name per line.
func parseModulesBuiltin(r io.Reader) (map[string]bool, error) {
	built := map[string]bool{}
	s := bufio.NewScanner(r)
	s.Buffer(nil, maxDepLine)
	for s.Scan() {
		if line := strings.TrimSpace(s.Text()); line != "" {
			built[moduleName(line)] = true
		}
	}
	return built, s.Err()
}

// loadOrder returns the files of the boot modules and their dependencies, each
// once and after its own dependencies.
func loadOrder(deps moduleDeps, builtin map[string]bool) ([]string, error) {
	var order []string
	seen := map[string]bool{}
	for _, m := range bootModules {
		files, ok := deps[m.name]
		if !ok {
			if m.optional || builtin[m.name] {
				continue
			}
			return nil, fmt.Errorf("the kernel has no module %s, also not built in", m.name)
		}
		for _, f := range files {
			if !seen[f] {
				seen[f] = true
				order = append(order, f)
			}
		}
	}
	return order, nil
}

// resolveModules reads the module tables in dir, /lib/modules/RELEASE of an
// image, and returns the files to load in order.
func resolveModules(dir string) ([]string, error) {
	dep, err := os.Open(filepath.Join(dir, "modules.dep"))
	if err != nil {
		return nil, err
	}
	defer func() { _ = dep.Close() }()
	deps, err := parseModulesDep(dep)
	if err != nil {
		return nil, fmt.Errorf("modules.dep: %w", err)
	}
	builtin := map[string]bool{}
	if f, err := os.Open(filepath.Join(dir, "modules.builtin")); err == nil {
		defer func() { _ = f.Close() }()
		if builtin, err = parseModulesBuiltin(f); err != nil {
			return nil, fmt.Errorf("modules.builtin: %w", err)
		}
	} else if !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	return loadOrder(deps, builtin)
}

// writeModulesCPIO writes the modules, uncompressed and numbered in load
// order, as a newc archive to which another one can be appended, and returns
// their names.
func writeModulesCPIO(w io.Writer, dir string, files []string) ([]string, error) {
	archive := cpio.Newc.Writer(w)
	var records []cpio.Record
	for p := ModulesDir; p != "."; p = path.Dir(p) {
		records = append([]cpio.Record{cpio.Directory(p, 0o755)}, records...)
	}
	var names []string
	for i, f := range files {
		data, err := readModule(filepath.Join(dir, f))
		if err != nil {
			return nil, fmt.Errorf("module %s: %w", f, err)
		}
		name := moduleName(f)
		names = append(names, name)
		records = append(records, cpio.StaticFile(fmt.Sprintf("%s/%02d-%s.ko", ModulesDir, i, name), string(data), 0o644))
	}
	if err := cpio.WriteRecords(archive, records); err != nil {
		return nil, err
	}
	return names, cpio.WriteTrailer(archive)
}

// readModule returns a module as an ELF file, as the kernel requires.
func readModule(file string) ([]byte, error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	if !bytes.HasPrefix(data, magicELF) {
		if data, err = decompress(data); err != nil {
			return nil, err
		}
	}
	if !bytes.HasPrefix(data, magicELF) {
		return nil, errors.New("not an ELF file")
	}
	return data, nil
}
