package egress

import (
	"io/fs"
	"path"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/presets"
)

// MaxListBytes is the maximum size of a list file.
const MaxListBytes = 1 << 20

// Prefixes of entries in a profile's lists that are replaced by several rules.
const (
	PresetPrefix = "preset:"
	FilePrefix   = "file:"
)

// ParseList reads a list file: one rule per line, empty lines, and comments
// that begin with # at the start of the line or after a space. The error has
// agentlab.CodeInvalid and begins with the line number.
func ParseList(data []byte) ([]string, error) {
	if len(data) > MaxListBytes {
		return nil, agentlab.Errorf(agentlab.CodeInvalid, "a list of %d bytes exceeds the limit of %d", len(data), MaxListBytes)
	}
	var out []string
	text := strings.TrimPrefix(string(data), "\ufeff")
	for i, line := range strings.Split(text, "\n") {
		rule, err := listLine(line)
		if err != nil {
			return nil, agentlab.Errorf(agentlab.CodeInvalid, "line %d: %w", i+1, err).WithHint("%s", agentlab.HintOf(err))
		}
		if rule != "" {
			out = append(out, rule)
		}
	}
	return out, nil
}

// listLine returns the rule of one line in its canonical form, "" if there is
// none.
func listLine(line string) (string, error) {
	for i, c := range line {
		if c == '#' && (i == 0 || line[i-1] == ' ' || line[i-1] == '\t') {
			line = line[:i]
			break
		}
	}
	line = strings.Trim(line, " \t\r")
	if line == "" {
		return "", nil
	}
	r, err := ParseRule(line, true)
	return r.String(), err
}

// Preset is a shipped list of rules.
type Preset struct {
	Name  string
	About string // its purpose, one line
	Rules []string
}

// Presets returns all shipped lists by name.
func Presets() ([]Preset, error) {
	files, err := fs.Glob(presets.FS, "*.txt")
	if err != nil {
		return nil, err
	}
	out := make([]Preset, 0, len(files))
	for _, f := range files {
		p, err := PresetByName(strings.TrimSuffix(f, ".txt"))
		if err != nil {
			return nil, err
		}
		out = append(out, p)
	}
	return out, nil
}

// PresetByName returns one shipped list; code invalid if there is none with
// that name.
func PresetByName(name string) (Preset, error) {
	p := Preset{Name: name}
	err := agentlab.ValidateName(name)
	var data []byte
	if err == nil {
		data, err = presets.FS.ReadFile(path.Clean(name + ".txt"))
	}
	if err != nil {
		return p, agentlab.Errorf(agentlab.CodeInvalid, "there is no preset %s", quote(name)).WithHint("see 'agentlab policy presets'")
	}
	first, _, _ := strings.Cut(string(data), "\n")
	p.About = strings.TrimSpace(strings.TrimPrefix(first, "#"))
	p.Rules, err = ParseList(data)
	return p, err
}
