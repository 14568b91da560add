package image

import (
	"bytes"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/u-root/u-root/pkg/cpio"
)

const depTable = `kernel/fs/jbd2/jbd2.ko.xz:
kernel/fs/ext4/ext4.ko.xz: kernel/fs/jbd2/jbd2.ko.xz kernel/fs/mbcache.ko.xz kernel/lib/crc16.ko.xz
kernel/fs/mbcache.ko.xz:
kernel/lib/crc16.ko.xz:
kernel/drivers/virtio/virtio_ring.ko.xz:
kernel/drivers/virtio/virtio.ko.xz: kernel/drivers/virtio/virtio_ring.ko.xz
kernel/drivers/virtio/virtio_mmio.ko.xz: kernel/drivers/virtio/virtio.ko.xz kernel/drivers/virtio/virtio_ring.ko.xz
kernel/drivers/block/virtio_blk.ko.xz: kernel/drivers/virtio/virtio.ko.xz kernel/drivers/virtio/virtio_ring.ko.xz
kernel/drivers/char/virtio_console.ko.xz: kernel/drivers/virtio/virtio.ko.xz kernel/drivers/virtio/virtio_ring.ko.xz
kernel/drivers/net/virtio_net.ko.xz: kernel/drivers/virtio/virtio.ko.xz kernel/drivers/virtio/virtio_ring.ko.xz
kernel/drivers/char/hw_random/virtio-rng.ko.xz: kernel/drivers/virtio/virtio.ko.xz kernel/drivers/virtio/virtio_ring.ko.xz
`

func TestLoadOrder(t *testing.T) {
	deps, err := parseModulesDep(strings.NewReader(depTable))
	if err != nil {
		t.Fatal(err)
	}
	order, err := loadOrder(deps, map[string]bool{"virtio_pci": true})
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for i, f := range order {
		names = append(names, moduleName(f))
		for _, dep := range deps[moduleName(f)] {
			if j := slices.Index(order, dep); j < 0 || j > i {
				t.Errorf("%s is loaded before %s, which it needs", f, dep)
			}
		}
	}
	want := "virtio_ring virtio virtio_mmio virtio_blk virtio_console crc16 mbcache jbd2 ext4 virtio_net virtio_rng"
	if got := strings.Join(names, " "); got != want {
		t.Errorf("load order %q\nwant       %q", got, want)
	}
	if _, err := loadOrder(deps, nil); err == nil || !strings.Contains(err.Error(), "virtio_pci") {
		t.Errorf("a kernel without virtio_pci passes: %v", err)
	}
}

func TestModulesDepRefuses(t *testing.T) {
	for _, text := range []string{"no colon\n", "../../etc/passwd:\n", "a.ko: /b.ko\n", "a.ko: x/../../b.ko\n"} {
		if _, err := parseModulesDep(strings.NewReader(text)); err == nil {
			t.Errorf("%q passes", text)
		}
	}
}

func TestModulesCPIO(t *testing.T) {
	dir := t.TempDir()
	module := append([]byte("\x7fELF"), bytes.Repeat([]byte("code"), 1000)...)
	p := packed(t, module)
	files := map[string][]byte{"a.ko": module, "b.ko.xz": p["xz"], "c-d.ko.zst": p["zstd"], "e.ko.gz": p["gzip"]}
	var order []string
	for name, data := range files {
		order = append(order, name)
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	slices.Sort(order)
	var archive bytes.Buffer
	names, err := writeModulesCPIO(&archive, dir, order)
	if err != nil {
		t.Fatal(err)
	}
	if got := strings.Join(names, " "); got != "a b c_d e" {
		t.Errorf("names are %q", got)
	}
	if archive.Len()%4 != 0 {
		t.Errorf("the archive is %d bytes long; the next one would not be aligned", archive.Len())
	}
	records, err := cpio.ReadAllRecords(cpio.Newc.Reader(bytes.NewReader(archive.Bytes())))
	if err != nil {
		t.Fatal(err)
	}
	var paths []string
	for _, r := range records {
		paths = append(paths, r.Name)
		if !strings.HasSuffix(r.Name, ".ko") {
			continue
		}
		if data, err := io.ReadAll(io.NewSectionReader(r, 0, int64(r.FileSize))); err != nil || !bytes.Equal(data, module) {
			t.Errorf("%s is not the module (%d bytes, %v)", r.Name, len(data), err)
		}
	}
	want := "lib lib/agentlab lib/agentlab/modules lib/agentlab/modules/00-a.ko lib/agentlab/modules/01-b.ko " +
		"lib/agentlab/modules/02-c_d.ko lib/agentlab/modules/03-e.ko"
	if got := strings.Join(paths, " "); got != want {
		t.Errorf("the archive holds %q\nwant %q", got, want)
	}
	if err := os.WriteFile(filepath.Join(dir, "bad.ko"), []byte("text"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := writeModulesCPIO(io.Discard, dir, []string{"bad.ko"}); err == nil {
		t.Error("a module that is not an ELF file passes")
	}
}

func FuzzModulesDep(f *testing.F) {
	f.Add(depTable)
	f.Fuzz(func(t *testing.T, text string) {
		deps, err := parseModulesDep(strings.NewReader(text))
		if err != nil {
			return
		}
		for _, files := range deps {
			for _, file := range files {
				if !filepath.IsLocal(file) {
					t.Errorf("%q leaves the directory", file)
				}
			}
		}
	})
}
