package daemon

import (
	"fmt"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/test/guard"
)

// TestFollowMessages checks that a stream has the stored and the new messages of
// its job only, each once and in order, also across a restart of the daemon.
func TestFollowMessages(t *testing.T) {
	h := newHome(t)
	stop := h.start(t)
	ctx := guard.Context(t)
	var jobs []string
	for range 2 {
		j, err := h.client.CreateJob(ctx, shell("echo"))
		if err != nil {
			t.Fatal(err)
		}
		h.ended(t, j.ID)
		jobs = append(jobs, j.ID)
	}
	n := 0
	post := func() {
		n++
		for _, id := range jobs {
			m, err := h.client.PostMessage(ctx, client.MessageScope{Job: id}, api.MessagePost{Text: fmt.Sprint(n), JSON: map[string]any{"job": id}})
			if err != nil || m.Author == "" || m.Kind != "note" {
				t.Fatalf("%+v, %v", m, err)
			}
		}
	}
	post()
	post()
	seen := 0
	for m, err := range h.client.FollowMessages(ctx, client.MessageQuery{MessageScope: client.MessageScope{Job: jobs[0]}}) {
		if err != nil {
			t.Fatal(err)
		}
		if seen++; m.Text != fmt.Sprint(seen) || m.ScopeID != jobs[0] || m.JSON["job"] != jobs[0] {
			t.Fatalf("message %d: %+v", seen, m)
		}
		switch seen {
		case 2, 4:
			post()
		case 3:
			stop()
			stop = h.start(t)
			post()
		case 5:
			return
		}
	}
	t.Errorf("the stream ended after %d messages", seen)
}

func TestMessagesOfNoJob(t *testing.T) {
	h := newHome(t)
	h.start(t)
	nowhere := client.MessageScope{Job: "job-aaaaaaaaaaaaa"}
	if _, err := h.client.PostMessage(t.Context(), nowhere, api.MessagePost{Text: "x"}); agentlab.CodeOf(err) != agentlab.CodeNotFound {
		t.Errorf("post: %v", err)
	}
	if _, err := h.client.Messages(t.Context(), client.MessageQuery{MessageScope: nowhere}); agentlab.CodeOf(err) != agentlab.CodeNotFound {
		t.Errorf("list: %v", err)
	}
}
