// Package migration reads the migration stream of QEMU. It separates the pages
// of the guest's memory from the state of its devices, so that many virtual
// machines can later map one file with the memory and load the devices alone.
//
// The format is that of migration/savevm.c and migration/ram.c of QEMU 7.2 and
// later, without compression, multifd and postcopy. Anything else in a stream is
// an error.
package migration

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
)

// PageSize is the size of a page in a stream, in bytes.
const PageSize = 4096

// MaxState bounds the state of the devices, in bytes. That of a microVM has
// about 300 KiB.
const MaxState = 64 << 20

// maxName bounds the name of a machine, in bytes. Other names have at most 255,
// because one byte has their length.
const maxName = 256

// Parts of a stream (migration/savevm.h).
const (
	magic   = 0x5145564d
	version = 3

	partStart       = 0x01 // of a device that sends its state in steps: the memory
	partNext        = 0x02
	partEnd         = 0x03
	partSub         = 0x05
	partDescription = 0x06 // of the devices, for people
	partConfig      = 0x07
	partFooter      = 0x7e
	ramVersion      = 4
	ramDeviceName   = "ram"
)

// Flags in the low bits of an address in the memory's part (migration/ram.c).
const (
	ramZero     = 0x02 // a page with one repeated byte, which is 0
	ramSizes    = 0x04 // the names and sizes of all blocks
	ramPage     = 0x08
	ramEnd      = 0x10
	ramContinue = 0x20 // the page is in the block of the one before
	ramFlags    = PageSize - 1
)

// Receive reads a stream to its end. The pages of the block are written to
// memory, a sparse file of at least size bytes that is empty before; all other
// data is returned: a stream that QEMU loads when its block has the content of
// memory already. A page of zeros is not written.
func Receive(r io.Reader, block string, memory io.WriterAt, size int64) (state []byte, err error) {
	m, err := newReceiver(r, block, memory, size)
	if err != nil {
		return nil, err
	}
	return m.state.Bytes(), nil
}

// Replace returns state, a result of Receive, with the devices in tail, which QEMU has
// written for xen-save-devices-state, in place of its own. The other blocks of memory
// keep their content, which for those of a microVM is that of the firmware.
func Replace(state io.Reader, block string, size int64, tail []byte) ([]byte, error) {
	m, err := newReceiver(state, block, noPages{}, size)
	if err != nil {
		return nil, err
	}
	const header = 8
	if len(tail) <= header || binary.BigEndian.Uint32(tail) != magic || binary.BigEndian.Uint32(tail[4:]) != version {
		return nil, fmt.Errorf("the state of QEMU's devices does not begin with version %d of the format", version)
	}
	out := append(m.state.Bytes()[:m.devicesAt:m.devicesAt], tail[header:]...)
	return append(out, partDescription, 0, 0, 0, 0), nil // an empty one
}

// noPages is the memory of a stream without pages of the block.
type noPages struct{}

func (noPages) WriteAt([]byte, int64) (int, error) {
	return 0, errors.New("it has pages of the memory")
}

// newReceiver returns a receiver that has read a whole stream.
func newReceiver(r io.Reader, block string, memory io.WriterAt, size int64) (*receiver, error) {
	if size <= 0 || size%PageSize != 0 {
		return nil, fmt.Errorf("a memory of %d bytes", size)
	}
	m := &receiver{
		in: bufio.NewReaderSize(r, 1<<20), block: block, size: uint64(size),
		pages: writer{file: memory}, written: make([]uint64, size/PageSize/64+1),
	}
	m.stream()
	m.pages.flush()
	if m.err == nil {
		m.err = m.pages.err
	}
	if m.err != nil {
		return nil, fmt.Errorf("migration stream of QEMU: %w", m.err)
	}
	return m, nil
}

// receiver reads one stream. After the first error its methods do nothing.
type receiver struct {
	in    *bufio.Reader
	err   error
	block string
	size  uint64

	scratch [PageSize]byte

	state     bytes.Buffer // the stream without the block's pages
	devicesAt int          // where the devices begin in state
	others    bytes.Buffer // pages of other blocks, as they were sent
	listed    bool         // the blocks and their sizes are known
	current   string       // block of the previous page
	pages     writer
	written   []uint64 // bit for each page of the block that was written
}

func (m *receiver) failf(format string, args ...any) {
	if m.err == nil {
		m.err = fmt.Errorf(format, args...)
	}
}

// read returns the next n bytes, at most a page, which are valid until the next
// call.
func (m *receiver) read(n int) []byte {
	b := m.scratch[:n]
	if m.err == nil {
		_, m.err = io.ReadFull(m.in, b)
	}
	if m.err != nil {
		clear(b)
	}
	return b
}

func (m *receiver) u8() byte     { return m.read(1)[0] }
func (m *receiver) u32() uint32  { return binary.BigEndian.Uint32(m.read(4)) }
func (m *receiver) u64() uint64  { return binary.BigEndian.Uint64(m.read(8)) }
func (m *receiver) text() string { return string(m.read(int(m.u8()))) }

// keep appends values to the state: integers in network byte order, and strings
// with their length before them.
func (m *receiver) keep(values ...any) { m.appendTo(&m.state, values...) }

func (m *receiver) appendTo(b *bytes.Buffer, values ...any) {
	if b.Len() > MaxState {
		m.failf("the state of the devices is larger than %d MiB", MaxState>>20)
		return
	}
	for _, v := range values {
		switch v := v.(type) {
		case string:
			b.WriteByte(byte(len(v)))
			b.WriteString(v)
		case []byte:
			b.Write(v)
		default:
			_ = binary.Write(b, binary.BigEndian, v) // cannot fail for integers
		}
	}
}

