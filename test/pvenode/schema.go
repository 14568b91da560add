package pvenode

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
)

type kind int

const (
	kString kind = iota
	kInt
	kNum
	kBool
)

// param is one parameter of a call, one option of a config, or one key of a
// property string.
type param struct {
	name           string
	kind           kind
	need           bool
	min, max       *float64
	minLen, maxLen int
	enum           []string
	pattern        *regexp.Regexp
	// format checks a string and returns what is wrong with it, as the real
	// one says it (with its newline), or "".
	format func(n *Node, s string) string
	// requires is another key of the property string that must be there too.
	requires string
	only9    bool // known to version 9 alone
	only8    bool // known to version 8 alone
}

func f64(v float64) *float64 { return &v }

// endpoint is one call of the API.
type endpoint struct {
	method, path string
	params       []param
	// options means that the options of a VM's config are parameters too.
	options bool
	perm    func(c *call) *Error
	run     func(c *call) (any, *Error)
	// only9 and only8 limit it to one version.
	only9, only8 bool
}

// find returns the endpoint of apiTable for a call, and the values in its path.
func (n *Node) find(method, path string) (*endpoint, values) {
	segs := strings.Split(strings.Trim(path, "/"), "/")
	for i := range apiTable {
		ep := &apiTable[i]
		if ep.method != method || (ep.only9 && !n.v9()) || (ep.only8 && n.v9()) {
			continue
		}
		if p, ok := matchPath(ep.path, segs); ok {
			return ep, p
		}
	}
	return nil, nil
}

func matchPath(template string, segs []string) (values, bool) {
	want := strings.Split(strings.Trim(template, "/"), "/")
	p := values{}
	for i, w := range want {
		if i >= len(segs) {
			return nil, false
		}
		if !strings.HasPrefix(w, "{") {
			if w != segs[i] {
				return nil, false
			}
			continue
		}
		name := strings.Trim(w, "{}")
		if name == "volume" && i == len(want)-1 { // it holds slashes
			p[name] = []string{strings.Join(segs[i:], "/")}
			return p, true
		}
		if segs[i] == "" {
			return nil, false
		}
		p[name] = []string{segs[i]}
	}
	return p, len(segs) == len(want)
}

// pathParams are the parameters that stand in paths.
var pathParams = map[string]param{
	"node":     {name: "node", format: formatNode},
	"vmid":     {name: "vmid", kind: kInt, format: formatVMID},
	"upid":     {name: "upid"},
	"storage":  {name: "storage", format: formatStorageID},
	"volume":   {name: "volume"},
	"snapname": {name: "snapname", format: formatConfigID, maxLen: 40},
}

// verify checks the parameters of a call and makes booleans of the command
// line "1" and "0".
func (ep *endpoint) verify(n *Node, p values, cli bool) *Error {
	faults := map[string]string{}
	known := map[string]param{}
	for _, seg := range strings.Split(ep.path, "/") {
		if strings.HasPrefix(seg, "{") {
			name := strings.Trim(seg, "{}")
			d, ok := pathParams[name]
			if !ok {
				d = param{name: name}
			}
			known[name] = d
		}
	}
	for _, d := range ep.params {
		if (d.only9 && !n.v9()) || (d.only8 && n.v9()) {
			continue
		}
		known[d.name] = d
		if d.need && !p.has(d.name) {
			faults[d.name] = "property is missing and it is not optional"
		}
	}
	for name := range p {
		d, ok := known[name]
		if !ok && ep.options {
			d, ok = n.option(name)
		}
		if !ok {
			faults[name] = "property is not defined in schema and the schema does not allow additional properties"
			continue
		}
		if d.kind == kBool && cli {
			p[name] = []string{cliBool(p.str(name))}
		}
		if f := d.check(n, p.str(name)); f != "" {
			faults[name] = f
		}
		if d.requires != "" && !p.has(d.requires) {
			faults[d.requires] = "missing property - '" + name + "' requires this property"
		}
	}
	if len(faults) > 0 {
		return &Error{Status: 400, Message: "Parameter verification failed.", Params: faults}
	}
	return nil
}

// cliBool reads a boolean of the command line.
func cliBool(s string) string {
	switch strings.ToLower(s) {
	case "1", "on", "yes", "true", "":
		return "1"
	case "0", "off", "no", "false":
		return "0"
	}
	return s
}

var (
	intRe = regexp.MustCompile(`^[+-]?\d+$`)
	numRe = regexp.MustCompile(`^[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?$`)
)

