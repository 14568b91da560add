package profile

import (
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

// optionKey is a key that only some backends have.
type optionKey struct {
	backend.Option
	backends []string // their names
}

// optionKeys are such keys by path.
type optionKeys map[string]optionKey

// add adds the keys of a backend. If two backends have a key, the first one
// determines which values are valid.
func (k optionKeys) add(name string, list []backend.Option) {
	for _, o := range list {
		known, ok := k[o.Path]
		if !ok {
			known.Option = o
		}
		known.backends = append(known.backends, name)
		k[o.Path] = known
	}
}

// decode stores the text in d. Of the keys that only some backends have, it
// checks the values and makes the options and the image of the profile.
func (d *Doc) decode(keys optionKeys) error {
	values, options := map[string]any{}, map[string]any{}
	for path, o := range keys {
		values[path] = reflect.New(reflect.PointerTo(reflect.TypeOf(o.Zero))).Interface()
	}
	if err := d.yaml.DecodeMore(d, values); err != nil {
		return err
	}
	for _, k := range d.yaml.Keys() {
		o, ok := keys[k.Path]
		if !ok {
			continue
		}
		v := reflect.ValueOf(values[k.Path]).Elem()
		if v.IsNil() || v.Elem().Interface() == false {
			continue
		}
		value := v.Elem().Interface()
		if err := o.Check(value); err != nil {
			return d.yaml.At(err)
		}
		d.optionKeys = append(d.optionKeys, o)
		switch {
		case o.Image == nil:
			options[o.Name] = value
		case d.Image != "":
			return d.yaml.At(invalid(o.Path, "image and %s cannot be used together", o.Path).WithHint("remove one of the two"))
		default:
			d.Image = o.Image(fmt.Sprint(value))
		}
	}
	if len(options) == 0 {
		return nil
	}
	text, err := json.Marshal(options)
	d.options = agentlab.Options(text)
	return err
}

// optionsUsable returns why the backend that info describes does not honour the
// options; nil means that it does.
func (d *Doc) optionsUsable(info backend.Info) error {
	for _, k := range d.optionKeys {
		if !slices.ContainsFunc(info.Options, func(o backend.Option) bool { return o.Path == k.Path }) {
			return agentlab.Errorf(agentlab.CodeUnsupported, "only backend %s has this key", strings.Join(k.backends, ", ")).
				WithField(k.Path).WithHint("remove it, or move it to a profile for that backend")
		}
	}
	return info.CheckOptions(d.options)
}
