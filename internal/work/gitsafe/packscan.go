package gitsafe

import (
	"bufio"
	"compress/zlib"
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"github.com/agentlab-vm/agentlab"

	"github.com/agentlab-vm/agentlab/internal/work"
)

// Limits on the pack of a result bundle, for the sizes that its headers declare.
// git later checks that the objects have these sizes.
const (
	maxPackObjects = 1_000_000
	maxPackBlob    = 512 << 20 // bytes of a blob that is not a delta; git streams it
	maxPackObject  = 128 << 20 // bytes of any other object; git holds it in memory
	maxPackTotal   = 16 << 30  // bytes of all objects together
)

// Types of objects in a pack, see gitformat-pack(5).
const (
	packCommit   = 1
	packBlob     = 3
	packTag      = 4
	packOfsDelta = 6
	packRefDelta = 7
)

// scanPack reads a pack and returns an error with code limit if an object, or
// all objects together, would be too large unpacked: a pack of some kilobytes can
// declare gigabytes, which git would allocate. It uses little memory itself.
func scanPack(r io.Reader) error {
	s := &packScan{in: bufio.NewReaderSize(r, 64<<10)}
	var head [12]byte
	if _, err := io.ReadFull(s.in, head[:]); err != nil || string(head[:4]) != "PACK" || binary.BigEndian.Uint32(head[4:]) != 2 {
		return errors.New("it contains no pack of version 2")
	}
	count := binary.BigEndian.Uint32(head[8:])
	if count > maxPackObjects {
		return agentlab.Errorf(agentlab.CodeLimit, "it contains %d objects, more than %d", count, maxPackObjects)
	}
	for i := range count {
		if err := s.object(); err != nil {
			if agentlab.CodeOf(err) == agentlab.CodeLimit {
				return err
			}
			return fmt.Errorf("object %d of its pack is damaged: %w", i+1, err)
		}
	}
	if n, err := io.CopyN(io.Discard, s.in, 21); n != 20 || !errors.Is(err, io.EOF) {
		return errors.New("its pack does not end with a checksum")
	}
	return nil
}

type packScan struct {
	in    *bufio.Reader
	z     io.ReadCloser // reused
	total int64
}

// object reads one object of the pack.
func (s *packScan) object() error {
	c, err := s.in.ReadByte()
	if err != nil {
		return err
	}
	kind := c >> 4 & 7
	size := int64(c & 15)
	if c&0x80 != 0 {
		more, err := uvarint(s.in, 4)
		if err != nil {
			return err
		}
		size |= more
	}
	switch {
	case kind == packRefDelta:
		_, err = s.in.Discard(20)
	case kind == packOfsDelta:
		_, err = uvarint(s.in, 0) // the encoding differs, but not how it ends
	case kind < packCommit || kind > packTag:
		return fmt.Errorf("unknown type %d", kind)
	}
	if err != nil {
		return err
	}
	most := int64(maxPackObject)
	if kind == packBlob {
		most = maxPackBlob
	}
	if err := s.add(size, most); err != nil {
		return err
	}
	return s.inflate(size, kind == packOfsDelta || kind == packRefDelta)
}

// inflate reads the data of an object, which must unpack to size bytes. A delta
// starts with the sizes of its base and its result.
func (s *packScan) inflate(size int64, delta bool) error {
	var err error
	if s.z == nil {
		s.z, err = zlib.NewReader(s.in) // stops at the end of the data, as s.in is an io.ByteReader
	} else {
		err = s.z.(zlib.Resetter).Reset(s.in, nil)
	}
	if err != nil {
		return err
	}
	data := &io.LimitedReader{R: s.z, N: size + 1}
	if delta {
		small := bufio.NewReaderSize(data, 512)
		for range 2 {
			n, err := uvarint(small, 0)
			if err == nil {
				err = s.add(n, maxPackObject)
			}
			if err != nil {
				return err
			}
		}
		_, err = io.Copy(io.Discard, small)
	} else {
		_, err = io.Copy(io.Discard, data)
	}
	if err == nil && data.N != 1 {
		err = errors.New("its size differs from the declared size")
	}
	return err
}

// add adds size to the total.
func (s *packScan) add(size, most int64) error {
	if size > most {
		return agentlab.Errorf(agentlab.CodeLimit, "an object has %s unpacked, more than %s", work.ByteSize(size), work.ByteSize(most))
	}
	if s.total += size; s.total > maxPackTotal {
		return agentlab.Errorf(agentlab.CodeLimit, "its objects have more than %s unpacked", work.ByteSize(maxPackTotal))
	}
	return nil
}

// uvarint reads a little-endian base-128 number, shifted left by shift bits.
func uvarint(r io.ByteReader, shift uint) (int64, error) {
	var n int64
	for {
		c, err := r.ReadByte()
		if err != nil {
			return 0, err
		}
		if shift > 55 {
			return 0, errors.New("a size is too large")
		}
		n |= int64(c&0x7f) << shift
		if c&0x80 == 0 {
			return n, nil
		}
		shift += 7
	}
}