// check returns what is wrong with a value, or "".
func (d param) check(n *Node, s string) string {
	switch d.kind {
	case kInt:
		if !intRe.MatchString(s) {
			return fmt.Sprintf("type check ('integer') failed - got '%s'", s)
		}
	case kNum:
		if !numRe.MatchString(s) {
			return fmt.Sprintf("type check ('number') failed - got '%s'", s)
		}
	case kBool:
		if s != "0" && s != "1" {
			return fmt.Sprintf("type check ('boolean') failed - got '%s'", s)
		}
		return ""
	case kString:
	}
	if d.format != nil {
		if f := d.format(n, s); f != "" {
			return "invalid format - " + f
		}
	}
	if d.kind != kString {
		return d.checkRange(s)
	}
	return d.checkString(s)
}

func (d param) checkRange(s string) string {
	v, _ := strconv.ParseFloat(s, 64)
	if d.min != nil && v < *d.min {
		return "value must have a minimum value of " + strconv.FormatFloat(*d.min, 'f', -1, 64)
	}
	if d.max != nil && v > *d.max {
		return "value must have a maximum value of " + strconv.FormatFloat(*d.max, 'f', -1, 64)
	}
	return d.checkEnum(s)
}

func (d param) checkString(s string) string {
	if d.maxLen > 0 && len([]rune(s)) > d.maxLen {
		return fmt.Sprintf("value may only be %d characters long", d.maxLen)
	}
	if len([]rune(s)) < d.minLen {
		return fmt.Sprintf("value must be at least %d characters long", d.minLen)
	}
	if d.pattern != nil && !d.pattern.MatchString(s) {
		return "value does not match the regex pattern"
	}
	return d.checkEnum(s)
}

func (d param) checkEnum(s string) string {
	if len(d.enum) == 0 {
		return ""
	}
	for _, e := range d.enum {
		if e == s {
			return ""
		}
	}
	return fmt.Sprintf("value '%s' does not have a value in the enumeration '%s'", s, strings.Join(d.enum, ", "))
}

// propFormat is the format of a property string such as
// "virtio=…,bridge=vmbr1".
type propFormat struct {
	def   string            // the key of a value without key, "" for none
	alias map[string]string // another name of a key
	// models are keys that stand for the key "model" with their own name as
	// value, their value being that of "macaddr": of network devices.
	models []string
	props  []param
}

// parse reads a property string. The faults are those of its values, by key.
func (f *propFormat) parse(s string) (map[string]string, string) {
	out := map[string]string{}
	for _, part := range strings.Split(s, ",") {
		if strings.TrimSpace(part) == "" {
			continue
		}
		k, v, pair := strings.Cut(part, "=")
		switch {
		case pair && (k == "" || v == ""):
			return nil, "missing key in comma-separated list property\n"
		case !pair && f.def == "":
			return nil, "value without key, but schema does not define a default key\n"
		case !pair:
			k, v = f.def, part
		}
		if contains(f.models, k) {
			if out["model"] != "" {
				return nil, "key alias 'model' is already defined\n"
			}
			out["model"], k = k, "macaddr"
		}
		if a := f.alias[k]; a != "" {
			k = a
		}
		if _, twice := out[k]; twice {
			return nil, "duplicate key in comma-separated list property: " + k + "\n"
		}
		d := f.prop(k)
		if d == nil {
			return nil, "invalid key in comma-separated list property: " + k + "\n"
		}
		if d.kind == kBool {
			v = cliBool(v)
		}
		out[k] = v
	}
	return out, ""
}

func (f *propFormat) prop(name string) *param {
	for i := range f.props {
		if f.props[i].name == name {
			return &f.props[i]
		}
	}
	return nil
}

func contains(list []string, s string) bool {
	for _, l := range list {
		if l == s {
			return true
		}
	}
	return false
}

// check returns what is wrong with a property string of the option name.
func (f *propFormat) check(n *Node, name, s string) string {
	got, bad := f.parse(s)
	if bad != "" {
		return bad
	}
	faults := map[string]string{}
	for _, d := range f.props {
		v, has := got[d.name]
		if d.only9 && !n.v9() {
			if has {
				return "invalid key in comma-separated list property: " + d.name + "\n"
			}
			continue
		}
		switch {
		case !has && d.need:
			faults[d.name] = "property is missing and it is not optional"
		case has && d.requires != "" && got[d.requires] == "":
			faults[d.requires] = "missing property - '" + d.name + "' requires this property"
		case has:
			if b := d.check(n, v); b != "" {
				faults[d.name] = b
			}
		}
	}
	if len(faults) == 0 {
		return ""
	}
	text := "format error\n"
	for _, k := range sortedKeys(faults) {
		text += name + "." + k + ": " + faults[k] + "\n"
	}
	return text
}
