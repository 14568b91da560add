package e2e

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab/api"
)

// Agents in two sandboxes coordinate through the feed of their job, and a person reads
// and answers. The author is the job of each, whatever the agent says.
func TestAgentsCoordinate(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	repo := sampleRepo(t)
	id := l.submit("--repo", repo, "--agent", "shell", "--attempts", "2", "--task", `
agentlab-lease || exit 3
agentlab-lease renew && exit 4 # the profile does not allow it
agentlab-msg post --kind claim --data '{"author":"user:0"}' "$AGENTLAB_JOB_ID is here"
agentlab-msg tail --follow > feed & tail=$!
until [ "$(grep -c " claim " feed)" = 2 ] && grep -q "go on" feed; do sleep 0.2; done
kill $tail; git add feed; git commit -qm feed`)
	messages := func() (out []api.Message) {
		r := l.run("", "--json", "msg", "tail", "--job", id)
		for dec := json.NewDecoder(strings.NewReader(r.stdout)); dec.More(); { // a document for each message
			var m api.Message
			if err := dec.Decode(&m); err != nil {
				t.Fatal(err)
			}
			out = append(out, m)
		}
		return out
	}
	if !eventually(commandLimit, func() bool { return len(messages()) == 2 }) {
		t.Fatalf("%+v\n%s", messages(), l.ok("job", "show", id))
	}
	l.ok("msg", "post", "--job", id, "--text", "go on")
	if j := l.finish(id); j.Status != "COMPLETED" {
		t.Fatalf("%+v", j)
	}
	list := messages()
	if len(list) != 3 || list[0].Author == list[1].Author {
		t.Fatalf("%+v", list)
	}
	for _, m := range list[:2] {
		name, isJob := strings.CutPrefix(m.Author, "job:")
		if !isJob || m.Kind != "claim" || m.Text != name+" is here" {
			t.Errorf("%+v", m)
		}
	}
	l.noSandboxes()
}