// stream reads the header, the memory's parts, and then the devices, which need
// not be understood.
func (m *receiver) stream() {
	if m.u32() != magic || m.u32() != version {
		m.failf("it does not begin with version %d of the format", version)
		return
	}
	m.keep(uint32(magic), uint32(version))
	part := m.config()
	if m.err != nil {
		return
	}
	if part != partStart {
		m.failf("part %#x in place of the memory", part)
		return
	}
	id := m.start()
	for m.err == nil {
		part := m.u8()
		if m.err == nil && part != partNext && part != partEnd {
			m.failf("part %#x within the memory", part)
		}
		m.sameID(id)
		m.memory()
		m.footer(id)
		if m.err == nil && part == partEnd {
			m.keep(byte(partEnd), id, m.others.Bytes(), uint64(ramEnd), byte(partFooter), id)
			m.devices()
			return
		}
	}
}

// config copies the part with the configuration, and returns the type of the
// part after it.
func (m *receiver) config() (next byte) {
	if m.u8() != partConfig {
		m.failf("it has no configuration")
		return 0
	}
	size := m.u32()
	if m.err == nil && size > maxName {
		m.failf("the name of the machine has %d bytes", size)
	}
	m.keep(byte(partConfig), size, m.read(int(min(size, maxName))))
	for m.err == nil {
		if next = m.u8(); next != partSub {
			return next
		}
		name, v := m.text(), m.u32()
		m.keep(byte(partSub), name, v)
		switch name {
		case "configuration/capabilities":
			n := m.u32()
			m.keep(n)
			for ; n > 0 && m.err == nil; n-- {
				m.keep(m.text())
			}
		case "configuration/target-page-bits":
			m.keep(m.u32())
		default:
			m.failf("unknown configuration %q", name)
		}
	}
	return 0
}

// start reads the first part of the memory and returns its ID.
func (m *receiver) start() (id uint32) {
	id = m.u32()
	name, instance, v := m.text(), m.u32(), m.u32()
	if m.err == nil && (name != ramDeviceName || v != ramVersion) {
		m.failf("device %q, version %d, in place of the memory", name, v)
	}
	m.keep(byte(partStart), id, name, instance, v)
	m.memory()
	m.keep(uint64(ramEnd), byte(partFooter), id)
	m.footer(id)
	return id
}

func (m *receiver) sameID(id uint32) {
	if got := m.u32(); m.err == nil && got != id {
		m.failf("device %d within device %d", got, id)
	}
}

func (m *receiver) footer(id uint32) {
	if m.u8() != partFooter {
		m.failf("a part has no end")
	}
	m.sameID(id)
}

// memory reads the content of one of the memory's parts.
func (m *receiver) memory() {
	for m.err == nil {
		word := m.u64()
		address, flags := word&^ramFlags, word&ramFlags
		if flags&(ramZero|ramPage) != 0 && flags&ramContinue == 0 {
			m.current = m.text()
		}
		if m.err == nil && flags&(ramZero|ramPage) != 0 && (!m.listed || m.current == "") {
			m.failf("a page of an unknown block")
		}
		switch flags &^ ramContinue {
		case ramEnd:
			return
		case ramSizes:
			m.sizes(word, address)
		case ramZero:
			m.zero(address)
		case ramPage:
			m.page(address)
		default:
			m.failf("flags %#x of the memory", flags)
		}
	}
}

// sizes copies the list of blocks, whose sizes add up to total.
func (m *receiver) sizes(word, total uint64) {
	m.keep(word)
	found := false
	for m.err == nil && total > 0 {
		name, n := m.text(), m.u64()
		m.keep(name, n)
		if n == 0 || n > total {
			m.failf("block %q of %d bytes", name, n)
			return
		}
		total -= n
		if name == m.block {
			found = true
			if n != m.size {
				m.failf("block %q has %d bytes, not %d", name, n, m.size)
			}
		}
	}
	if !found || m.listed {
		m.failf("there is no block %q, or more than one list of blocks", m.block)
	}
	m.listed = true
}

// ours reports whether a page is in the block.
func (m *receiver) ours(address uint64) bool {
	if m.current != m.block {
		return false
	}
	if address >= m.size {
		m.failf("address %#x is outside of block %q", address, m.block)
	}
	return true
}

func (m *receiver) zero(address uint64) {
	fill := m.u8()
	switch {
	case fill != 0:
		m.failf("a page of bytes %#x", fill)
	case !m.ours(address):
		m.appendTo(&m.others, address|ramZero, m.current, fill)
	case m.err == nil && m.wrote(address, false):
		clear(m.pages.next(address))
	}
}

func (m *receiver) page(address uint64) {
	if !m.ours(address) {
		m.appendTo(&m.others, address|ramPage, m.current, m.read(PageSize))
		return
	}
	if m.err != nil {
		return
	}
	m.wrote(address, true)
	if _, m.err = io.ReadFull(m.in, m.pages.next(address)); m.err == nil {
		m.err = m.pages.err // a full disk
	}
}

// wrote reports whether a page was written before, and records it with now.
func (m *receiver) wrote(address uint64, now bool) bool {
	i := address / PageSize
	bit := uint64(1) << (i % 64)
	before := m.written[i/64]&bit != 0
	if now {
		m.written[i/64] |= bit
	}
	return before
}

// devices copies the rest.
func (m *receiver) devices() {
	if m.err != nil {
		return
	}
	m.devicesAt = m.state.Len()
	left := MaxState - m.state.Len()
	n, err := io.Copy(&m.state, io.LimitReader(m.in, int64(left)+1))
	if m.err = err; err == nil && n > int64(left) {
		m.failf("the state of the devices is larger than %d MiB", MaxState>>20)
	}
}
