package store

import (
	"context"
	"slices"
	"time"

	"github.com/agentlab-vm/agentlab"
)

var messages = newTable("messages", []string{"id"}, func(m *agentlab.Message) []field {
	return []field{
		{"id", idCol{&m.ID}},
		{"ts", timeCol{&m.Time}},
		{"scope_kind", &m.Scope.Kind},
		{"scope_id", &m.Scope.ID},
		{"author", &m.Author},
		{"kind", &m.Kind},
		{"msg", &m.Text},
		{"json", &m.Data},
	}
}, checkMessage)

func checkMessage(m *agentlab.Message) error {
	if m.Author == "" || m.Time.IsZero() {
		return invalid("author", "a message requires an author and a time")
	}
	return m.Validate()
}

// AddMessage appends a message with the current time, and an event without its
// text. Codes: limit if the scope has reached the rate; invalid.
func (s *Store) AddMessage(ctx context.Context, m agentlab.Message, most agentlab.MessageRate) (agentlab.Message, error) {
	err := s.write(ctx, func(w *tx) error {
		m.ID, m.Time = 0, w.now
		since := w.now.Add(-most.Per)
		var n int
		err := w.QueryRowContext(w.ctx, "SELECT count(*) FROM messages WHERE scope_kind = ? AND scope_id = ? AND ts > ?",
			m.Scope.Kind, m.Scope.ID, timeCol{&since}).Scan(&n)
		switch {
		case err != nil:
			return fault(err)
		case n >= most.Count:
			return agentlab.Errorf(agentlab.CodeLimit, "%s %s has %d messages in %s, the maximum", m.Scope.Kind, m.Scope.ID, n, most.Per).
				WithHint("wait, and post fewer and longer messages")
		}
		if m.ID, err = messages.insertRow(w, &m); err != nil {
			return err
		}
		return w.emit([]agentlab.Event{agentlab.NewEvent(agentlab.EventMessage, map[string]any{"message": m.ID}, "message %d posted", m.ID).About(0, m.Scope.ID)})
	})
	return m, err
}

// Messages lists the messages of a scope in ascending order of ID.
func (s *Store) Messages(ctx context.Context, f agentlab.MessageFilter) ([]agentlab.Message, error) {
	var where filter
	where.add("scope_kind = ?", f.Scope.Kind)
	where.add("scope_id = ?", f.Scope.ID)
	where.add("id > ?", f.AfterID)
	out, err := messages.query(ctx, s.r, where.tail(newestFirst(f.Tail), f.Limit), where.args...)
	if f.Tail {
		slices.Reverse(out)
	}
	return out, err
}

// DeleteMessagesBefore deletes the messages from before t and returns their
// number.
func (s *Store) DeleteMessagesBefore(ctx context.Context, t time.Time) (n int, err error) {
	err = s.write(ctx, func(w *tx) error {
		deleted, err := w.execN("DELETE FROM messages WHERE ts < ?", timeCol{&t})
		n = int(deleted)
		return err
	})
	return n, err
}
