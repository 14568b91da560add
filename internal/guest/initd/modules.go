//go:build linux

package initd

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// deferredModules lists the modules that are not needed for the first answer of a guest.
// If the machine has no PCI bus, those for PCI belong to them too.
var deferredModules = []string{"failover", "net_failover", "virtio_net", "virtio_rng", "virtio_balloon"}

type module struct {
	name, params string
	image        []byte
}

// readModules reads the modules of the initrd, in order: those needed now, and
// those for later, when the initrd is freed.
func readModules() (now, then []module) {
	cmdline, _ := os.ReadFile("/proc/cmdline")
	pci, _ := filepath.Glob("/sys/bus/pci/devices/*")
	names, _ := filepath.Glob(modulesDir + "/*.ko") // sorted
	for _, file := range names {
		name := moduleName(file)
		image, err := os.ReadFile(file)
		if err != nil {
			printConsole("module %s: %v", name, err)
			continue
		}
		m := module{name: name, params: moduleParams(string(cmdline), name), image: image}
		if slices.Contains(deferredModules, name) || strings.HasPrefix(name, "virtio_pci") && len(pci) == 0 {
			then = append(then, m)
		} else {
			now = append(now, m)
		}
	}
	return now, then
}

// loadModules loads each module and prints those that fail. If one of them was
// needed, a later step fails.
func loadModules(modules []module) {
	for _, m := range modules {
		err := unix.InitModule(withoutSignature(m.image), m.params)
		if errors.Is(err, unix.EKEYREJECTED) || errors.Is(err, unix.EPERM) {
			err = unix.InitModule(m.image, m.params) // for a kernel that requires signatures
		}
		if err != nil && !errors.Is(err, unix.EEXIST) {
			printConsole("module %s: %v", m.name, err)
		}
	}
}

// withoutSignature returns a module without the signature at its end. Verification
// takes an emulated machine 10 ms per module and is pointless, because the
// modules are in the same initrd as this program.
func withoutSignature(image []byte) []byte {
	const magic = "~Module signature appended~\n"
	rest, ok := bytes.CutSuffix(image, []byte(magic))
	const info = 12 // struct module_signature; the length is its last field
	if !ok || len(rest) < info {
		return image
	}
	length := uint64(binary.BigEndian.Uint32(rest[len(rest)-4:]))
	if length > uint64(len(rest)-info) {
		return image
	}
	return rest[:uint64(len(rest)-info)-length]
}

// moduleName returns the kernel's name of the module in the file NN-name.ko.
func moduleName(file string) string {
	name := strings.TrimSuffix(filepath.Base(file), ".ko")
	if number, rest, ok := strings.Cut(name, "-"); ok && strings.Trim(number, "0123456789") == "" {
		name = rest
	}
	return strings.ReplaceAll(name, "-", "_")
}

// moduleParams returns the parameters for a module in the kernel's command
// line (name.key=value), which the loader of a module must pass itself.
func moduleParams(cmdline, module string) string {
	var params []string
	for _, word := range strings.Fields(cmdline) {
		mod, param, ok := strings.Cut(word, ".")
		if ok && strings.ReplaceAll(mod, "-", "_") == module {
			params = append(params, param)
		}
	}
	return strings.Join(params, " ")
}

// printConsole writes one line to the console.
func printConsole(format string, args ...any) {
	fmt.Fprintf(os.Stderr, "agent-runner: "+format+"\n", args...)
}
