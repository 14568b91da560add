package redact

// matcher finds many patterns at once (Aho-Corasick). Edges live in one map,
// since the patterns are long and few: nearly every node has one child.
type matcher struct {
	nodes []node
	edges map[edge]int32
	root  [256]int32 // edges of node 0
}

type edge struct {
	from int32
	b    byte
}

type node struct {
	parent int32
	b      byte  // edge from parent
	leaf   bool  // has no child
	fail   int32 // node of the longest proper suffix that is in the trie
	depth  int32
	match  int32 // length of the longest pattern that ends here, 0 if none
	hold   int32 // longest suffix that may still grow into a pattern
}

func newMatcher() *matcher {
	return &matcher{nodes: []node{{leaf: true}}, edges: map[edge]int32{}}
}

func (m *matcher) child(n int32, b byte) (int32, bool) {
	if n == 0 {
		c := m.root[b]
		return c, c != 0
	}
	c, ok := m.edges[edge{n, b}]
	return c, ok
}

func (m *matcher) addAll(patterns []string) {
	for _, p := range patterns {
		m.add(p)
	}
}

func (m *matcher) add(p string) {
	n := int32(0)
	for i := range len(p) {
		c, ok := m.child(n, p[i])
		if !ok {
			c = int32(len(m.nodes)) //nolint:gosec // bounded by the length of all secrets
			m.nodes = append(m.nodes, node{parent: n, b: p[i], leaf: true, depth: m.nodes[n].depth + 1})
			m.nodes[n].leaf = false
			if n == 0 {
				m.root[p[i]] = c
			} else {
				m.edges[edge{n, p[i]}] = c
			}
		}
		n = c
	}
	m.nodes[n].match = int32(len(p)) //nolint:gosec // at most MaxPattern
}

// link sets fail, match and hold of every node, shallow ones first.
func (m *matcher) link() {
	byDepth := make([][]int32, MaxPattern+1)
	for i := range m.nodes {
		d := m.nodes[i].depth
		byDepth[d] = append(byDepth[d], int32(i)) //nolint:gosec // as in add
	}
	for _, level := range byDepth[1:] {
		for _, i := range level {
			n := &m.nodes[i]
			if n.depth > 1 {
				n.fail = m.step(m.nodes[n.parent].fail, n.b)
			}
			f := &m.nodes[n.fail]
			if n.match == 0 {
				n.match = f.match
			}
			n.hold = n.depth
			if n.leaf {
				n.hold = f.hold
			}
		}
	}
}

func (m *matcher) step(n int32, b byte) int32 {
	for {
		if n == 0 {
			return m.root[b]
		}
		if c, ok := m.edges[edge{n, b}]; ok {
			return c
		}
		n = m.nodes[n].fail
	}
}
