package store

import (
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
)

func note(job, text string) agentlab.Message {
	return agentlab.Message{Scope: agentlab.MessageScope{Kind: agentlab.MessageScopeJob, ID: job}, Author: "user:ann", Kind: "note", Text: text}
}

var anyRate = agentlab.MessageLimits{PerMinute: 1000, PerAuthor: 1000, PerScope: 1000}

// Messages have increasing IDs, are listed for their scope only, and an ID is not
// used again after retention deleted the newest.
func TestMessages(t *testing.T) {
	ctx := t.Context()
	s := newStore(t)
	one := must(s.AddMessage(ctx, note("job-a", "one"), anyRate))(t)
	must(s.AddMessage(ctx, note("job-b", "other"), anyRate))(t)
	two := must(s.AddMessage(ctx, note("job-a", "two"), anyRate))(t)
	list := func(f agentlab.MessageFilter) (texts string) {
		f.Scope = one.Scope
		for _, m := range must(s.Messages(ctx, f))(t) {
			texts += m.Text + " "
		}
		return texts
	}
	if got := list(agentlab.MessageFilter{}); got != "one two " {
		t.Errorf("all: %q", got)
	}
	if got := list(agentlab.MessageFilter{AfterID: one.ID}); got != "two " {
		t.Errorf("after the first: %q", got)
	}
	if got := list(agentlab.MessageFilter{Tail: true, Limit: 1}); got != "two " {
		t.Errorf("the newest: %q", got)
	}
	if n := must(s.DeleteMessagesBefore(ctx, two.Time.Add(time.Second)))(t); n != 3 {
		t.Errorf("deleted %d", n)
	}
	if m := must(s.AddMessage(ctx, note("job-a", "three"), anyRate))(t); m.ID <= two.ID {
		t.Errorf("the ID %d is used again", m.ID)
	}
}

func TestMessageLimits(t *testing.T) {
	ctx := t.Context()
	s := newStore(t)
	rate := agentlab.MessageLimits{PerMinute: 2, PerAuthor: 2, PerScope: 2}
	must(s.AddMessage(ctx, note("job-a", "1"), rate))(t)
	must(s.AddMessage(ctx, note("job-a", "2"), rate))(t)
	if _, err := s.AddMessage(ctx, note("job-a", "3"), rate); agentlab.CodeOf(err) != agentlab.CodeLimit {
		t.Errorf("over the rate: %v", err)
	}
	must(s.AddMessage(ctx, note("job-b", "1"), rate))(t)
	for name, change := range map[string]func(*agentlab.Message){
		"empty":        func(m *agentlab.Message) { m.Text = "" },
		"long":         func(m *agentlab.Message) { m.Text = strings.Repeat("x", agentlab.MaxMessageText+1) },
		"not UTF-8":    func(m *agentlab.Message) { m.Text = "\xff" },
		"no object":    func(m *agentlab.Message) { m.Data = "[1]" },
		"bad kind":     func(m *agentlab.Message) { m.Kind = "a b" },
		"middle kind":  func(m *agentlab.Message) { m.Kind = "a\x1bb" },
		"no author":    func(m *agentlab.Message) { m.Author = "" },
		"unknown kind": func(m *agentlab.Message) { m.Scope.Kind = "team" },
	} {
		m := note("job-c", "text")
		change(&m)
		if _, err := s.AddMessage(ctx, m, rate); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}

// An author who posts too much loses its own oldest messages, and only a scope that
// is full loses those of others.
func TestStoredMessagesAreBounded(t *testing.T) {
	ctx := t.Context()
	s := newStore(t)
	most := agentlab.MessageLimits{PerMinute: 100, PerAuthor: 2, PerScope: 3}
	post := func(author, text string) {
		m := note("job-a", text)
		m.Author = author
		must(s.AddMessage(ctx, m, most))(t)
	}
	post("user:ann", "ann")
	for _, text := range []string{"1", "2", "3"} {
		post("job:flood", text)
	}
	m := note("job-b", "other")
	must(s.AddMessage(ctx, m, most))(t)
	for _, want := range []string{"ann 2 3 ", "2 3 bob "} {
		got := ""
		for _, m := range must(s.Messages(ctx, agentlab.MessageFilter{Scope: note("job-a", "").Scope}))(t) {
			got += m.Text + " "
		}
		if got != want {
			t.Errorf("stored %q, want %q", got, want)
		}
		if want == "ann 2 3 " {
			post("user:bob", "bob")
		}
	}
	// Only those for which none was deleted have an event: ann, 1, 2 and other.
	if evs := must(s.Events(ctx, agentlab.EventFilter{Kinds: []string{agentlab.EventMessage}}))(t); len(evs) != 4 {
		t.Errorf("%d events: %+v", len(evs), evs)
	}
}
