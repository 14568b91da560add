package backend

import (
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"

	"github.com/agentlab-vm/agentlab"
)

// Option is a key of profiles that only some backends have.
type Option struct {
	Path  string                 // of the key: "network.model"
	Name  string                 // in Spec.Options: "nic_model"
	Zero  any                    // "", false or 0; values of the key have its type. false is the same as no key
	Valid func(text string) bool // rejects values that are invalid on every host of the backend; nil accepts every value
	What  string                 // describes valid values: "the name of a bridge"
	// Image returns the name of the image that a value means. Such a key
	// excludes the key image; its value becomes Spec.Image instead of an entry of
	// Spec.Options.
	Image func(text string) string
}

// Check returns an error with code invalid for a value that is not Valid.
func (o Option) Check(value any) error {
	text := fmt.Sprint(value)
	if o.Valid == nil || o.Valid(text) {
		return nil
	}
	return agentlab.Errorf(agentlab.CodeInvalid, "%q is not %s", text, o.What).WithField(o.Path)
}

// CheckOptions returns an error for an option that the backend does not have
// (code unsupported) or whose value has another type or is not Valid (code
// invalid), and the error of OptionsOK.
func (i Info) CheckOptions(o agentlab.Options) error {
	var values map[string]json.RawMessage
	if err := o.Decode(&values); err != nil {
		return agentlab.Errorf(agentlab.CodeInvalid, "the options are not a JSON object: %w", err)
	}
	for _, name := range slices.Sorted(maps.Keys(values)) {
		at := slices.IndexFunc(i.Options, func(known Option) bool { return known.Name == name && known.Image == nil })
		if at < 0 {
			return agentlab.Errorf(agentlab.CodeUnsupported, "backend %s has no such option", i.Name).WithField(name)
		}
		known := i.Options[at]
		v := reflect.New(reflect.TypeOf(known.Zero))
		if err := json.Unmarshal(values[name], v.Interface()); err != nil {
			return agentlab.Errorf(agentlab.CodeInvalid, "the value is not a %T", known.Zero).WithField(known.Path)
		}
		if err := known.Check(v.Elem().Interface()); err != nil {
			return err
		}
	}
	if i.OptionsOK != nil {
		return i.OptionsOK(o)
	}
	return nil
}
