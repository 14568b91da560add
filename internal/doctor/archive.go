package doctor

import (
	"archive/tar"
	"bytes"
	"cmp"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strings"
	"syscall"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/internal/fsfault"
	"github.com/agentlab-vm/agentlab/internal/lazyre"
	"github.com/agentlab-vm/agentlab/internal/redact"
)

// Limits of a bundle, in bytes and rows.
const (
	maxBundle = 16 << 20 // all files together
	maxFile   = 2 << 20
	maxTail   = 512 << 10 // of a log
	maxRows   = 2000      // of a list
	maxText   = 1 << 10   // of an error

	maxConsole = 8 << 20 // that is read; more than backends store

	// tailMargin is what is read before the end of a log that is added, so that a
	// secret that begins before it is found.
	tailMargin = 256 << 10

	maxSecretFile = 64 << 10
)

// archive collects redacted files and writes them in a way that depends on
// nothing but their content.
type archive struct {
	redact   *redact.Redactor
	manifest api.DoctorManifest
	data     map[string][]byte // of manifest.Files, by name
	size     int
}

func newArchive(kind, subject string, r *redact.Redactor) *archive {
	return &archive{redact: r, data: map[string][]byte{}, manifest: api.DoctorManifest{
		Schema: api.DoctorSchema, Kind: kind, Subject: subject, Versions: map[string]string{}, Files: []api.DoctorFile{}, Errors: []api.DoctorError{},
	}}
}

// fail notes why a file is missing. It does nothing for nil.
func (a *archive) fail(name string, err error) {
	if err == nil {
		return
	}
	text := agentlab.OneLine(a.clean(err.Error()), maxText)
	a.manifest.Errors = append(a.manifest.Errors, api.DoctorError{Name: name, Code: string(agentlab.CodeOf(err)), Message: text})
}

// doc adds a value as indented JSON.
func (a *archive) doc(name string, v any) {
	text, err := encode(v, "  ")
	if err == nil && len(text) > maxFile {
		err = agentlab.Errorf(agentlab.CodeLimit, "it has %d bytes, more than %d", len(text), maxFile)
	}
	if err != nil {
		a.fail(name, err)
		return
	}
	a.put(name, a.clean(text), "")
}

// The part of a list that is kept if it has more than maxRows rows, or of its
// text if it is longer than maxFile.
const (
	firstRows  = false
	newestRows = true
)

// addRows adds a list as lines of JSON, or notes the error with which it was
// read. One row more than maxRows means that there are more.
func addRows[T any](a *archive, name string, newest bool, rows []T, err error) {
	note := ""
	if len(rows) > maxRows {
		note = fmt.Sprintf("only the first %d", maxRows)
		if newest {
			note = fmt.Sprintf("only the newest %d", maxRows)
			rows = rows[len(rows)-maxRows:]
		}
		rows = rows[:maxRows]
	}
	var b strings.Builder
	for _, row := range rows {
		line, rowErr := encode(row, "")
		err = errors.Join(err, rowErr)
		b.WriteString(line)
	}
	if err != nil {
		a.fail(name, err)
		return
	}
	a.put(name, a.clean(b.String()), note)
}

// tail adds the end of a log. The reader begins skip bytes after its beginning;
// if that is not 0, the first tailMargin bytes are read but not added. A first line
// and a last word that were cut are left out: the patterns of credentials match whole
// ones.
func (a *archive) tail(name string, skip int64, r io.Reader) error {
	end := tailBuffer{discard: skip > 0}
	w := a.redact.Writer(&end)
	var before int64
	if end.discard {
		var err error
		if before, err = io.CopyN(w, r, tailMargin); err != nil && !errors.Is(err, io.EOF) {
			return err
		}
		end.discard = false
	}
	n, err := io.Copy(w, r)
	if err == nil {
		err = w.Flush()
	}
	if err != nil {
		return err
	}
	text, note := string(end.buf), ""
	if skip > 0 || end.cut {
		note = fmt.Sprintf("only the end of %d bytes", skip+before+n)
		if i := strings.IndexAny(text, "\r\n"); i >= 0 {
			text = text[i+1:]
		} else {
			text = ""
		}
	}
	if l, ok := r.(*io.LimitedReader); ok && l.N == 0 { // the log may have grown, or be longer
		if n, _ := io.ReadFull(l.R, make([]byte, 1)); n > 0 {
			text = text[:strings.LastIndexAny(text, " \t\r\n")+1]
		}
	}
	a.put(name, a.clean(text), note)
	return nil
}

// tailBuffer keeps the last maxTail bytes that are written to it.
type tailBuffer struct {
	buf     []byte
	cut     bool
	discard bool // what is written now
}

func (t *tailBuffer) Write(p []byte) (int, error) {
	if t.discard {
		return len(p), nil
	}
	t.buf = append(t.buf, p...)
	if over := len(t.buf) - maxTail; over > 0 {
		t.buf, t.cut = t.buf[:copy(t.buf, t.buf[over:])], true
	}
	return len(p), nil
}

// put adds text that is clean.
func (a *archive) put(name, text, note string) {
	if over := len(text) - maxFile; over > 0 { // whole lines from the end
		text = text[over:]
		text = text[strings.IndexByte(text, '\n')+1:]
		note = fmt.Sprintf("only the last %d bytes", len(text))
	}
	if a.size+len(text) > maxBundle {
		a.fail(name, agentlab.Errorf(agentlab.CodeLimit, "the bundle has reached its limit of %d bytes", maxBundle))
		return
	}
	a.size += len(text)
	a.data[name] = []byte(text)
	sum := sha256.Sum256([]byte(text))
	a.manifest.Files = append(a.manifest.Files, api.DoctorFile{Name: name, Size: int64(len(text)), SHA256: hex.EncodeToString(sum[:]), Truncated: note})
}

