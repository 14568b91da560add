package image

import (
	"bytes"
	"compress/gzip"
	"encoding/binary"
	"io"
	"strings"
	"testing"

	"github.com/klauspost/compress/zstd"
	"github.com/pierrec/lz4/v4"
	"github.com/ulikunitz/xz"
)

// elfText is an ELF file as far as we look, larger than one LZ4 block.
var elfText = append([]byte("\x7fELF"), bytes.Repeat([]byte("the quick brown kernel "), 400_000)...)

// bzImage wraps a payload as the kernel's build does.
func bzImage(payload []byte) []byte {
	const sects = 3
	head := make([]byte, (sects+1)*512)
	head[bzSetupSects] = sects
	copy(head[bzMagic:], "HdrS")
	binary.LittleEndian.PutUint16(head[bzVersion:], 0x20f)
	binary.LittleEndian.PutUint32(head[bzPayloadOffset:], 16)
	binary.LittleEndian.PutUint32(head[bzPayloadLength:], uint32(len(payload)))
	return append(append(append(head, make([]byte, 16)...), payload...), "trailing parts of the image"...)
}

// withSize appends the unpacked size, as the kernel's build does.
func withSize(b []byte, n int) []byte { return binary.LittleEndian.AppendUint32(b, uint32(n)) }

func compress(t testing.TB, w io.WriteCloser, buf *bytes.Buffer, data []byte) []byte {
	t.Helper()
	if _, err := w.Write(data); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return buf.Bytes()
}

// packed returns data in every compression that kernels use.
func packed(t testing.TB, data []byte) map[string][]byte {
	t.Helper()
	out := map[string][]byte{}
	var g, x, z bytes.Buffer
	out["gzip"] = compress(t, gzip.NewWriter(&g), &g, data)
	xw, err := xz.NewWriter(&x)
	if err != nil {
		t.Fatal(err)
	}
	out["xz"] = compress(t, xw, &x, data)
	zw, err := zstd.NewWriter(&z)
	if err != nil {
		t.Fatal(err)
	}
	out["zstd"] = compress(t, zw, &z, data)
	l := bytes.Clone(magicLZ4)
	for rest := data; len(rest) > 0; {
		block := rest[:min(len(rest), 8<<20)]
		rest = rest[len(block):]
		dst := make([]byte, lz4.CompressBlockBound(len(block)))
		n, err := lz4.CompressBlock(block, dst, nil)
		if err != nil {
			t.Fatal(err)
		}
		l = append(binary.LittleEndian.AppendUint32(l, uint32(n)), dst[:n]...)
	}
	out["lz4"] = l
	return out
}

func TestExtractKernel(t *testing.T) {
	files := map[string][]byte{"plain": bzImage(elfText), "vmlinux itself": elfText}
	for name, p := range packed(t, elfText) {
		files[name] = bzImage(p)
		if name != "gzip" { // gzip carries its own size
			files[name+" and size"] = bzImage(withSize(p, len(elfText)))
		}
	}
	for name, file := range files {
		t.Run(name, func(t *testing.T) {
			got, err := ExtractKernel(file)
			if err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(got, elfText) {
				t.Errorf("%d bytes come out, %d went in", len(got), len(elfText))
			}
		})
	}
	arm := make([]byte, 100)
	copy(arm[56:], "ARM\x64")
	for name, file := range map[string][]byte{"arm64 Image": arm, "arm64 Image.gz": packed(t, arm)["gzip"]} {
		if got, err := ExtractKernel(file); err != nil || !bytes.Equal(got, arm) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestExtractKernelRefuses(t *testing.T) {
	p := packed(t, elfText)
	old := bzImage(p["gzip"])
	binary.LittleEndian.PutUint16(old[bzVersion:], 0x207)
	short := bzImage(p["gzip"])
	for _, tc := range []struct {
		name, want string
		file       []byte
	}{
		{"nothing", "not a Linux kernel", nil},
		{"text", "not a Linux kernel", bytes.Repeat([]byte("x"), 4096)},
		{"old protocol", "too old", old},
		{"cut short", "truncated", short[:3000]},
		{"unknown compression", "unknown compression", bzImage([]byte("BZh91AY"))},
		{"no ELF inside", "not an ELF", bzImage(packed(t, []byte(strings.Repeat("text ", 99)))["gzip"])},
		{"half of a gzip", "EOF", bzImage(p["gzip"][:len(p["gzip"])/2])},
		{"half of an lz4", "truncated", bzImage(p["lz4"][:len(p["lz4"])/2])},
		{"half of a zstd", "EOF", bzImage(p["zstd"][:len(p["zstd"])/2])},
		{"gzip of no kernel", "not an arm64", packed(t, elfText)["gzip"]},
	} {
		got, err := ExtractKernel(tc.file)
		if err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %d bytes, %v; want an error with %q", tc.name, len(got), err, tc.want)
		}
	}
}

func FuzzExtractKernel(f *testing.F) {
	for _, p := range packed(f, []byte("\x7fELF small")) {
		f.Add(bzImage(withSize(p, 10)))
	}
	f.Fuzz(func(t *testing.T, file []byte) {
		got, err := ExtractKernel(file)
		if err == nil && !bytes.HasPrefix(got, magicELF) && !isARM64(got) {
			t.Errorf("the result is not a kernel: % x", got[:min(8, len(got))])
		}
	})
}
