package strictyaml

import (
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"github.com/goccy/go-yaml/ast"

	"github.com/agentlab-vm/agentlab"
)

// Any is the type of a field whose value is ignored; it becomes true if the
// key is present.
type Any bool

// Decode stores the document in v, a pointer to a struct whose fields have
// `yaml:"name"` tags and are structs, pointers, slices, strings, bools, ints, maps
// from string to string, or Any. Fields without a key keep their value; null is
// the same as a missing key. Errors have code invalid, the key's path as Field,
// and its line. A field's tag `hint:"..."` is the hint of an error about its
// value.
func (d *Document) Decode(v any) error { return d.DecodeMore(v, nil) }

// DecodeMore is Decode for a document with further keys: the value of each path
// in more is stored in its entry, which is a pointer. The parents of a path need
// not be in v.
func (d *Document) DecodeMore(v any, more map[string]any) error {
	if _, null := d.body.(*ast.NullNode); d.body == nil || null {
		return nil
	}
	return further(more).decodeStruct(d.body, "", reflect.ValueOf(v).Elem())
}

// further are pointers for the values of keys that are not fields, by path.
type further map[string]any

// below returns the pointers for the keys of the mapping at path, by name. A key
// that is only a parent of further keys gets a struct without fields.
func (f further) below(path string) map[string]any {
	out := map[string]any{}
	for at, into := range f {
		rest, ok := strings.CutPrefix(at, join(path, ""))
		name, _, parent := strings.Cut(rest, ".")
		switch {
		case !ok:
		case !parent:
			out[name] = into
		case out[name] == nil:
			out[name] = &struct{}{}
		}
	}
	return out
}

func (f further) decode(n ast.Node, path string, v reflect.Value) error {
	if v.Type() == reflect.TypeFor[Any]() {
		v.SetBool(true)
		return nil
	}
	if _, ok := n.(*ast.NullNode); ok {
		return nil
	}
	switch v.Kind() {
	case reflect.Pointer:
		if v.IsNil() {
			v.Set(reflect.New(v.Type().Elem()))
		}
		return f.decode(n, path, v.Elem())
	case reflect.Struct:
		return f.decodeStruct(n, path, v)
	case reflect.Map:
		return f.decodeMap(n, path, v)
	case reflect.Slice:
		seq, ok := n.(*ast.SequenceNode)
		if !ok {
			return refuse(n, path, "a list is expected")
		}
		out := reflect.MakeSlice(v.Type(), len(seq.Values), len(seq.Values))
		for i, item := range seq.Values {
			if err := f.decode(item, fmt.Sprintf("%s[%d]", path, i), out.Index(i)); err != nil {
				return err
			}
		}
		v.Set(out)
		return nil
	default:
		return decodeScalar(n, path, v)
	}
}

func (f further) decodeStruct(n ast.Node, path string, v reflect.Value) error {
	m, ok := n.(ast.MapNode)
	if !ok {
		return refuse(n, path, "a mapping of keys to values is expected")
	}
	fields := map[string]int{}
	for i := range v.NumField() {
		if name, ok := v.Type().Field(i).Tag.Lookup("yaml"); ok {
			fields[name] = i
		}
	}
	more := f.below(path)
	for it := m.MapRange(); it.Next(); {
		name, _ := scalar(it.Key())
		if i, ok := fields[name]; ok {
			if err := f.decode(it.Value(), join(path, name), v.Field(i)); err != nil {
				return withHint(err, join(path, name), v.Type().Field(i).Tag.Get("hint"))
			}
			continue
		}
		into, ok := more[name]
		if !ok {
			return unknown(it.Key(), path, name, slices.Concat(slices.Collect(maps.Keys(fields)), slices.Collect(maps.Keys(more))))
		}
		if err := f.decode(it.Value(), join(path, name), reflect.ValueOf(into)); err != nil {
			return err
		}
	}
	return nil
}

// withHint returns err with a hint if it is about the field path and has none.
func withHint(err error, path, hint string) error {
	e, ok := errors.AsType[*agentlab.Error](err)
	if !ok || hint == "" || e.Hint != "" || e.Field != path {
		return err
	}
	return e.WithHint("%s", hint)
}

func unknown(n ast.Node, path, name string, names []string) error {
	e := refuse(n, join(path, name), "unknown key")
	if near := Nearest(name, names); near != "" {
		return e.WithHint("did you mean %q?", join(path, near))
	}
	slices.Sort(names)
	names = slices.Compact(names) // a mapping with fields may have further keys
	where := "here"
	if path != "" {
		where = "in " + path
	}
	return e.WithHint("the keys %s are %s", where, strings.Join(names, ", "))
}

func (f further) decodeMap(n ast.Node, path string, v reflect.Value) error {
	m, ok := n.(ast.MapNode)
	if !ok {
		return refuse(n, path, "a mapping of keys to values is expected")
	}
	out := reflect.MakeMap(v.Type())
	for it := m.MapRange(); it.Next(); {
		name, _ := scalar(it.Key())
		item := reflect.New(v.Type().Elem()).Elem()
		if err := f.decode(it.Value(), join(path, name), item); err != nil {
			return err
		}
		out.SetMapIndex(reflect.ValueOf(name), item)
	}
	v.Set(out)
	return nil
}

// decimal reports whether an integer is in plain decimal notation. YAML's
// octal, hexadecimal and underscored forms are not allowed, because they are
// often unintended.
func decimal(s string) bool {
	s = strings.TrimPrefix(s, "-")
	return s == "0" || s != "" && s[0] != '0' && strings.Trim(s, "0123456789") == ""
}

func decodeScalar(n ast.Node, path string, v reflect.Value) error {
	switch v.Kind() {
	case reflect.String:
		switch n.(type) {
		case *ast.StringNode, *ast.LiteralNode, *ast.IntegerNode, *ast.FloatNode:
			s, _ := scalar(n)
			v.SetString(s)
			return nil
		}
		return refuse(n, path, "text is expected; put it between quotes")
	case reflect.Bool:
		b, ok := n.(*ast.BoolNode)
		if !ok {
			return refuse(n, path, "true or false is expected")
		}
		v.SetBool(b.Value)
		return nil
	case reflect.Int, reflect.Int64:
		if _, ok := n.(*ast.IntegerNode); ok {
			text, _ := scalar(n)
			if i, err := strconv.ParseInt(text, 10, 64); err == nil && decimal(text) && !v.OverflowInt(i) {
				v.SetInt(i)
				return nil
			}
		}
		return refuse(n, path, "a whole number is expected")
	default:
		return agentlab.Errorf(agentlab.CodeInternal, "no rule for a %s", v.Type()).WithField(path)
	}
}
