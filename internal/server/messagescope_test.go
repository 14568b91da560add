package server

import (
	"context"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/auth"
)

// passedOn says that another sandbox has the workspace.
type passedOn struct{ atomic.Bool }

type passedWorkspace struct {
	stubWorkspaces
	*passedOn
}

func (p passedWorkspace) Leases(context.Context, string) ([]agentlab.WorkspaceLease, error) {
	l := agentlab.WorkspaceLease{UID: ownUID, AcquiredAt: time.Unix(1, 0)}
	if p.Load() {
		l.UID = otherUID
	}
	return []agentlab.WorkspaceLease{l}, nil
}

type passedMessages struct {
	stubMessages
	*passedOn
}

func (p passedMessages) AwaitMessages(_ context.Context, f agentlab.MessageFilter) ([]agentlab.Message, error) {
	if f.AfterID == 0 {
		return []agentlab.Message{{ID: 1, Scope: f.Scope, Text: "its own"}}, nil
	}
	p.Store(true)
	return []agentlab.Message{{ID: f.AfterID + 1, Scope: f.Scope, Text: "of another"}}, nil
}

// A stream of the messages of a workspace ends for a token that is restricted to a
// sandbox when another sandbox has the workspace.
func TestMessagesOfALostWorkspace(t *testing.T) {
	passed := &passedOn{}
	l := startAccess(t, func(c *Config) {
		c.Services.Messages = passedMessages{c.Services.Messages.(stubMessages), passed}
		c.Services.Workspaces = passedWorkspace{c.Services.Workspaces.(stubWorkspaces), passed}
	})
	l.err = nil
	token := l.make(t, auth.Request{Role: agentlab.RoleRead, Sandboxes: []agentlab.TokenSandbox{{UID: ownUID, VMID: 1, Name: "box"}}})
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+l.tcp+"/v1/messages?workspace=data&follow=true", nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+token)
	resp, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}).Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, 1<<16))
	if text := string(body); err != nil || !strings.Contains(text, "its own") || strings.Contains(text, "of another") || !strings.Contains(text, "denied") {
		t.Errorf("%d %s, %v", resp.StatusCode, text, err)
	}
}
