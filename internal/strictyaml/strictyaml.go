// Package strictyaml parses the YAML files that users write for AgentLab:
// configuration, profiles, secrets bundles, project files.
//
// It is stricter than YAML, to detect mistakes: an unknown key is an error
// with its line and the nearest known key, a duplicate key is an error, a
// value of another type is never converted, and anchors, aliases, tags and
// merge keys, with which a short file can expand to a huge or different one,
// are rejected. Errors never contain a value of the file, because it may be a
// secret.
package strictyaml

import (
	"errors"
	"fmt"
	"strings"

	"github.com/goccy/go-yaml"
	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/lexer"
	"github.com/goccy/go-yaml/parser"
	"github.com/goccy/go-yaml/token"

	"github.com/agentlab-vm/agentlab"
)

// MaxBytes is the maximum size of a text, and MaxKeys the maximum number of
// mapping keys in it. The parser copies the rest of a mapping for each of its
// keys, so without a limit the time grows quadratically.
const (
	MaxBytes = 256 << 10
	MaxKeys  = 2000
)

// Document is one parsed YAML document.
type Document struct {
	body  ast.Node // nil for an empty document
	keys  []Key
	items []Key // of sequences; without names
}

// Key is one mapping key of a document.
type Key struct {
	Name string // as written
	Path string // with its parents, "network.mode"; sequence items as "allow[2]"
	Line int    // counted from 1
	text string // the value, if it is a scalar
}

// Parse parses data, which must contain one document or none. Errors have code
// invalid and begin with "line N: " if the line is known.
func Parse(data []byte) (doc *Document, err error) {
	if len(data) > MaxBytes {
		return nil, agentlab.Errorf(agentlab.CodeInvalid, "%d bytes of YAML exceed the limit of %d", len(data), MaxBytes)
	}
	if strings.ContainsRune(string(data), 0) {
		return nil, agentlab.Errorf(agentlab.CodeInvalid, "not YAML: it contains a NUL byte")
	}
	defer func() {
		// A panic of the parser for unusual text is reported as an error of
		// the text, so that it does not end the daemon.
		if r := recover(); r != nil {
			doc, err = nil, agentlab.Errorf(agentlab.CodeInvalid, "not valid YAML")
		}
	}()
	if err := checkText(string(data)); err != nil {
		return nil, err
	}
	tokens := lexer.Tokenize(string(data))
	if err := checkAllowed(tokens); err != nil {
		return nil, err
	}
	if err := checkShape(tokens); err != nil {
		return nil, err
	}
	f, err := parser.Parse(tokens, 0)
	if err != nil {
		return nil, syntaxError(err)
	}
	doc = &Document{}
	for _, d := range f.Docs {
		if d.Body == nil {
			continue
		}
		if doc.body != nil {
			return nil, agentlab.Errorf(agentlab.CodeInvalid, "line %d: a second document; only one is allowed", line(d.Body))
		}
		doc.body = d.Body
	}
	if doc.body != nil {
		if err := doc.collect("", doc.body); err != nil {
			return nil, err
		}
	}
	return doc, nil
}

// Decode is Parse and Document.Decode.
func Decode(data []byte, v any) error {
	doc, err := Parse(data)
	if err != nil {
		return err
	}
	return doc.Decode(v)
}

// Keys returns every mapping key at every depth, in document order.
func (d *Document) Keys() []Key { return d.keys }

// Line returns the line of the key or sequence item with that path, 0 if there
// is none.
func (d *Document) Line(path string) int {
	for _, list := range [][]Key{d.keys, d.items} {
		for _, k := range list {
			if k.Path == path {
				return k.Line
			}
		}
	}
	return 0
}

// Text returns the scalar value of the key with that path, "" if there is none.
func (d *Document) Text(path string) string {
	for _, k := range d.keys {
		if k.Path == path {
			return k.text
		}
	}
	return ""
}

