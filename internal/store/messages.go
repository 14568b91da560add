package store

import (
	"context"
	"fmt"
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
// text, and deletes what the limits no longer allow. A message for which another is
// deleted has no event, because a guest could otherwise grow the database without
// limit. Codes: limit if its author has posted too many in the last minute; invalid.
func (s *Store) AddMessage(ctx context.Context, m agentlab.Message, most agentlab.MessageLimits) (agentlab.Message, error) {
	err := s.write(ctx, func(w *tx) error {
		m.ID, m.Time = 0, w.now
		if err := checkMessageRate(w, m, most.PerMinute); err != nil {
			return err
		}
		var err error
		if m.ID, err = messages.insertRow(w, &m); err != nil {
			return err
		}
		const scope = "scope_kind = ?1 AND scope_id = ?2"
		const over = "DELETE FROM messages WHERE %[1]s AND id <= (SELECT id FROM messages WHERE %[1]s ORDER BY id DESC LIMIT 1 OFFSET ?3)"
		own, err := w.execN(fmt.Sprintf(over, scope+" AND author = ?4"), m.Scope.Kind, m.Scope.ID, most.PerAuthor, m.Author)
		if err != nil {
			return err
		}
		others, err := w.execN(fmt.Sprintf(over, scope), m.Scope.Kind, m.Scope.ID, most.PerScope)
		if err != nil {
			return err
		}
		w.done.Messages = append(w.done.Messages, m.Scope.Kind)
		if own+others > 0 {
			return nil
		}
		data := map[string]any{"message": m.ID, "scope": m.Scope.Kind, "scope_id": m.Scope.ID}
		e := agentlab.NewEvent(agentlab.EventMessage, data, "message %d posted for %s %s", m.ID, m.Scope.Kind, m.Scope.ID)
		if m.Scope.Kind == agentlab.MessageScopeJob {
			e = e.About(0, m.Scope.ID)
		}
		return w.emit([]agentlab.Event{e})
	})
	return m, err
}

// checkMessageRate returns an error with code limit if the author of m has posted
// most messages for its scope in the last minute. Messages with a later time, from
// before the clock was set back, do not count.
func checkMessageRate(w *tx, m agentlab.Message, most int) error {
	since := w.now.Add(-time.Minute)
	var n int
	err := w.QueryRowContext(w.ctx, `SELECT count(*) FROM
		(SELECT ts FROM messages WHERE scope_kind = ? AND scope_id = ? AND author = ? ORDER BY id DESC LIMIT ?) WHERE ts > ? AND ts <= ?`,
		m.Scope.Kind, m.Scope.ID, m.Author, most, timeCol{&since}, timeCol{&w.now}).Scan(&n)
	if err != nil {
		return fault(err)
	}
	if n >= most {
		return agentlab.Errorf(agentlab.CodeLimit, "%s has posted %d messages for %s %s in a minute, the maximum", m.Author, n, m.Scope.Kind, m.Scope.ID).
			WithHint("wait, and post fewer and longer messages")
	}
	return nil
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
func (s *Store) DeleteMessagesBefore(ctx context.Context, t time.Time) (int, error) {
	return s.deleteBefore(ctx, "messages", t)
}
