package qemuvm

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
)

// probeText is the code of the KVM probe's kernel; probekernel.asm.txt is its
// source, which a test assembles again.
const probeText = "" +
	"fac7050000110003101100c7050010110003201100c70518" +
	"10110003301100c7050020110083000000c705b83f110093" +
	"00e0feb8000011000f22d80f20e083c8200f22e0b9800000" +
	"c00f320d000100000f300f20c00d010000800f22c00f0115" +
	"08011000ea6b0010000800b8100000008ed88ec08ed0bc00" +
	"60110031c00fa2b8d7001000bf0044110066890766c74702" +
	"080066c74704008ec1e810668947060f011d68000000bb00" +
	"00e0fec783f0000000ff010000c783e00300000b000000c7" +
	"832003000040000000c78380030000a0860100fbf4ebfdb9" +
	"062d310131c001c8ffc975fae6f4f4ebfd0f1f8000000000" +
	"0000000000000000ffff0000009aaf00ffff00000092cf00" +
	"1700f00010000f040040110000000000"

const (
	probeBase   = 0x100000 // load address and entry point
	probeMemory = 0x16000  // bytes from there that must be zero or code
	probeExit   = 0x2b     // QEMU's exit code if the kernel has done its work
)

// probeKernel returns the kernel as an ELF file that QEMU boots through PVH:
// one loaded segment and the note that names the entry point.
func probeKernel() []byte {
	text, err := hex.DecodeString(probeText)
	if err != nil {
		panic(err) // a constant
	}
	le := binary.LittleEndian
	const (
		header, segment = 64, 56
		noteAt          = header + 2*segment
		noteSize        = 20
		textAt          = (noteAt + noteSize + 15) &^ 15
	)
	var b bytes.Buffer
	put := func(values ...any) {
		for _, v := range values {
			_ = binary.Write(&b, le, v)
		}
	}
	// ELF header: 64 bit, little endian, executable, x86-64, two segments.
	b.WriteString("\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00")
	put(uint16(2), uint16(62), uint32(1), uint64(probeBase), uint64(header), uint64(0), uint32(0),
		uint16(header), uint16(segment), uint16(2), uint16(0), uint16(0), uint16(0))
	// PT_LOAD, rwx.
	put(uint32(1), uint32(7), uint64(textAt), uint64(probeBase), uint64(probeBase),
		uint64(len(text)), uint64(probeMemory), uint64(16))
	// PT_NOTE: XEN_ELFNOTE_PHYS32_ENTRY.
	put(uint32(4), uint32(4), uint64(noteAt), uint64(0), uint64(0), uint64(noteSize), uint64(noteSize), uint64(4))
	put(uint32(4), uint32(4), uint32(18), [4]byte{'X', 'e', 'n'}, uint32(probeBase))
	b.Write(make([]byte, textAt-b.Len()))
	b.Write(text)
	return b.Bytes()
}