// nearestLine returns the line of path, or of the innermost key or item around
// it that is in the document.
func (d *Document) nearestLine(path string) int {
	for path != "" {
		if n := d.Line(path); n > 0 {
			return n
		}
		path = path[:max(strings.LastIndexAny(path, ".["), 0)]
	}
	return 0
}

// At returns err, if it is an Error that names a field of the document, with
// the field's line before its message. For a missing key it is the line of its
// parent.
func (d *Document) At(err error) error {
	e, ok := errors.AsType[*agentlab.Error](err)
	if !ok {
		return err
	}
	n := d.nearestLine(e.Field)
	if n == 0 {
		return err
	}
	c := *e
	c.Message = fmt.Sprintf("line %d: %s", n, e.Message)
	return &c
}

const (
	maxDepth = 50 // limits nesting, because the parser is recursive
	maxMarks = 10 // "---" and "..."

	maxEmpty = 100  // lines in a row
	maxChars = 1000 // tabs in a line, and "<"
)

// checkText limits what the lexer reads again for each of its characters: empty lines
// at the end of a block, tabs in quotes, and "<".
func checkText(text string) error {
	text = strings.NewReplacer("\r\n", "\n", "\r", "\n").Replace(text)
	n, empty := 0, 0
	for line := range strings.Lines(text) {
		n++
		if empty++; strings.Trim(line, " \t\n") != "" {
			empty = 0
		}
		if empty > maxEmpty {
			return agentlab.Errorf(agentlab.CodeInvalid, "line %d: more than %d empty lines in a row", n, maxEmpty)
		}
		for _, c := range []string{"\t", "<"} {
			if strings.Count(line, c) > maxChars {
				return agentlab.Errorf(agentlab.CodeInvalid, "line %d: more than %d characters %q", n, maxChars, c)
			}
		}
	}
	return nil
}

// checkAllowed refuses anchors, tags and a second document before the parser, whose time
// grows quadratically with their number, sees them.
func checkAllowed(tokens token.Tokens) error {
	const second = "a second document; only one is allowed"
	marks, body, ended := 0, false, false // "---" and "..."; whether there is content, and a mark after it
	for _, tk := range tokens {
		why := ""
		switch tk.Type {
		case token.AnchorType, token.AliasType:
			why = "anchors and aliases are not allowed"
		case token.TagType:
			why = "tags are not allowed"
		case token.DocumentHeaderType, token.DocumentEndType:
			marks, ended = marks+1, body
			if marks > maxMarks {
				why = second
			}
		case token.CommentType:
		default:
			body = true
			if ended {
				why = second
			}
		}
		if why != "" {
			return agentlab.Errorf(agentlab.CodeInvalid, "line %d: %s", tk.Position.Line, why)
		}
	}
	return nil
}

// checkShape limits the number of keys, and of tokens that begin a level
// without a new line. MaxKeys limits nesting by indentation, and MaxBytes
// limits it in sequences.
func checkShape(tokens token.Tokens) error {
	var flow []token.Type // the open "[" and "{"
	inLine, lastLine := 0, 0
	explicit, keys, bare := 0, 0, 0 // "? key" and "key:", and keys and items without a value; a pair "? key" and ": value" counts twice at most
	last := token.UnknownType
	for _, tk := range tokens {
		if tk.Position.Line != lastLine {
			inLine, lastLine = 0, tk.Position.Line
		}
		switch tk.Type {
		case token.SequenceStartType, token.MappingStartType:
			flow = append(flow, tk.Type)
		case token.SequenceEndType, token.MappingEndType:
			flow = flow[:max(len(flow)-1, 0)]
		case token.SequenceEntryType:
			inLine++
			if last == token.SequenceEntryType {
				bare++
			}
		case token.CollectEntryType:
			if len(flow) > 0 && flow[len(flow)-1] == token.MappingStartType {
				bare++
			}
		case token.MappingKeyType:
			inLine++
			explicit++
		case token.MappingValueType:
			keys++
		default:
		}
		if tk.Type != token.CommentType {
			last = tk.Type
		}
		if len(flow) > maxDepth || inLine > maxDepth {
			return agentlab.Errorf(agentlab.CodeInvalid, "line %d: nested more than %d levels deep", lastLine, maxDepth)
		}
		if max(explicit, keys, bare) > MaxKeys {
			return agentlab.Errorf(agentlab.CodeInvalid, "line %d: more than %d keys", lastLine, MaxKeys)
		}
	}
	return nil
}

