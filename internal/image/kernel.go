package image

import (
	"bytes"
	"compress/gzip"
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"github.com/klauspost/compress/zstd"
	"github.com/pierrec/lz4/v4"
	"github.com/ulikunitz/xz"
)

// maxKernel limits the size of a decompressed kernel or module; distribution
// kernels have 40 to 70 MB.
const maxKernel = 256 << 20

// Offsets in the x86 boot protocol's header, Documentation/arch/x86/boot.rst.
const (
	bzSetupSects    = 0x1f1
	bzMagic         = 0x202
	bzVersion       = 0x206
	bzPayloadOffset = 0x248
	bzPayloadLength = 0x24c
	bzHeaderEnd     = 0x250
)

var (
	magicELF  = []byte("\x7fELF")
	magicGzip = []byte{0x1f, 0x8b}
	magicXZ   = []byte{0xfd, '7', 'z', 'X', 'Z', 0}
	magicZstd = []byte{0x28, 0xb5, 0x2f, 0xfd}
	magicLZ4  = []byte{0x02, 0x21, 0x4c, 0x18} // the legacy frame, which the kernel's build uses
)

// ExtractKernel returns a kernel that a hypervisor can start directly, from
// the kernel file of a distribution: the compressed ELF vmlinux in an x86
// bzImage, or the flat arm64 Image, decompressed if it is gzip compressed.
// This saves the decompression in the guest.
func ExtractKernel(file []byte) ([]byte, error) {
	if isARM64(file) || bytes.HasPrefix(file, magicELF) {
		return file, nil
	}
	if bytes.HasPrefix(file, magicGzip) {
		image, err := decompress(file)
		if err == nil && !isARM64(image) {
			err = errors.New("the compressed file is not an arm64 kernel")
		}
		return image, err
	}
	payload, err := bzPayload(file)
	if err != nil {
		return nil, err
	}
	if bytes.HasPrefix(payload, magicELF) {
		return payload, nil
	}
	elf, err := decompress(payload)
	if err != nil {
		return nil, err
	}
	if !bytes.HasPrefix(elf, magicELF) {
		return nil, errors.New("the kernel's payload is not an ELF file")
	}
	return elf, nil
}

func isARM64(file []byte) bool {
	return len(file) >= 64 && string(file[56:60]) == "ARM\x64"
}

// bzPayload finds the compressed kernel in a bzImage.
func bzPayload(file []byte) ([]byte, error) {
	if len(file) < bzHeaderEnd || string(file[bzMagic:bzMagic+4]) != "HdrS" {
		return nil, errors.New("not a Linux kernel image")
	}
	if v := binary.LittleEndian.Uint16(file[bzVersion:]); v < 0x208 {
		return nil, fmt.Errorf("boot protocol %d.%02d is too old; 2.08 or later is required", v>>8, v&0xff)
	}
	sects := int64(file[bzSetupSects])
	if sects == 0 {
		sects = 4 // as defined by the protocol
	}
	start := (sects+1)*512 + int64(binary.LittleEndian.Uint32(file[bzPayloadOffset:]))
	end := start + int64(binary.LittleEndian.Uint32(file[bzPayloadLength:]))
	if start >= end || end > int64(len(file)) {
		return nil, errors.New("the kernel image is truncated")
	}
	return file[start:end], nil
}

// decompress decompresses data by the format of its first bytes. The kernel's
// build appends the decompressed size to most formats; a reader that fails
// there has read the stream itself completely.
func decompress(data []byte) ([]byte, error) {
	var r io.Reader
	var err error
	switch {
	case bytes.HasPrefix(data, magicLZ4):
		return decompressLZ4(data[len(magicLZ4):])
	case bytes.HasPrefix(data, magicGzip):
		var g *gzip.Reader
		if g, err = gzip.NewReader(bytes.NewReader(data)); err == nil {
			g.Multistream(false)
			r = g
		}
	case bytes.HasPrefix(data, magicXZ):
		r, err = xz.NewReader(bytes.NewReader(data))
	case bytes.HasPrefix(data, magicZstd):
		var d *zstd.Decoder
		if d, err = zstd.NewReader(bytes.NewReader(data), zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(maxKernel)); err == nil {
			defer d.Close()
			r = d
		}
	default:
		return nil, fmt.Errorf("unknown compression (first bytes % x)", data[:min(6, len(data))])
	}
	if err != nil {
		return nil, err
	}
	out, err := io.ReadAll(io.LimitReader(r, maxKernel+1))
	switch {
	case len(out) > maxKernel:
		return nil, fmt.Errorf("it unpacks to more than %d MB", maxKernel>>20)
	case err != nil && endsWithSize(data, out):
		return out, nil
	}
	return out, err
}

// endsWithSize reports whether data ends, as the kernel's build makes it, with
// the length of out.
func endsWithSize(data, out []byte) bool {
	return len(data) >= 4 && len(out) > 0 && int64(binary.LittleEndian.Uint32(data[len(data)-4:])) == int64(len(out))
}

// decompressLZ4 decompresses the blocks after the legacy frame's magic: each
// has its compressed size and its data, and contains 8 MB, except the last.
func decompressLZ4(data []byte) ([]byte, error) {
	const block = 8 << 20
	var out []byte
	buf := make([]byte, block)
	for len(data) > 4 { // the rest is the appended size
		size := int64(binary.LittleEndian.Uint32(data))
		data = data[4:]
		if size == 0 || size > int64(len(data)) {
			return nil, errors.New("a compressed block is truncated")
		}
		n, err := lz4.UncompressBlock(data[:size], buf)
		if err != nil {
			return nil, err
		}
		if len(out)+n > maxKernel {
			return nil, fmt.Errorf("it unpacks to more than %d MB", maxKernel>>20)
		}
		out = append(out, buf[:n]...)
		data = data[size:]
	}
	if len(out) == 0 {
		return nil, errors.New("the compressed kernel is empty")
	}
	return out, nil
}