// bytes returns the archive: the manifest and the files in the order of their
// names, without times and owners.
func (a *archive) bytes() ([]byte, error) {
	slices.SortFunc(a.manifest.Files, func(x, y api.DoctorFile) int { return cmp.Compare(x.Name, y.Name) })
	for name, v := range a.manifest.Versions {
		a.manifest.Versions[name] = agentlab.OneLine(a.clean(v), maxText)
	}
	text, err := encode(a.manifest, "  ")
	if err != nil {
		return nil, err
	}
	var out bytes.Buffer
	zw := gzip.NewWriter(&out)
	tw := tar.NewWriter(zw)
	err = addEntry(tw, api.DoctorManifestName, []byte(text))
	for _, f := range a.manifest.Files {
		err = errors.Join(err, addEntry(tw, f.Name, a.data[f.Name]))
	}
	if err = errors.Join(err, tw.Close(), zw.Close()); err != nil {
		return nil, err
	}
	return out.Bytes(), nil
}

func addEntry(tw *tar.Writer, name string, data []byte) error {
	h := &tar.Header{Typeflag: tar.TypeReg, Format: tar.FormatUSTAR, Name: name, Mode: 0o600, Size: int64(len(data))}
	err := tw.WriteHeader(h)
	if err == nil {
		_, err = tw.Write(data)
	}
	return err
}

// encode returns v as JSON and a line break. Characters of HTML stay as they are,
// so that more secrets are found.
func encode(v any, indent string) (string, error) {
	var b strings.Builder
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", indent)
	err := enc.Encode(v)
	return b.String(), err
}

// credentials are recognised by their form: tokens of the API, of which the
// daemon stores only hashes, and private keys.
var credentials = []*lazyre.Regexp{
	lazyre.New(`agentlab_[a-z2-9]{20,}`),
	lazyre.New(`(?i)AGE-SECRET-KEY-1[0-9A-Z]+`),
	// A key does not contain a quotation mark, so the rest of a list stays: a guest
	// hides only its own text. The second form is a key without its end, the third
	// one whose beginning was cut off.
	lazyre.New(`-----BEGIN [A-Z0-9 ]*PRIVATE KEY-----[^"]*?-----END [A-Z0-9 ]*PRIVATE KEY-----`),
	lazyre.New(`-----BEGIN [A-Z0-9 ]*PRIVATE KEY-----[^"]*`),
	lazyre.New(`\A[A-Za-z0-9+/=\r\n]*-----END [A-Z0-9 ]*PRIVATE KEY-----`),
	lazyre.New(`(?i)\b(Bearer|Basic) +[A-Za-z0-9._~+/=-]{8,}`),
}

// clean removes secrets, and writes each character that is not printable as its
// escape in JSON, so that no text of a guest controls a terminal.
func (a *archive) clean(text string) string {
	text = a.redact.String(text)
	for _, re := range credentials {
		text = re.ReplaceAllString(text, redact.Replacement)
	}
	var b strings.Builder
	b.Grow(len(text))
	for i := 0; i < len(text); {
		r, n := utf8.DecodeRuneInString(text[i:])
		switch {
		case r == '\n' || r == '\t' || r != utf8.RuneError && unicode.IsPrint(r):
			b.WriteRune(r)
		case r == '\r' && strings.HasPrefix(text[i+1:], "\n"):
		case r > 0xffff:
			hi, lo := utf16.EncodeRune(r)
			fmt.Fprintf(&b, `\u%04x\u%04x`, hi, lo)
		default:
			fmt.Fprintf(&b, `\u%04x`, r)
		}
		i += n
	}
	return b.String()
}

// eventLine is a row of events whose data is not a text in the text.
type eventLine struct {
	agentlab.Event
	Data json.RawMessage
}

func eventLines(events []agentlab.Event) []eventLine {
	out := make([]eventLine, 0, len(events))
	for _, e := range events {
		line := eventLine{Event: e}
		if json.Valid([]byte(e.Data)) {
			line.Data = json.RawMessage(e.Data)
		}
		out = append(out, line)
	}
	return out
}

// openLog opens a bounded log before the bytes that tail adds.
func openLog(path string) (f *os.File, skip int64, err error) {
	f, err = os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW, 0)
	if err != nil {
		return nil, 0, fsfault.Own(err, "", "cannot open the log")
	}
	size, err := f.Seek(0, io.SeekEnd)
	if err == nil {
		skip, err = f.Seek(max(size-maxTail-tailMargin, 0), io.SeekStart)
	}
	if err != nil {
		_ = f.Close()
		return nil, 0, fsfault.Own(err, "", "cannot read the log")
	}
	return f, skip, nil
}

// readSecretFile reads a file with a credential of the daemon. A file that does
// not exist has none.
func readSecretFile(path string) (string, error) {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	defer func() { _ = f.Close() }()
	text, err := io.ReadAll(io.LimitReader(f, maxSecretFile+1))
	if len(text) > maxSecretFile {
		return "", agentlab.Errorf(agentlab.CodeLimit, "%s has more than %d bytes", path, maxSecretFile)
	}
	return strings.TrimSpace(string(text)), err
}
