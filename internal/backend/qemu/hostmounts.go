package qemu

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"

	"github.com/agentlab-vm/agentlab"
)

// A sandbox sees no directory, disk or device of its host. Nothing in this
// package gives it one; what follows makes sure of it on every start, on the
// very arguments with which QEMU is about to be run and on the disk that they
// name, so that no mistake of ours and no changed file can.

// optionRule says what the value of an option of QEMU may be.
type optionRule func(value string) bool

func anyValue(string) bool { return true }
func noValue(v string) bool {
	return v == ""
}

func pattern(expr string) optionRule {
	re := regexp.MustCompile(`\A(?:` + expr + `)\z`)
	return re.MatchString
}

// deviceRule knows the devices that a sandbox may have, none of which opens a
// file of the host by itself.
var deviceRule = pattern(`(virtio-serial-device|virtconsole|virtserialport|virtio-net-device|virtio-blk-device|virtio-rng-device|virtio-balloon-device)(,.*)?`)

// mayHave are the options with which QEMU may be run. An option that is not
// here (-fsdev, -virtfs, -drive, -cdrom, -device vfio-pci, …) is refused
// whatever it does.
func mayHave(h handle, c startConfig) map[string]optionRule {
	exactly := func(want string) optionRule { return func(v string) bool { return v == want } }
	return map[string]optionRule{
		"-name": anyValue, "-nodefaults": noValue, "-no-user-config": noValue, "-no-reboot": noValue,
		"-display": exactly("none"), "-sandbox": anyValue, "-machine": pattern(`microvm,[a-z,=-]*`), "-global": pattern(`virtio-mmio\.[a-z=-]+`),
		"-accel": anyValue, "-cpu": pattern(`host|max`), "-smp": pattern(`\d+`), "-m": pattern(`\d+M`), "-rtc": exactly("base=utc"),
		"-append": anyValue, "-mon": exactly("chardev=qmp,mode=control"),
		"-kernel": exactly(h.Image.Kernel), "-initrd": exactly(c.Initrd),
		"-chardev": pattern(`socket,id=[a-z]+,fd=\d+`),
		"-netdev":  pattern(`stream,id=[a-z]+,server=off,addr\.type=fd,addr\.str=\d+`),
		"-object":  pattern(`rng-random,id=[a-z]+,filename=/dev/urandom`),
		"-device":  deviceRule,
		"-blockdev": pattern(`driver=file,node-name=root-file,filename=` + regexp.QuoteMeta(fileRoot) + `,discard=unmap` +
			`|driver=qcow2,node-name=root,file=root-file,discard=unmap,detect-zeroes=unmap`),
	}
}

// mustHave are options without which QEMU would add devices or read files of
// its own accord, or could start programs.
var mustHave = []string{"-nodefaults", "-no-user-config", "-sandbox"}

// refuseHostMounts looks at the arguments of QEMU for the sandbox in dir, and
// at the files that they name. Its error, code denied, says what would show
// the guest something of the host.
func refuseHostMounts(dir string, h handle, c startConfig, args []string) error {
	refuse := func(format string, a ...any) error {
		return agentlab.Errorf(agentlab.CodeDenied, "sandbox %d is not started: "+format, append([]any{h.Spec.VMID}, a...)...).
			WithHint("a sandbox never sees a file, directory or device of its host; if nobody has changed the files of AgentLab, this is a bug of ours")
	}
	if err := refuseOptions(mayHave(h, c), args); err != nil {
		return refuse("%w", err)
	}
	if err := refuseDisk(filepath.Join(dir, fileRoot), h.Image.RootDisk); err != nil {
		return refuse("%w", err)
	}
	for _, path := range []string{h.Image.RootDisk, h.Image.Kernel, c.Initrd} {
		st, err := os.Stat(path)
		if err != nil {
			return fault(err, "cannot look at %s", path)
		}
		if !filepath.IsAbs(path) || !st.Mode().IsRegular() {
			return refuse("%s is no regular file", path)
		}
	}
	return nil
}

func refuseOptions(may map[string]optionRule, args []string) error {
	var seen []string
	for i := 0; i < len(args); i++ {
		name, value := args[i], ""
		rule, ok := may[name]
		if !ok {
			return fmt.Errorf("QEMU would be run with %.100q", name)
		}
		if i+1 < len(args) && !strings.HasPrefix(args[i+1], "-") {
			i++
			value = args[i]
		}
		if !rule(value) {
			return fmt.Errorf("QEMU would be run with %s %.200q", name, value)
		}
		if name == "-sandbox" && !strings.HasPrefix(value, "on,") {
			return errors.New("QEMU would be run without its own sandbox")
		}
		seen = append(seen, name)
	}
	for _, name := range mustHave {
		if !slices.Contains(seen, name) {
			return fmt.Errorf("QEMU would be run without %s", name)
		}
	}
	return nil
}

// Parts of the header of a qcow2 file (docs/interop/qcow2.txt of QEMU).
const (
	qcowMagic        = 0x514649fb
	qcowHeader       = 104
	qcowExternalData = 1 << 2 // in the incompatible features
	qcowMaxBacking   = 1023
)

// refuseDisk makes sure that the root disk is a file of its own whose only
// other source is the image's: the header of an overlay can name any file of
// the host. The guest cannot write the header, it only sees what is inside.
func refuseDisk(path, image string) error {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		return fmt.Errorf("its disk cannot be read: %w", err)
	}
	defer func() { _ = f.Close() }()
	if st, err := f.Stat(); err != nil || !st.Mode().IsRegular() {
		return fmt.Errorf("%s is no regular file", path)
	}
	header := make([]byte, qcowHeader)
	if _, err := io.ReadFull(f, header); err != nil || binary.BigEndian.Uint32(header) != qcowMagic || binary.BigEndian.Uint32(header[4:]) < 3 {
		return fmt.Errorf("%s is no overlay that we made", path)
	}
	if binary.BigEndian.Uint64(header[72:])&qcowExternalData != 0 {
		return fmt.Errorf("%s keeps its data in another file", path)
	}
	size := binary.BigEndian.Uint32(header[16:])
	if size == 0 || size > qcowMaxBacking {
		return fmt.Errorf("%s does not stand on its image", path)
	}
	backing := make([]byte, size)
	if _, err := f.ReadAt(backing, int64(binary.BigEndian.Uint64(header[8:]))); err != nil { //nolint:gosec // a wrong offset reads nothing
		return fmt.Errorf("%s does not name its image", path)
	}
	if string(backing) != image {
		return fmt.Errorf("%s stands on %.200q, not on its image", path, backing)
	}
	return refuseBackingFormat(f, header)
}

// refuseBackingFormat makes sure that the image is read as raw bytes: in any
// other format it could name further files.
func refuseBackingFormat(f *os.File, header []byte) error {
	const backingFormat = 0xe2792aca
	at := int64(binary.BigEndian.Uint32(header[100:]))
	for range 64 { // extensions follow one another
		var ext [8]byte
		if _, err := f.ReadAt(ext[:], at); err != nil {
			break
		}
		kind, size := binary.BigEndian.Uint32(ext[:4]), binary.BigEndian.Uint32(ext[4:])
		if kind == 0 || size > 4096 {
			break
		}
		if kind == backingFormat {
			name := make([]byte, size)
			if _, err := f.ReadAt(name, at+8); err == nil && string(name) == "raw" {
				return nil
			}
			break
		}
		at += 8 + int64(size+7)/8*8
	}
	return fmt.Errorf("%s does not say that its image is raw", f.Name())
}
