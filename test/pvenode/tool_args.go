package pvenode

import (
	"errors"
	"io/fs"
	"net/url"
	"os"
	"strings"
)

// formats are the options that say how a result is printed.
type formats struct {
	output string // "", text, json, json-pretty, yaml
	quiet  bool
}

var formatOptions = map[string]optionKind{
	"output-format": plainOption, "quiet": boolOption, "noborder": boolOption, "noheader": boolOption, "human-readable": boolOption,
}

func withFormats(kinds map[string]optionKind, format bool) map[string]optionKind {
	out := map[string]optionKind{}
	for k, v := range kinds {
		out[k] = v
	}
	if format {
		for k, v := range formatOptions {
			out[k] = v
		}
	}
	return out
}

// takeFormats takes the options of formats out of the parameters.
func takeFormats(p values, format bool) (formats, *Error) {
	if !format {
		return formats{}, nil
	}
	f := formats{output: p.str("output-format"), quiet: p.yes("quiet")}
	switch f.output {
	case "", "text", "json", "json-pretty", "yaml":
	default:
		return f, badParam("output-format", "value '"+f.output+"' does not have a value in the enumeration 'text, json, json-pretty, yaml'")
	}
	for k := range formatOptions {
		delete(p, k)
	}
	return f, nil
}

// getOptions reads a command line as the tools do: an option begins with - or
// --, its name may be abbreviated where that is unique, and what has no name is
// given to positional.
func getOptions(kinds map[string]optionKind, required, args, positional []string) (values, *Error) {
	p := values{}
	var rest []string
	for i := 0; i < len(args); i++ {
		a := args[i]
		if a == "--" {
			rest = append(rest, args[i+1:]...)
			break
		}
		name, ok := strings.CutPrefix(a, "--")
		if !ok {
			name, ok = strings.CutPrefix(a, "-")
		}
		if !ok || name == "" {
			rest = append(rest, a)
			continue
		}
		name, value, has := strings.Cut(name, "=")
		full, found := optionNamed(kinds, name)
		if !found {
			return nil, optionFault("Unknown option: " + name + "\nunable to parse option")
		}
		if !has {
			switch {
			case kinds[full] == boolOption:
				if i+1 < len(args) && (!strings.HasPrefix(args[i+1], "-") || args[i+1] == "-") {
					i++
					value = args[i]
				}
			case i+1 < len(args):
				i++
				value = args[i]
			default:
				return nil, optionFault("Option " + full + " requires an argument\nunable to parse option")
			}
		}
		set(p, full, value, kinds[full])
	}
	if err := fillPositional(p, kinds, required, rest, positional); err != nil {
		return nil, err
	}
	return p, booleans(p, kinds)
}

// optionFault is an error of the command line itself; a line before its last
// one is a warning of the parser.
func optionFault(text string) *Error { return &Error{Status: 400, Message: text} }

func set(p values, name, value string, kind optionKind) {
	switch kind {
	case arrayOption:
		p[name] = append(p[name], value)
	case listOption:
		if old, ok := p[name]; ok {
			value = old[0] + "," + value
		}
		p[name] = []string{value}
	default:
		p[name] = []string{value}
	}
}

// optionNamed finds an option by its name or by a beginning that only one has.
func optionNamed(kinds map[string]optionKind, name string) (string, bool) {
	if _, ok := kinds[name]; ok {
		return name, true
	}
	lower := strings.ToLower(name)
	var hit string
	hits := 0
	for k := range kinds {
		if strings.EqualFold(k, name) {
			return k, true
		}
		if strings.HasPrefix(strings.ToLower(k), lower) {
			hit = k
			hits++
		}
	}
	return hit, hits == 1
}

func fillPositional(p values, kinds map[string]optionKind, required, rest, positional []string) *Error {
	need := map[string]bool{}
	for _, r := range required {
		need[r] = true
	}
	for _, name := range positional {
		if name == "extra-args" {
			p[name] = rest
			rest = nil
			continue
		}
		if len(rest) == 0 {
			// Options may have given it already; only without any argument at
			// all the real tools do not look.
			if _, api := kinds[name]; (!api || need[name]) && !p.has(name) {
				return optionFault("not enough arguments")
			}
			continue
		}
		p[name] = []string{rest[0]}
		rest = rest[1:]
	}
	if len(rest) > 0 {
		return optionFault("too many arguments")
	}
	return nil
}

func booleans(p values, kinds map[string]optionKind) *Error {
	for k, v := range p {
		if kinds[k] != boolOption {
			continue
		}
		switch strings.ToLower(v[0]) {
		case "", "1", "on", "yes", "true":
			p[k] = []string{"1"}
		case "0", "off", "no", "false":
			p[k] = []string{"0"}
		default:
			return optionFault("unable to parse boolean option")
		}
	}
	return nil
}

// fileParameter replaces the name of a file by its content, encoded as the
// API wants it: how qm takes keys.
func (t *tool) fileParameter(p values, name string) *Error {
	if !p.has(name) {
		return nil
	}
	file := p.str(name)
	data, err := os.ReadFile(t.n.HostPath(file))
	if err != nil {
		reason := err.Error()
		if errors.Is(err, fs.ErrNotExist) {
			reason = "No such file or directory"
		}
		return dief("can't open '%s' - %s", file, reason).exit(2)
	}
	p[name] = []string{strings.ReplaceAll(url.QueryEscape(string(data)), "+", "%20")}
	return nil
}

// exitCode is the exit code of a tool that dies with an error. The real one is
// whatever errno happened to be; these were seen.
func exitCode(err *Error) int {
	if err.Status == 400 {
		return 255
	}
	for _, c := range []struct {
		part string
		code int
	}{
		{"got timeout", 4},
		{"Configuration file '", 2},
		{"unable to find configuration file for VM", 2},
		{"config file already exists", 2},
		{"not allowed for linked clones", 2},
		{"is running - destroy failed", 25},
		{"if VM is running", 25},
		{"while the source VM is running", 25},
		{"illegal name '", 25},
		{"unsupported format '", 25},
		{"unable to parse volume filename", 25},
		{"disk image '", 25},
		{"zfs error:", 1},
		{"Agent error:", 29},
		{" not running", 2},
		{" is not running", 2},
		{"volume 'local:snippets/", 2},
		{"create user failed", 2},
	} {
		if strings.Contains(err.Message+"\n", c.part) {
			return c.code
		}
	}
	return 255
}
