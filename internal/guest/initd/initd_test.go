//go:build linux

package initd

import (
	"bytes"
	"encoding/binary"
	"strings"
	"testing"
)

func TestModuleName(t *testing.T) {
	for file, want := range map[string]string{
		"/lib/x/07-virtio_console.ko": "virtio_console",
		"00-virtio-ring.ko":           "virtio_ring",
		"crc32c-intel.ko":             "crc32c_intel",
		"8250.ko":                     "8250",
	} {
		if got := moduleName(file); got != want {
			t.Errorf("%s: %q, want %q", file, got, want)
		}
	}
}

func TestModuleParams(t *testing.T) {
	const line = "quiet virtio_mmio.device=512@0x1:5 net.ifnames=0 virtio-mmio.device=512@0x2:6 virtio_mmiox.a=b\n"
	if got := moduleParams(line, "virtio_mmio"); got != "device=512@0x1:5 device=512@0x2:6" {
		t.Errorf("got %q", got)
	}
	if got := moduleParams(line, "virtio_blk"); got != "" {
		t.Errorf("got %q", got)
	}
}

func TestUnsigned(t *testing.T) {
	const magic = "~Module signature appended~\n"
	signed := func(sig string, length uint32) []byte {
		b := append([]byte("module"), sig...)
		b = append(b, make([]byte, 8)...)
		b = binary.BigEndian.AppendUint32(b, length)
		return append(b, magic...)
	}
	for name, tc := range map[string]struct{ in, want []byte }{
		"signed":       {signed("sig", 3), []byte("module")},
		"not signed":   {[]byte("module"), []byte("module")},
		"empty":        {nil, nil},
		"only magic":   {[]byte(magic), []byte(magic)},
		"absurd":       {signed("sig", 100), signed("sig", 100)},
		"most absurd":  {signed("sig", 1<<32-1), signed("sig", 1<<32-1)},
		"all of it":    {signed("sig", 9), []byte{}},
		"no signature": {signed("", 0), []byte("module")},
	} {
		if got := withoutSignature(tc.in); !bytes.Equal(got, tc.want) {
			t.Errorf("%s: %q, want %q", name, got, tc.want)
		}
	}
}

// TestRunFiles checks the one name that is derived: systemd's escaping of the
// mount point.
func TestRunFiles(t *testing.T) {
	unit := strings.NewReplacer("-", `\x2d`, "/", "-").Replace(strings.TrimPrefix(program, "/")) + ".mount.d"
	for name := range runFiles {
		if strings.Contains(name, unit) {
			return
		}
	}
	t.Errorf("no file for %s", unit)
}
