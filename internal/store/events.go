package store

import (
	"context"
	"encoding/json"
	"slices"
	"time"

	"github.com/agentlab-vm/agentlab"
)

// maxMessage is the maximum length of an event's message in bytes.
const maxMessage = 4096

var events = newTable("events", []string{"id"}, func(e *agentlab.Event) []field {
	return []field{
		{"id", idCol{&e.ID}},
		{"ts", timeCol{&e.Time}},
		{"kind", &e.Kind},
		{"sandbox_vmid", &e.SandboxVMID},
		{"job_id", &e.JobID},
		{"msg", &e.Message},
		{"json", &e.Data},
	}
}, checkEvent)

func checkEvent(e *agentlab.Event) error {
	if e.Kind == "" || e.Time.IsZero() {
		return invalid("kind", "an event requires a kind and a time")
	}
	if e.Data != "" && (e.Data[0] != '{' || !json.Valid([]byte(e.Data))) {
		return invalid("data", "it is not a JSON object")
	}
	return nil
}

// fillTarget sets the sandbox and the job of events that have none.
func fillTarget(evs []agentlab.Event, vmid int, jobID string) []agentlab.Event {
	evs = slices.Clone(evs)
	for i := range evs {
		if evs[i].SandboxVMID == 0 {
			evs[i].SandboxVMID = vmid
		}
		if evs[i].JobID == "" {
			evs[i].JobID = jobID
		}
	}
	return evs
}

// emit inserts events in the transaction and collects them for the subscribers.
func (w *tx) emit(evs []agentlab.Event) error {
	for _, e := range evs {
		e.ID = 0
		if e.Time.IsZero() {
			e.Time = w.now
		}
		e.Message = agentlab.OneLine(e.Message, maxMessage)
		id, err := events.insertRow(w, &e)
		if err != nil {
			return err
		}
		e.ID = id
		w.done.Events = append(w.done.Events, e)
	}
	return nil
}

// AppendEvents writes events that belong to no change of a row. It sets a zero
// Time and assigns the IDs.
func (s *Store) AppendEvents(ctx context.Context, evs ...agentlab.Event) error {
	if len(evs) == 0 {
		return nil
	}
	return s.write(ctx, func(w *tx) error { return w.emit(evs) })
}

// Events lists events in ascending order of ID.
func (s *Store) Events(ctx context.Context, f agentlab.EventFilter) ([]agentlab.Event, error) {
	tail, args := eventList(f)
	out, err := events.query(ctx, s.r, tail, args...)
	if f.Tail {
		slices.Reverse(out)
	}
	return out, err
}

func eventList(f agentlab.EventFilter) (tail string, args []any) {
	var where filter
	where.add("id > ?", max(f.AfterID, f.From-1))
	addIn(&where, "kind", f.Kinds)
	if f.SandboxVMID != 0 {
		where.add("sandbox_vmid = ? AND sandbox_vmid <> 0", f.SandboxVMID)
	}
	if len(f.JobIDs) > 0 {
		addIn(&where, "job_id", f.JobIDs)
		where.add("job_id <> ''") // as in the index
	}
	return where.tail(newestFirst(f.Tail), f.Limit), where.args
}

// newestFirst returns the order of a log: with tail it is read from its end.
func newestFirst(tail bool) string {
	if tail {
		return "id DESC"
	}
	return "id"
}

// DeleteEventsBefore deletes the events from before t and returns their
// number.
func (s *Store) DeleteEventsBefore(ctx context.Context, t time.Time) (int, error) {
	return s.deleteBefore(ctx, "events", t)
}

// deleteBefore deletes the rows of a table from before t and returns their number.
func (s *Store) deleteBefore(ctx context.Context, table string, t time.Time) (n int, err error) {
	err = s.write(ctx, func(w *tx) error {
		deleted, err := w.execN("DELETE FROM "+table+" WHERE ts < ?", timeCol{&t})
		n = int(deleted)
		return err
	})
	return n, err
}