// collect records the keys below n and returns an error for what this package
// rejects.
func (d *Document) collect(path string, n ast.Node) error {
	switch n := n.(type) {
	case ast.MapNode:
		seen := map[string]bool{}
		for it := n.MapRange(); it.Next(); {
			name, ok := scalar(it.Key())
			if !ok || it.Key().IsMergeKey() {
				return refuse(it.Key(), path, "this kind of key is not allowed")
			}
			k := Key{Name: name, Path: join(path, name), Line: line(it.Key())}
			k.text, _ = scalar(it.Value())
			if seen[name] {
				return refuse(it.Key(), k.Path, "the key is given twice")
			}
			seen[name] = true
			d.keys = append(d.keys, k)
			if err := d.collect(k.Path, it.Value()); err != nil {
				return err
			}
		}
	case *ast.SequenceNode:
		for i, v := range n.Values {
			item := Key{Path: fmt.Sprintf("%s[%d]", path, i), Line: line(v)}
			d.items = append(d.items, item)
			if err := d.collect(item.Path, v); err != nil {
				return err
			}
		}
	case *ast.AnchorNode, *ast.AliasNode:
		return refuse(n, path, "anchors and aliases are not allowed")
	case *ast.TagNode:
		return refuse(n, path, "tags are not allowed")
	}
	return nil
}

func refuse(n ast.Node, path, why string) *agentlab.Error {
	return agentlab.Errorf(agentlab.CodeInvalid, "line %d: %s", line(n), why).WithField(path)
}

func join(path, name string) string {
	if path == "" {
		return name
	}
	return path + "." + name
}

func line(n ast.Node) int {
	if tk := n.GetToken(); tk != nil && tk.Position != nil {
		return tk.Position.Line
	}
	return 0
}

// scalar returns the text of a plain, quoted or block scalar.
func scalar(n ast.Node) (string, bool) {
	switch n := n.(type) {
	case *ast.StringNode:
		return n.Value, true
	case *ast.LiteralNode:
		return n.Value.Value, true
	case *ast.IntegerNode, *ast.FloatNode, *ast.BoolNode, *ast.NullNode, *ast.InfinityNode, *ast.NanNode:
		return n.GetToken().Value, true
	}
	return "", false
}

// syntaxError returns the parser's reason and line without its excerpt of the
// text.
func syntaxError(err error) error {
	y, ok := errors.AsType[yaml.Error](err)
	if !ok {
		return agentlab.Errorf(agentlab.CodeInvalid, "not valid YAML")
	}
	where := ""
	if tk := y.GetToken(); tk != nil && tk.Position != nil {
		where = fmt.Sprintf("line %d: ", tk.Position.Line)
	}
	return agentlab.Errorf(agentlab.CodeInvalid, "%snot valid YAML%s", where, reason(y.GetMessage()))
}

// reason returns only messages that contain no text of the document.
func reason(msg string) string {
	for _, safe := range []string{
		"found character '\\t' that cannot start any token",
		"found a tab character",
		"could not find end character",
		"non-map value is specified",
		"unexpected key name",
		"value is not allowed in this context",
		"sequence end token ']' not found",
		"could not find flow mapping end token '}'",
		"mapping value is not allowed",
		"block sequence entries are not allowed",
	} {
		if strings.Contains(msg, safe) {
			return ": " + safe
		}
	}
	if strings.Contains(msg, "already defined") {
		return ": a key is given twice"
	}
	return ""
}
