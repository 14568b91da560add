package mcp

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
	"sync"
	"unicode"
	"unicode/utf8"

	"github.com/charmbracelet/x/ansi"

	"github.com/agentlab-vm/agentlab/internal/bounded"
)

// How much of an output is kept, in bytes: its beginning and its end. Models do not read
// more.
const (
	keptHead = 8 << 10
	keptTail = 32 << 10
)

// Output is an io.Writer that keeps the beginning and the end of what is written to it,
// in bounded memory. Its zero value is empty. It is safe for concurrent use: a command
// may still write when it has ended, for example the progress of what it sends.
type Output struct {
	mu      sync.Mutex
	head    bounded.Head
	tail    bounded.Tail // without the head
	written int
}

// Write implements io.Writer. It never fails.
func (o *Output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.head.Max, o.tail.Max = keptHead, keptTail
	_, _ = o.head.Write(p)                                           // these never fail
	_, _ = o.tail.Write(p[min(max(keptHead-o.written, 0), len(p)):]) // as above
	o.written += len(p)
	return len(p), nil
}

// Text returns what was kept, cleaned (see Clean). A line says how much is missing.
func (o *Output) Text() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	left := o.written - keptHead - keptTail
	if left <= 0 {
		return Clean(o.head.String() + o.tail.String())
	}
	return fmt.Sprintf("%s\n[%d bytes are left out here]\n%s", Clean(o.head.String()), left, Clean(o.tail.String()))
}

const brailleBlank = '\u2800'

// Clean returns text of a guest as its user would see it: without escape sequences, and
// with ? for control characters and for characters that cannot be seen, in which a guest
// could hide instructions for a model.
func Clean(s string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case r == '\n' || r == '\t':
			return r
		case r == '\r':
			return -1
		case unicode.IsSpace(r):
			return ' '
		case r == utf8.RuneError || !unicode.IsPrint(r) || unicode.In(r, unicode.Variation_Selector, unicode.Other_Default_Ignorable_Code_Point) || r == brailleBlank:
			return '?'
		}
		return r
	}, ansi.Strip(s))
}

// CleanJSON returns a JSON object with clean strings, after change has changed it; ok is
// false if text is no object.
func CleanJSON(text string, change func(map[string]any)) (object json.RawMessage, ok bool) {
	dec := json.NewDecoder(strings.NewReader(text))
	dec.UseNumber()
	var v map[string]any
	if dec.Decode(&v) != nil || v == nil || dec.More() {
		return nil, false
	}
	change(v)
	var out bytes.Buffer
	enc := json.NewEncoder(&out)
	enc.SetEscapeHTML(false)
	err := enc.Encode(cleanStrings(v))
	return bytes.TrimSpace(out.Bytes()), err == nil
}

func cleanStrings(v any) any {
	switch v := v.(type) {
	case string:
		return Clean(v)
	case []any:
		for i := range v {
			v[i] = cleanStrings(v[i])
		}
	case map[string]any:
		out := make(map[string]any, len(v))
		for key, of := range v {
			out[Clean(key)] = cleanStrings(of)
		}
		return out
	}
	return v
}
