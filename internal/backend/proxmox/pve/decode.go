package pve

import (
	"bytes"
	"encoding/json"
	"math"
	"strconv"
	"strings"

	"github.com/agentlab-vm/agentlab"
)

// Int is an integer as Proxmox sends it: a JSON number, a string with a number
// ("512", nextid's "100") or null, which is 0. A fraction is truncated;
// anything else is an error.
type Int int64

// UnmarshalJSON implements json.Unmarshaler.
func (i *Int) UnmarshalJSON(b []byte) error {
	s, err := scalar(b)
	if err != nil {
		return err
	}
	if s == "" {
		*i = 0
		return nil
	}
	if n, err := strconv.ParseInt(s, 10, 64); err == nil {
		*i = Int(n)
		return nil
	}
	f, err := strconv.ParseFloat(s, 64)
	if err != nil || math.IsNaN(f) || f < -(1<<62) || f > 1<<62 {
		return agentlab.Errorf(agentlab.CodeInternal, "%s is not a number", strconv.Quote(agentlab.OneLine(s, 40)))
	}
	*i = Int(f)
	return nil
}

// Bool is a boolean as Proxmox sends it: 1, 0, true, false, the same as
// strings, "" or null.
type Bool bool

// UnmarshalJSON implements json.Unmarshaler.
func (v *Bool) UnmarshalJSON(b []byte) error {
	s, err := scalar(b)
	if err != nil {
		return err
	}
	switch strings.ToLower(s) {
	case "1", "true", "yes", "on":
		*v = true
	case "", "0", "false", "no", "off":
		*v = false
	default:
		return agentlab.Errorf(agentlab.CodeInternal, "%s is not a boolean", strconv.Quote(agentlab.OneLine(s, 40)))
	}
	return nil
}

// Str is a text as Proxmox sends it: a JSON string, or a number or boolean if
// the text looks like one. null is "".
type Str string

// UnmarshalJSON implements json.Unmarshaler.
func (v *Str) UnmarshalJSON(b []byte) error {
	s, err := scalar(b)
	if err != nil {
		return err
	}
	*v = Str(s)
	return nil
}

// scalar returns the text of a JSON string, number, boolean (1 or 0) or null
// ("").
func scalar(b []byte) (string, error) {
	b = bytes.TrimSpace(b)
	switch {
	case len(b) == 0 || bytes.Equal(b, []byte("null")):
		return "", nil
	case bytes.Equal(b, []byte("true")):
		return "1", nil
	case bytes.Equal(b, []byte("false")):
		return "0", nil
	case b[0] == '"':
		var s string
		if err := json.Unmarshal(b, &s); err != nil {
			return "", agentlab.Errorf(agentlab.CodeInternal, "not JSON: %w", err)
		}
		return s, nil
	case b[0] == '{' || b[0] == '[':
		return "", agentlab.Errorf(agentlab.CodeInternal, "%s where one value was expected", agentlab.OneLine(string(b), 40))
	}
	return string(b), nil
}

// Config is the configuration of a VM: option to value, each as text, e.g.
// "memory": "512", "onboot": "1", "net0": "virtio=BC:…,bridge=vmbr1". The
// description is plain text, as the API returns it.
type Config map[string]string

// UnmarshalJSON implements json.Unmarshaler. A value that is a list or object
// becomes its JSON text, so that no option is lost.
func (c *Config) UnmarshalJSON(b []byte) error {
	var raw map[string]json.RawMessage
	if err := json.Unmarshal(b, &raw); err != nil {
		return agentlab.Errorf(agentlab.CodeInternal, "the configuration is not an object: %w", err)
	}
	m := make(Config, len(raw))
	for k, v := range raw {
		if isNull(v) {
			continue
		}
		m[k] = optionText(v)
	}
	*c = m
	return nil
}

// optionText returns the text of the value of an option.
func optionText(v json.RawMessage) string {
	s, err := scalar(v)
	if err != nil {
		return string(v)
	}
	return s
}

// isNull reports whether a value is missing or null.
func isNull(v json.RawMessage) bool {
	return len(v) == 0 || bytes.Equal(bytes.TrimSpace(v), []byte("null"))
}

// Digest returns the digest of this version of the configuration, for
// Changes.Digest.
func (c Config) Digest() string { return c["digest"] }

func splitTags(s string) []string {
	return strings.FieldsFunc(s, func(r rune) bool { return r == ';' || r == ',' || r == ' ' })
}

// Props is a property string of Proxmox, e.g. "virtio=BC:…,bridge=vmbr1": an
// ordered list of key=value. A part without a key has Key "".
type Props []Prop

// Prop is one part of a property string.
type Prop struct{ Key, Value string }

// ParseProps parses a property string. It accepts every text.
func ParseProps(s string) Props {
	if s == "" {
		return nil
	}
	var p Props
	for part := range strings.SplitSeq(s, ",") {
		if k, v, ok := strings.Cut(part, "="); ok {
			p = append(p, Prop{strings.TrimSpace(k), v})
		} else {
			p = append(p, Prop{"", part})
		}
	}
	return p
}

// Get returns the value of a key and whether it is set; "" is the part without
// a key, e.g. the volume of a drive.
func (p Props) Get(key string) (string, bool) {
	for _, e := range p {
		if e.Key == key {
			return e.Value, true
		}
	}
	return "", false
}
