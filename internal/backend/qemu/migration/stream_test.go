package migration

import (
	"bytes"
	"encoding/binary"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// block and memory of the streams of tests.
const (
	ram     = "ram"
	ramSize = 16 * PageSize
)

// stream builds a migration stream.
type stream struct{ bytes.Buffer }

// put appends integers in network byte order, strings with their length, and
// bytes.
func (s *stream) put(values ...any) *stream {
	for _, v := range values {
		switch v := v.(type) {
		case string:
			s.WriteByte(byte(len(v)))
			s.WriteString(v)
		case []byte:
			s.Write(v)
		default:
			if err := binary.Write(s, binary.BigEndian, v); err != nil {
				panic(err)
			}
		}
	}
	return s
}

const ramID uint32 = 2

// head appends everything before the pages: QEMU 7.2 sends it so for a microVM.
func (s *stream) head() *stream {
	s.put(uint32(magic), uint32(version), byte(partConfig), uint32(7), []byte("microvm"))
	s.put(byte(partSub), "configuration/capabilities", uint32(1), uint32(1), "events")
	return s.put(byte(partStart), ramID, ramDeviceName, uint32(0), uint32(ramVersion)).blocks().end()
}

func (s *stream) blocks() *stream {
	return s.put(uint64(ramSize+PageSize)|ramSizes, ram, uint64(ramSize), "rom", uint64(PageSize))
}

// end appends the end of a part of the memory.
func (s *stream) end() *stream { return s.put(uint64(ramEnd), byte(partFooter), ramID) }

func (s *stream) part(kind byte) *stream { return s.put(kind, ramID) }

// devices appends the state of the devices and the end of the stream.
func (s *stream) devices() *stream { return s.put(devices()) }

// page returns a page of one byte.
func page(b byte) []byte { return bytes.Repeat([]byte{b}, PageSize) }

func devices() []byte { return []byte("\x04all that follows is not read, but kept\x00") }

// whole is a stream with pages of both blocks, pages that are sent twice, and
// pages of zeros.
func whole() *stream {
	s := new(stream).head()
	s.part(partNext)
	s.put(uint64(0)|ramPage, ram, page(1))
	s.put(uint64(PageSize)|ramPage|ramContinue, page(2))
	s.put(uint64(5*PageSize)|ramZero|ramContinue, byte(0))
	s.put(uint64(0)|ramPage, "rom", page(9))
	s.end().part(partNext)
	s.put(uint64(15*PageSize)|ramPage, ram, page(3))
	s.put(uint64(PageSize)|ramZero|ramContinue, byte(0))
	s.end().part(partEnd)
	s.put(uint64(0)|ramPage, ram, page(4))
	return s.end().devices()
}

// receive reads a stream into a new file.
func receive(t testing.TB, r io.Reader) (memory *os.File, state []byte, err error) {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "memory"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	if err := f.Truncate(ramSize); err != nil {
		t.Fatal(err)
	}
	state, err = Receive(r, ram, f, ramSize)
	return f, state, err
}

func contentOf(t testing.TB, f *os.File) []byte {
	t.Helper()
	b, err := os.ReadFile(f.Name())
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// The last content of each page is in the memory, and everything else is the
// state, with the other block's pages.
func TestReceive(t *testing.T) {
	f, state, err := receive(t, whole())
	if err != nil {
		t.Fatal(err)
	}
	want := make([]byte, ramSize)
	copy(want, page(4))
	copy(want[15*PageSize:], page(3))
	if got := contentOf(t, f); !bytes.Equal(got, want) {
		t.Error("the memory differs")
	}
	s := new(stream).head().part(partEnd)
	s.put(uint64(0)|ramPage, "rom", page(9)).end().devices()
	if !bytes.Equal(state, s.Bytes()) {
		t.Errorf("the state is\n%q\nwant\n%q", state, s.Bytes())
	}
	again, kept, err := receive(t, bytes.NewReader(state))
	if err != nil || !bytes.Equal(kept, state) || !bytes.Equal(contentOf(t, again), make([]byte, ramSize)) {
		t.Errorf("the state is no stream without pages: %v", err)
	}
}

// A stream that ends anywhere within the memory's part is an error, also if it
// is read byte by byte.
func TestReceiveTruncated(t *testing.T) {
	text := whole().Bytes()
	text = text[:len(text)-len(devices())]
	for n := 0; n < len(text); n += 1 + n%97 {
		if _, _, err := receive(t, bytes.NewReader(text[:n])); err == nil {
			t.Fatalf("%d of %d bytes are accepted", n, len(text))
		}
	}
}

// endless returns the beginning, and then the same bytes forever.
func endless(begin *stream, rest []byte) io.Reader {
	return io.MultiReader(begin, &repeat{rest: bytes.Repeat(rest, 1+4096/len(rest))})
}

type repeat struct {
	rest []byte
	at   int
	read int
}

func (r *repeat) Read(p []byte) (int, error) {
	n := 0
	for n < len(p) {
		c := copy(p[n:], r.rest[r.at:])
		n, r.at = n+c, (r.at+c)%len(r.rest)
	}
	if r.read += n; r.read > 2*MaxState {
		return n, io.ErrNoProgress // it was not stopped
	}
	return n, nil
}

// What QEMU may not send is an error that says what it is. QEMU may be under the
// control of its guest.
func TestReceiveRejects(t *testing.T) {
	next := func() *stream { return new(stream).head().part(partNext) }
	longest := strings.Repeat("x", 255) // of names: so that few fill the limit
	many := new(stream).put(uint64(0)|ramPage, "rom", page(9)).Bytes()
	for name, test := range map[string]struct {
		in   io.Reader
		want string
	}{
		"no stream":            {strings.NewReader("GET / HTTP/1.1\r\n\r\n"), "does not begin"},
		"another version":      {new(stream).put(uint32(magic), uint32(4)), "does not begin"},
		"no configuration":     {new(stream).put(uint32(magic), uint32(version), byte(partStart)), "no configuration"},
		"long machine":         {new(stream).put(uint32(magic), uint32(version), byte(partConfig), ^uint32(0)), "name of the machine"},
		"many capabilities":    {endless(new(stream).put(uint32(magic), uint32(version), byte(partConfig), uint32(0), byte(partSub), "configuration/capabilities", uint32(1), ^uint32(0)), new(stream).put(longest).Bytes()), "larger than"},
		"strange subsection":   {new(stream).put(uint32(magic), uint32(version), byte(partConfig), uint32(0), byte(partSub), "configuration/new", uint32(1)), "unknown configuration"},
		"many subsections":     {endless(new(stream).put(uint32(magic), uint32(version), byte(partConfig), uint32(0)), new(stream).put(byte(partSub), "configuration/target-page-bits", uint32(1), uint32(12)).Bytes()), "larger than"},
		"another first device": {new(stream).put(uint32(magic), uint32(version), byte(partConfig), uint32(0), byte(partStart), ramID, "timer", uint32(0), uint32(ramVersion)), "in place of the memory"},
		"devices first":        {new(stream).put(uint32(magic), uint32(version), byte(partConfig), uint32(0), byte(4)), "in place of the memory"},
		"another device":       {new(stream).head().put(byte(partNext), ramID+1), "within device"},
		"no footer":            {next().put(uint64(ramEnd), byte(0)), "no end"},
		"unknown flag":         {next().put(uint64(0x80)), "flags"},
		"two flags":            {next().put(uint64(ramPage|ramZero), ram, page(1)), "flags"},
		"outside":              {next().put(uint64(ramSize)|ramPage, ram, page(1)), "outside"},
		"far outside":          {next().put(uint64(1)<<63|ramZero, ram, byte(0)), "outside"},
		"not zero":             {next().put(uint64(0)|ramZero, ram, byte(1)), "page of bytes"},
		"no block":             {next().put(uint64(0)|ramPage|ramContinue, page(1)), "unknown block"},
		"pages before sizes":   {new(stream).put(uint32(magic), uint32(version), byte(partConfig), uint32(0), byte(partStart), ramID, ramDeviceName, uint32(0), uint32(ramVersion), uint64(0)|ramPage, ram, page(1)), "unknown block"},
		"sizes twice":          {next().blocks(), "more than one list"},
		"another size":         {new(stream).put(uint32(magic), uint32(version), byte(partConfig), uint32(0), byte(partStart), ramID, ramDeviceName, uint32(0), uint32(ramVersion), uint64(PageSize)|ramSizes, ram, uint64(PageSize)), "not 65536"},
		"no such block":        {new(stream).put(uint32(magic), uint32(version), byte(partConfig), uint32(0), byte(partStart), ramID, ramDeviceName, uint32(0), uint32(ramVersion), uint64(PageSize)|ramSizes, "x", uint64(PageSize)), "no block"},
		"sizes beyond total":   {new(stream).put(uint32(magic), uint32(version), byte(partConfig), uint32(0), byte(partStart), ramID, ramDeviceName, uint32(0), uint32(ramVersion), uint64(PageSize)|ramSizes, ram, uint64(ramSize)), "bytes"},
		"empty blocks":         {endless(new(stream).put(uint32(magic), uint32(version), byte(partConfig), uint32(0), byte(partStart), ramID, ramDeviceName, uint32(0), uint32(ramVersion), uint64(1)<<60|ramSizes), new(stream).put(longest, uint64(1)).Bytes()), "larger than"},
		"other block forever":  {endless(next(), many), "larger than"},
		"devices forever":      {endless(new(stream).head().part(partEnd).end(), []byte("x")), "larger than"},
	} {
		t.Run(name, func(t *testing.T) {
			_, state, err := receive(t, test.in)
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("%v, want %q", err, test.want)
			}
			if state != nil {
				t.Errorf("it has %d bytes of state", len(state))
			}
		})
	}
}

// A full disk ends the stream with the error of the write.
func TestReceiveFullDisk(t *testing.T) {
	full, err := os.OpenFile("/dev/full", os.O_RDWR, 0)
	if err != nil {
		t.Skip("skipped: there is no /dev/full")
	}
	defer func() { _ = full.Close() }()
	_, err = Receive(whole(), ram, full, ramSize)
	if err == nil || !strings.Contains(err.Error(), "no space") {
		t.Errorf("%v", err)
	}
}

// FuzzReceive reads what a hostile QEMU may send. The file never grows beyond the
// guest's memory, the state is bounded, and a stream that is accepted is accepted
// again in the form in which it is kept.
func FuzzReceive(f *testing.F) {
	f.Add(whole().Bytes())
	f.Add(new(stream).head().Bytes())
	f.Add(new(stream).head().part(partEnd).end().devices().Bytes())
	f.Add(new(stream).head().part(partNext).put(uint64(15*PageSize)|ramZero, ram, byte(0)).Bytes())
	dir := f.TempDir()
	f.Fuzz(func(t *testing.T, in []byte) {
		file, err := os.CreateTemp(dir, "memory")
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = file.Close(); _ = os.Remove(file.Name()) }()
		if err := file.Truncate(ramSize); err != nil {
			t.Fatal(err)
		}
		state, err := Receive(bytes.NewReader(in), ram, file, ramSize)
		if st, serr := file.Stat(); serr != nil || st.Size() != ramSize {
			t.Fatalf("the file has %d bytes, %v", st.Size(), serr)
		}
		if err != nil {
			return
		}
		if len(state) > len(in)+1 || len(state) > MaxState {
			t.Fatalf("%d bytes of state of %d", len(state), len(in))
		}
		before := contentOf(t, file)
		again, err := Receive(bytes.NewReader(state), ram, file, ramSize)
		if err != nil || !bytes.Equal(again, state) {
			t.Fatalf("the kept state is rejected or differs: %v", err)
		}
		if !bytes.Equal(contentOf(t, file), before) {
			t.Fatal("the kept state has pages of the guest")
		}
	})
}
