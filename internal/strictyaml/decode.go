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
func (d *Document) Decode(v any) error { return d.DecodeSections(v, nil) }

// DecodeSections is Decode for a document with further top-level keys: the
// value of each is stored in the entry of sections for that key, also a
// pointer to a struct.
func (d *Document) DecodeSections(v any, sections map[string]any) error {
	if _, null := d.body.(*ast.NullNode); d.body == nil || null {
		return nil
	}
	return decodeStruct(d.body, "", reflect.ValueOf(v).Elem(), sections)
}

func decode(n ast.Node, path string, v reflect.Value) error {
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
		return decode(n, path, v.Elem())
	case reflect.Struct:
		return decodeStruct(n, path, v, nil)
	case reflect.Map:
		return decodeMap(n, path, v)
	case reflect.Slice:
		seq, ok := n.(*ast.SequenceNode)
		if !ok {
			return refuse(n, path, "a list is expected")
		}
		out := reflect.MakeSlice(v.Type(), len(seq.Values), len(seq.Values))
		for i, item := range seq.Values {
			if err := decode(item, fmt.Sprintf("%s[%d]", path, i), out.Index(i)); err != nil {
				return err
			}
		}
		v.Set(out)
		return nil
	default:
		return decodeScalar(n, path, v)
	}
}

func decodeStruct(n ast.Node, path string, v reflect.Value, sections map[string]any) error {
	m, ok := n.(ast.MapNode)
	if !ok {
		return refuse(n, path, "a mapping of keys to values is expected")
	}
	fields := map[string]int{}
	names := slices.Collect(maps.Keys(sections))
	for i := range v.NumField() {
		if name, ok := v.Type().Field(i).Tag.Lookup("yaml"); ok {
			fields[name] = i
			names = append(names, name)
		}
	}
	for it := m.MapRange(); it.Next(); {
		name, _ := scalar(it.Key())
		if into, ok := sections[name]; ok {
			if err := decode(it.Value(), join(path, name), reflect.ValueOf(into)); err != nil {
				return err
			}
			continue
		}
		i, ok := fields[name]
		if !ok {
			return unknown(it.Key(), path, name, names)
		}
		if err := decode(it.Value(), join(path, name), v.Field(i)); err != nil {
			return withHint(err, join(path, name), v.Type().Field(i).Tag.Get("hint"))
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
	where := "here"
	if path != "" {
		where = "in " + path
	}
	return e.WithHint("the keys %s are %s", where, strings.Join(names, ", "))
}

func decodeMap(n ast.Node, path string, v reflect.Value) error {
	m, ok := n.(ast.MapNode)
	if !ok {
		return refuse(n, path, "a mapping of keys to values is expected")
	}
	out := reflect.MakeMap(v.Type())
	for it := m.MapRange(); it.Next(); {
		name, _ := scalar(it.Key())
		item := reflect.New(v.Type().Elem()).Elem()
		if err := decode(it.Value(), join(path, name), item); err != nil {
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
