package e2e

import (
	"strings"
	"testing"
)

// nodeValues prints random values of Node.js.
const nodeValues = `console.log(crypto.randomBytes(16).toString("hex")); console.log(crypto.randomUUID())
console.log(crypto.getRandomValues(new Uint32Array(4)).join()); console.log(Math.random()); console.log(Math.random())`

// Copies of one template, and a sandbox and its forks, have no random value of Node.js in
// common. TestClonesHaveOwnRandomValues of internal/backend/qemu has the other sources.
func TestRandomValuesOfNode(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.profile("node", "name: node\nimage: agents\nnetwork: {mode: nat}\nresources: {cores: 1, memory_mb: 1024}\n")
	l.ok("image", "warm", "agents", "--profile", "node")
	for _, name := range []string{"one", "two"} {
		l.ok("sandbox", "new", "--name", name, "--profile", "node")
		if got := l.ok("sandbox", "show", name); !strings.Contains(got, "template") {
			t.Errorf("it is not a copy of a template:\n%s", got)
		}
	}
	l.ok("sandbox", "fork", "one", "--count", "2", "--name-prefix", "fork")
	seen := map[string]string{}
	for _, name := range []string{"one", "two", "fork-1", "fork-2"} {
		values := strings.Fields(l.ok("exec", name, "--", "node", "-e", nodeValues))
		if len(values) != 5 {
			t.Errorf("%s printed %q", name, values)
		}
		for _, v := range values {
			if seen[v] != "" {
				t.Errorf("%s and %s have the value %s", seen[v], name, v)
			}
			seen[v] = name
		}
	}
}
