package profile

import (
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/egress"
	"github.com/agentlab-vm/agentlab/internal/fsfault"
)

// maxRules is the maximum number of rules in the network section of a profile
// after its presets and list files are expanded.
const maxRules = 20_000

// listFiles reads a list file of a profile.
type listFiles func(name string) ([]byte, error)

// resolveNetwork expands the presets and list files in the network section.
func (d *Doc) resolveNetwork(files listFiles) error {
	n := agentlab.Network{Mode: d.Network.Mode, Ports: d.Network.Ports, Limits: agentlab.NetworkLimits(d.Network.Limits)}
	var err error
	if n.Allow, err = expand("network.allow", d.Network.Allow, files); err != nil {
		return err
	}
	if n.Deny, err = expand("network.deny", d.Network.Deny, files); err != nil {
		return err
	}
	if count := len(n.Allow) + len(n.Deny); count > maxRules {
		return invalid("network.allow", "%d rules exceed the limit of %d", count, maxRules).WithHint("use ranges and wildcards")
	}
	for _, t := range d.Network.Private {
		n.Private = append(n.Private, agentlab.PrivateTarget{Host: t.Host, Port: t.Port, Reason: t.Reason})
	}
	if _, err := egress.New(n); err != nil {
		return err
	}
	d.net = n
	return nil
}

func expand(key string, entries []string, files listFiles) ([]agentlab.NetworkRule, error) {
	var out []agentlab.NetworkRule
	for _, entry := range entries {
		rules, source := []string{entry}, ""
		var err error
		if name, ok := strings.CutPrefix(entry, egress.PresetPrefix); ok {
			var p egress.Preset
			p, err = egress.PresetByName(name)
			rules, source = p.Rules, entry
		} else if name, ok := strings.CutPrefix(entry, egress.FilePrefix); ok {
			rules, err = readList(name, files)
			source = entry
		}
		if err != nil {
			return nil, invalid(key, "%w", err).WithHint("%s", agentlab.HintOf(err))
		}
		for _, r := range rules {
			out = append(out, agentlab.NetworkRule{Rule: r, Source: source})
		}
	}
	return out, nil
}

func readList(name string, files listFiles) ([]string, error) {
	if !fs.ValidPath(name) || name == "." || strings.ContainsFunc(name, func(r rune) bool { return r < ' ' || r == '\\' }) {
		return nil, agentlab.Errorf(agentlab.CodeInvalid, "%q is not the path of a list file", name).
			WithHint("use a path relative to the directory of profiles and below it, such as file:lists/network-allowlist.txt")
	}
	data, err := files(name)
	if err != nil {
		return nil, err
	}
	rules, err := egress.ParseList(data)
	if err != nil {
		return nil, agentlab.Errorf(agentlab.CodeInvalid, "list file %s, %w", name, err).WithHint("%s", agentlab.HintOf(err))
	}
	return rules, nil
}

// noLists is the listFiles of a text that is in no directory.
func noLists(name string) ([]byte, error) {
	return nil, agentlab.Errorf(agentlab.CodeInvalid, "list file %s: only a profile in the directory of profiles can name files", name)
}

// listsIn returns a listFiles for a directory. It does not follow symbolic
// links out of the directory.
func listsIn(dir string) listFiles {
	return func(name string) ([]byte, error) {
		data, err := readBelow(dir, name)
		if err != nil {
			return nil, fsfault.At(path.Join(dir, name), err)
		}
		return data, nil
	}
}

func readBelow(dir, name string) (_ []byte, err error) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, err
	}
	defer func() { _ = root.Close() }()
	st, err := root.Stat(name)
	switch {
	case err != nil:
		return nil, err
	case !st.Mode().IsRegular():
		return nil, fmt.Errorf("it is not a file")
	}
	f, err := root.Open(name)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	return io.ReadAll(io.LimitReader(f, egress.MaxListBytes+1)) // ParseList rejects a larger one
}
