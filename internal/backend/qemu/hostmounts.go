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
	"github.com/agentlab-vm/agentlab/internal/qemuvm"
)

// A sandbox never sees a directory, disk or device of its host. No code of this
// package adds one. The checks below enforce it at every start, on the arguments
// with which QEMU will run and on the disk that they name, so that neither a bug
// of AgentLab nor a modified file can expose the host.

// optionRule reports whether a value of an option of QEMU is allowed.
type optionRule func(value string) bool

func anyValue(string) bool { return true }
func noValue(v string) bool {
	return v == ""
}

func pattern(expr string) optionRule {
	re := regexp.MustCompile(`\A(?:` + expr + `)\z`)
	return re.MatchString
}

// deviceRule allows the devices of a sandbox. None of them opens a file of the
// host by itself.
var deviceRule = pattern(`(virtio-serial-device|virtconsole|virtserialport|virtio-net-device|virtio-blk-device|virtio-rng-device|virtio-balloon-device)(,.*)?`)

// mayHave returns the allowed options of QEMU. Any other option (-fsdev, -virtfs,
// -drive, -cdrom, -device vfio-pci, …) is rejected.
func mayHave(h handle, c startConfig) map[string]optionRule {
	exactly := func(want string) optionRule { return func(v string) bool { return v == want } }
	return map[string]optionRule{
		"-name": anyValue, "-nodefaults": noValue, "-no-user-config": noValue, "-no-reboot": noValue,
		"-display": exactly("none"), "-sandbox": anyValue, "-machine": pattern(`microvm,[a-z,=-]*|memory-backend=ram`), "-global": pattern(`virtio-(mmio|net-device)\.[a-z_=-]+|migration\.announce-rounds=0`),
		"-accel": anyValue, "-cpu": pattern(`(host|max,-erms,-fsrm)(,-svm,-vmx)?`), "-smp": pattern(`\d+`), "-m": pattern(`\d+M`), "-rtc": exactly("base=utc"),
		"-append": anyValue, "-mon": exactly("chardev=qmp,mode=control"),
		"-kernel": exactly(h.Image.Kernel), "-initrd": exactly(c.Initrd),
		"-chardev": pattern(`socket,id=[a-z]+,fd=\d+`),
		"-netdev":  pattern(`stream,id=[a-z]+,server=off,addr\.type=fd,addr\.str=\d+`),
		"-object": pattern(`rng-random,id=[a-z]+,filename=/dev/urandom` +
			`|memory-backend-ram,id=ram,size=\d+M|memory-backend-file,id=ram,size=\d+M,share=off,mem-path=` + fileMemory),
		"-incoming": pattern(`fd:\d+`), "-S": noValue,
		"-device": deviceRule,
		"-blockdev": pattern(`driver=file,node-name=root-file,filename=` + regexp.QuoteMeta(fileRoot) + `,discard=unmap` +
			`|driver=qcow2,node-name=root,file=root-file,discard=unmap,detect-zeroes=unmap` +
			`|driver=file,node-name=` + qemuvm.NodeNoVolume + `,filename=` + regexp.QuoteMeta(qemuvm.FileNoVolume) +
			`|driver=raw,node-name=` + qemuvm.SlotNode + `,file=` + qemuvm.NodeNoVolume + `,discard=unmap`),
	}
}

// mustHave are the options without which QEMU would add devices, read files or
// start programs that the command line does not name.
var mustHave = []string{"-nodefaults", "-no-user-config", "-sandbox"}

// refuseHostMounts checks the arguments of QEMU for the sandbox in dir, and
// the files that they name. Its error, with code denied, names the argument
// or file that would expose the host to the guest.
func refuseHostMounts(dir string, h handle, c startConfig, args []string) error {
	refuse := func(format string, a ...any) error {
		return agentlab.Errorf(agentlab.CodeDenied, "sandbox %d is not started: "+format, append([]any{h.Spec.VMID}, a...)...).
			WithHint("sandboxes have no access to files, directories and devices of the host; if the files of AgentLab were not modified, this is a bug in AgentLab")
	}
	if err := refuseOptions(mayHave(h, c), args); err != nil {
		return refuse("%w", err)
	}
	if err := refuseDisks(dir, h.Image.RootDisk); err != nil {
		return refuse("%w", err)
	}
	for _, path := range []string{h.Image.RootDisk, h.Image.Kernel, c.Initrd} {
		st, err := os.Stat(path)
		if err != nil {
			return fault(err, "cannot check %s", path)
		}
		if !filepath.IsAbs(path) || !st.Mode().IsRegular() {
			return refuse("%s is not a regular file", path)
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
	qcowMagic        = 0x514649fb // "QFI\xfb"
	qcowHeader       = 104
	qcowExternalData = 1 << 2 // in the incompatible features
	qcowMaxBacking   = 1023   // bytes of the name of a backing file
)

// refuseDisks checks that the root disk in dir reads from the image alone, or
// through layers in dir; a volume reads from no image (""). The header of an overlay
// can name any file of the host. The guest sees the content of the disk only, so it
// cannot write the header.
func refuseDisks(dir, image string) error {
	name := fileRoot
	for range maxLayers + 1 {
		backing, err := readBacking(filepath.Join(dir, name), image)
		if err != nil || backing == image {
			return err
		}
		name = backing
	}
	return fmt.Errorf("%s has more than %d layers", filepath.Join(dir, fileRoot), maxLayers)
}

// readBacking returns the backing file of an overlay: the image, or a layer. Without
// an image it may have none ("").
func readBacking(path, image string) (string, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		return "", fmt.Errorf("its disk cannot be read: %w", err)
	}
	defer func() { _ = f.Close() }()
	if st, err := f.Stat(); err != nil || !st.Mode().IsRegular() {
		return "", fmt.Errorf("%s is not a regular file", path)
	}
	header := make([]byte, qcowHeader)
	if _, err := io.ReadFull(f, header); err != nil || binary.BigEndian.Uint32(header) != qcowMagic || binary.BigEndian.Uint32(header[4:]) < 3 {
		return "", fmt.Errorf("%s is not an overlay that AgentLab created", path)
	}
	if binary.BigEndian.Uint64(header[72:])&qcowExternalData != 0 {
		return "", fmt.Errorf("%s has its data in another file", path)
	}
	size := binary.BigEndian.Uint32(header[16:])
	if size == 0 && image == "" {
		return "", nil
	}
	if size == 0 || size > qcowMaxBacking {
		return "", fmt.Errorf("%s has no backing file", path)
	}
	backing := make([]byte, size)
	if _, err := f.ReadAt(backing, int64(binary.BigEndian.Uint64(header[8:]))); err != nil {
		return "", fmt.Errorf("%s does not name its image", path)
	}
	format := "raw"
	switch {
	case string(backing) == image:
	case layerName.Match(backing):
		format = "qcow2"
	default:
		return "", fmt.Errorf("the backing file of %s is %.200q, not its image", path, backing)
	}
	return string(backing), refuseBackingFormat(f, header, format)
}

// refuseBackingFormat checks the format of the backing file. The image is read
// as raw bytes: a file in any other format could name further files.
func refuseBackingFormat(f *os.File, header []byte, want string) error {
	const backingFormat = 0xe2792aca
	at := int64(binary.BigEndian.Uint32(header[100:]))
	for range 64 { // a list of extensions
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
			if _, err := f.ReadAt(name, at+8); err == nil && string(name) == want {
				return nil
			}
			break
		}
		at += 8 + int64(size+7)/8*8
	}
	return fmt.Errorf("%s does not declare its backing file as %s", f.Name(), want)
}
