package pvenode

import "strings"

// listNames are parameters whose format is a list: the command line joins
// several of them.
var listNames = setOf("delete", "revert", "idlist", "nameserver", "tags", "roles", "users", "groups", "tokens", "privs", "vms", "content")

// arrayNames are parameters that are lists of their own.
var arrayNames = setOf("command")

// options returns how the command line takes the parameters of a call, given
// as in the table, and which must be there. nil means that there is no such
// call.
func (n *Node) options(method, template string) (map[string]optionKind, []string) {
	for i := range apiTable {
		ep := &apiTable[i]
		if ep.method == method && ep.path == template && n.offers(ep) {
			return n.optionsOf(ep, true)
		}
	}
	return nil, nil
}

// optionsAt is options for a path with its values, which are no options then.
func (n *Node) optionsAt(method, path string) (map[string]optionKind, []string) {
	ep, _ := n.find(method, path)
	if ep == nil {
		return nil, nil
	}
	return n.optionsOf(ep, false)
}

func (n *Node) offers(ep *endpoint) bool {
	return (!ep.only9 || n.v9()) && (!ep.only8 || !n.v9())
}

func (n *Node) optionsOf(ep *endpoint, withPath bool) (kinds map[string]optionKind, required []string) {
	kinds = map[string]optionKind{}
	inPath := map[string]bool{}
	for _, seg := range strings.Split(ep.path, "/") {
		if name := strings.Trim(seg, "{}"); name != seg {
			inPath[name] = true
			if withPath {
				kinds[name] = plainOption
				required = append(required, name)
			}
		}
	}
	for _, d := range ep.params {
		if (d.only9 && !n.v9()) || (d.only8 && n.v9()) || inPath[d.name] {
			continue
		}
		kinds[d.name] = kindOf(d)
		if d.need {
			required = append(required, d.name)
		}
	}
	if ep.options {
		for _, name := range allOptions() {
			if d, ok := n.option(name); ok {
				if _, own := kinds[name]; !own {
					kinds[name] = kindOf(d)
				}
			}
		}
	}
	return kinds, required
}

func kindOf(d param) optionKind {
	switch {
	case d.kind == kBool:
		return boolOption
	case arrayNames[d.name]:
		return arrayOption
	case listNames[d.name]:
		return listOption
	}
	return plainOption
}

// allOptions are the names of all options of a VM's configuration.
func allOptions() []string {
	out := sortedKeys(plainByName)
	for stem, g := range numberedOptions {
		for i := range g.count {
			out = append(out, stem+itoa(i))
		}
	}
	return out
}

// taskWarnings returns the number of warnings of a task.
func (n *Node) taskWarnings(upid string) int {
	n.mu.Lock()
	defer n.mu.Unlock()
	if t := n.tasks.byID[upid]; t != nil {
		return t.warnings
	}
	return 0
}
