package message_test

import (
	"context"
	"path/filepath"
	"runtime"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/message"
	"github.com/agentlab-vm/agentlab/internal/store"
)

var limits = agentlab.MessageLimits{PerMinute: 100, PerAuthor: 100, PerScope: 100}

func newService(t *testing.T) *message.Service {
	t.Helper()
	st, err := store.Open(t.Context(), filepath.Join(t.TempDir(), "agentlab.db"), store.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = st.Close() })
	return message.New(st, limits)
}

// Each reader of a scope gets all its messages, in order and once, and none of
// another scope; afterwards nobody waits.
func TestWait(t *testing.T) {
	s := newService(t)
	scope := agentlab.MessageScope{Kind: agentlab.MessageScopeWorkspace, ID: "ws-a"}
	other := agentlab.MessageScope{Kind: agentlab.MessageScopeSession, ID: "ws-a"}
	const readers, each = 4, 20
	done := make(chan string, readers)
	for range readers {
		go func() {
			got, after := "", int64(0)
			for len(got) < each {
				list, err := s.AwaitMessages(t.Context(), agentlab.MessageFilter{Scope: scope, AfterID: after})
				if err != nil {
					break
				}
				for _, m := range list {
					got, after = got+m.Text, m.ID
				}
			}
			done <- got
		}()
	}
	want := ""
	for i := range each {
		text := string(rune('a' + i))
		want += text
		for _, sc := range []agentlab.MessageScope{scope, other} {
			if sc == other {
				text = "X"
			}
			if _, err := s.Post(t.Context(), agentlab.Message{Scope: sc, Author: "user:1", Text: text}); err != nil {
				t.Fatal(err)
			}
		}
	}
	for range readers {
		if got := <-done; got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
	if n := s.Waiting(); n != 0 {
		t.Errorf("%d wait", n)
	}
	if n := s.Read(); n != readers*each {
		t.Errorf("%d were read", n)
	}
}

// The end of the context ends a wait, without an error.
func TestWaitEnds(t *testing.T) {
	s := newService(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	list, err := s.AwaitMessages(ctx, agentlab.MessageFilter{Scope: agentlab.MessageScope{Kind: agentlab.MessageScopeJob, ID: "job-a"}})
	if err != nil || len(list) != 0 || s.Waiting() != 0 {
		t.Errorf("%v, %v, %d wait", list, err, s.Waiting())
	}
}

// Who waits for messages of a session learns that it was deleted.
func TestWaitEndsWithItsSession(t *testing.T) {
	st, err := store.Open(t.Context(), filepath.Join(t.TempDir(), "agentlab.db"), store.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = st.Close() })
	ws := agentlab.Workspace{ID: agentlab.NewWorkspaceID(), UID: agentlab.NewUID(), Name: "fix", Backend: "fake", SizeGB: 1, State: agentlab.WorkspaceCreating}
	v := agentlab.Session{ID: agentlab.NewSessionID(), Name: "fix", Profile: "play", WorkspaceID: ws.ID}
	if v, err = st.AddSession(t.Context(), v, agentlab.WorkspaceUse{ID: ws.ID, New: &ws, Created: agentlab.NewEvent(agentlab.EventWorkspaceState, nil, "created")}); err != nil {
		t.Fatal(err)
	}
	s := message.New(st, limits)
	ended := make(chan error, 1)
	go func() {
		_, err := s.AwaitMessages(t.Context(), agentlab.MessageFilter{Scope: agentlab.MessageScope{Kind: agentlab.MessageScopeSession, ID: v.ID}})
		ended <- err
	}()
	for s.Waiting() == 0 {
		runtime.Gosched()
	}
	if err := st.RemoveSession(t.Context(), v.ID, nil); err != nil {
		t.Fatal(err)
	}
	s.Committed(agentlab.Commit{Events: []agentlab.Event{agentlab.NewEvent(agentlab.EventSession, map[string]any{"session": v.ID, "action": agentlab.SessionDeleted}, "deleted")}})
	if err := <-ended; agentlab.CodeOf(err) != agentlab.CodeNotFound {
		t.Errorf("%v", err)
	}
}
