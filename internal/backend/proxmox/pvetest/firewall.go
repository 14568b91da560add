package pvetest

// fwFile is a firewall file: of the cluster or of one VM. Node.mu guards it.
type fwFile struct {
	options map[string]string
	rules   []map[string]string
	ipsets  map[string][]map[string]string
	groups  map[string]*fwGroup
}

type fwGroup struct {
	comment string
	rules   []map[string]string
}

func newFwFile() *fwFile {
	return &fwFile{options: map[string]string{}, ipsets: map[string][]map[string]string{}, groups: map[string]*fwGroup{}}
}

func (f *fwFile) clone() *fwFile {
	out := newFwFile()
	for k, v := range f.options {
		out.options[k] = v
	}
	for _, r := range f.rules {
		out.rules = append(out.rules, cloneMap(r))
	}
	for name, set := range f.ipsets {
		for _, e := range set {
			out.ipsets[name] = append(out.ipsets[name], cloneMap(e))
		}
	}
	return out
}

func cloneMap(m map[string]string) map[string]string {
	out := map[string]string{}
	for k, v := range m {
		out[k] = v
	}
	return out
}
