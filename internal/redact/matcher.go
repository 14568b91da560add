package redact

// matcher finds many patterns in one pass (Aho-Corasick). A node's children
// are a list, because there are few, long patterns: almost every node has one
// child. Only the root has a table.
type matcher struct {
	nodes []node
	root  [256]int32 // children of node 0
}

type node struct {
	parent int32
	child  int32 // first of its children, 0 if none
	next   int32 // next sibling
	fail   int32 // node of the longest proper suffix that is in the trie
	depth  int16
	match  int16 // length of the longest pattern that ends here, 0 if none
	hold   int16 // longest suffix that may still grow into a pattern
	b      byte  // edge from parent
}

func newMatcher() *matcher { return &matcher{nodes: make([]node, 1)} }

func (m *matcher) child(n int32, b byte) int32 {
	if n == 0 {
		return m.root[b]
	}
	c := m.nodes[n].child
	for c != 0 && m.nodes[c].b != b {
		c = m.nodes[c].next
	}
	return c
}

func (m *matcher) addAll(patterns []string) {
	for _, p := range patterns {
		m.add(p)
	}
}

func (m *matcher) add(p string) {
	n := int32(0)
	for i := range len(p) {
		c := m.child(n, p[i])
		if c == 0 {
			c = int32(len(m.nodes))
			m.nodes = append(m.nodes, node{parent: n, b: p[i], depth: m.nodes[n].depth + 1, next: m.nodes[n].child})
			m.nodes[n].child = c
			if n == 0 {
				m.root[p[i]] = c
			}
		}
		n = c
	}
	m.nodes[n].match = int16(len(p))
}

// link sets fail, match and hold of every node, shallow ones first.
func (m *matcher) link() {
	byDepth := make([][]int32, MaxPattern+1)
	for i := range m.nodes {
		d := m.nodes[i].depth
		byDepth[d] = append(byDepth[d], int32(i))
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
			if n.child == 0 {
				n.hold = f.hold
			}
		}
	}
}

func (m *matcher) step(n int32, b byte) int32 {
	for {
		if c := m.child(n, b); c != 0 || n == 0 {
			return c
		}
		n = m.nodes[n].fail
	}
}
