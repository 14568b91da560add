package config

import (
	"fmt"
	"reflect"
	"slices"
)

// Values of the tag doctor. Numbers and booleans are always shown.
const (
	tagShow       = "show"        // the value is not secret
	tagSecretFile = "secret-file" // the path of a file whose content is secret
)

// hidden is what is shown instead of a text that may be secret.
const hidden = "(set)"

// Shown returns the configuration for a doctor bundle, as maps and lists. A text
// is shown only if its field has the tag doctor: a new key is hidden until
// its author has decided that the value is not secret.
func (c Config) Shown() map[string]any {
	out := showStruct(reflect.ValueOf(c))
	shown := map[string]any{}
	for _, in := range c.instances {
		one := map[string]any{}
		if in.Section != nil {
			one = showStruct(reflect.Indirect(reflect.ValueOf(in.Section)))
		}
		one["driver"] = in.Driver
		shown[in.Name] = one
	}
	out["backends"] = shown
	return out
}

func showStruct(v reflect.Value) map[string]any {
	out := map[string]any{}
	for i := range v.NumField() {
		if f := v.Type().Field(i); f.Tag.Get("yaml") != "" {
			out[f.Tag.Get("yaml")] = show(v.Field(i), slices.Contains([]string{tagShow, tagSecretFile}, f.Tag.Get("doctor")))
		}
	}
	return out
}

func show(v reflect.Value, open bool) any {
	switch v.Kind() {
	case reflect.Struct:
		return showStruct(v)
	case reflect.Slice:
		list := []any{}
		for i := range v.Len() {
			list = append(list, show(v.Index(i), open))
		}
		return list
	case reflect.Map:
		if !open {
			break
		}
		out := map[string]any{}
		for it := v.MapRange(); it.Next(); {
			out[fmt.Sprint(it.Key())] = show(it.Value(), open)
		}
		return out
	case reflect.Bool, reflect.Int, reflect.Int64, reflect.Float64:
		return v.Interface()
	default:
	}
	switch {
	case v.IsZero():
		return ""
	case open && v.Kind() == reflect.String:
		return v.String()
	}
	return hidden
}

// SecretFiles returns the paths of the files whose content is secret, sorted.
func (c Config) SecretFiles() []string {
	paths := secretFiles(reflect.ValueOf(c))
	for _, in := range c.instances {
		if in.Section != nil {
			paths = append(paths, secretFiles(reflect.Indirect(reflect.ValueOf(in.Section)))...)
		}
	}
	slices.Sort(paths)
	return slices.Compact(paths)
}

func secretFiles(v reflect.Value) (paths []string) {
	for i := range v.NumField() {
		f, value := v.Type().Field(i), v.Field(i)
		switch {
		case value.Kind() == reflect.Struct:
			paths = append(paths, secretFiles(value)...)
		case f.Tag.Get("doctor") == tagSecretFile && value.String() != "":
			paths = append(paths, value.String())
		}
	}
	return paths
}
