package store

import (
	"context"
	"slices"
	"time"

	"github.com/agentlab-vm/agentlab"
)

var egress = newTable("egress", []string{"id"}, func(e *agentlab.EgressEntry) []field {
	return []field{
		{"id", idCol{&e.ID}},
		{"sandbox_uid", &e.UID},
		{"seq", &e.Seq},
		{"sandbox_vmid", &e.VMID},
		{"job_id", &e.JobID},
		{"ts", timeCol{&e.Time}},
		{"last_ts", timeCol{&e.Last}},
		{"proto", &e.Proto},
		{"name", &e.Name},
		{"addr", &e.Addr},
		{"port", &e.Port},
		{"allow", &e.Allow},
		{"rule", &e.Rule},
		{"error", &e.Error},
		{"count", &e.Count},
		{"dropped", &e.Dropped},
	}
}, checkEgress)

func checkEgress(e *agentlab.EgressEntry) error {
	switch {
	case e.UID == "" || e.VMID <= 0:
		return invalid("vmid", "an egress record belongs to a sandbox")
	case e.Rule == "" || e.Time.IsZero() || e.Last.IsZero():
		return invalid("rule", "an egress record requires a rule and its times")
	case e.Port < 0 || e.Port > 65535 || e.Count < 0 || e.Dropped < 0 || e.Seq < 0:
		return invalid("port", "a number of an egress record is out of range")
	case (e.Seq == 0) != (e.Rule == agentlab.RuleAuditLimit):
		return invalid("seq", "only the record of rule %s has the number 0", agentlab.RuleAuditLimit)
	}
	return nil
}

// egressCursor is how much of a sandbox's log is in the database.
type egressCursor struct {
	vmid                    int
	uid                     string
	seq                     int64
	allowed, denied         int
	allowedHead, deniedHead int64
	dropped                 int64
}

var egressCursors = newTable("egress_cursors", []string{"sandbox_vmid"}, func(c *egressCursor) []field {
	return []field{
		{"sandbox_vmid", &c.vmid},
		{"sandbox_uid", &c.uid},
		{"seq", &c.seq},
		{"allowed", &c.allowed},
		{"denied", &c.denied},
		{"allowed_head", &c.allowedHead},
		{"denied_head", &c.deniedHead},
		{"dropped", &c.dropped},
	}
}, func(*egressCursor) error { return nil })

// EgressCursor returns the Seq of the last record that was copied from a
// sandbox's log, 0 for none.
func (s *Store) EgressCursor(ctx context.Context, vmid int, uid string) (int64, error) {
	c, _, err := egressCursors.one(ctx, s.r, "WHERE sandbox_vmid = ? AND sandbox_uid = ?", vmid, uid)
	return c.seq, err
}

// AddEgress adds records, each sandbox's in ascending order of Seq. Records
// that were added before are skipped, so reading a log again adds nothing.
// AddEgress assigns the IDs. It returns how many records were new.
//
// A sandbox has at most limit rows of allowed decisions and as many of denied
// ones: the first limit/2 and the newest, so that a flood does not hide what
// came before or after it. One more row (agentlab.RuleAuditLimit) counts the
// decisions without a row. Records of a sandbox without a row are dropped.
func (s *Store) AddEgress(ctx context.Context, recs []agentlab.EgressEntry, limit int) (added int, err error) {
	if len(recs) == 0 {
		return 0, nil
	}
	err = s.write(ctx, func(w *tx) error {
		added = 0
		for left := recs; len(left) > 0; { // recs itself is not changed: this may run again
			n := slices.IndexFunc(left, func(e agentlab.EgressEntry) bool { return e.UID != left[0].UID })
			if n < 0 {
				n = len(left)
			}
			one, err := addEgress(w, left[:n], limit)
			if err != nil {
				return err
			}
			added += one
			left = left[n:]
		}
		return nil
	})
	return added, err
}

// addEgress adds the records of one sandbox.
func addEgress(w *tx, recs []agentlab.EgressEntry, limit int) (added int, err error) {
	vmid, uid := recs[0].VMID, recs[0].UID
	sb, err := sandboxByVMID(w.ctx, w, vmid)
	if agentlab.CodeOf(err) == agentlab.CodeNotFound || (err == nil && sb.UID != uid) {
		return 0, nil
	} else if err != nil {
		return 0, err
	}
	c, known, err := egressCursors.one(w.ctx, w, "WHERE sandbox_vmid = ?", vmid)
	if err != nil {
		return 0, err
	}
	if !known {
		c = egressCursor{vmid: vmid, uid: uid}
		if err := egressCursors.insert(w, &c); err != nil {
			return 0, err
		}
	}
	before := c
	for _, e := range recs {
		if e.Seq <= c.seq {
			continue
		}
		missing := e.Seq - c.seq - 1
		c.dropped += missing
		w.done.Egress.Dropped += int(missing)
		c.seq = e.Seq
		if err := c.insert(w, e, limit); err != nil {
			return 0, err
		}
		added++
		w.done.Egress.Add(e)
		if e.JobID != "" && !slices.Contains(w.done.Records, e.JobID) {
			w.done.Records = append(w.done.Records, e.JobID)
		}
	}
	for _, allow := range []bool{true, false} {
		if err := c.trim(w, allow, limit); err != nil {
			return 0, err
		}
	}
	if c.dropped != before.dropped {
		if err := c.storeDropped(w, recs[len(recs)-1]); err != nil {
			return 0, err
		}
	}
	if c == before {
		return 0, nil
	}
	return added, egressCursors.update(w, &c)
}

func (c *egressCursor) insert(w *tx, e agentlab.EgressEntry, limit int) error {
	e.ID = 0
	if err := egress.insert(w, &e); err != nil {
		return err
	}
	rows, head := &c.denied, &c.deniedHead
	if e.Allow {
		rows, head = &c.allowed, &c.allowedHead
	}
	if *rows++; *rows == limit/2 && *head == 0 {
		*head = e.Seq
	}
	return nil
}

// trim deletes the oldest rows after the head until limit rows are left.
func (c *egressCursor) trim(w *tx, allow bool, limit int) error {
	rows, head := &c.denied, c.deniedHead
	if allow {
		rows, head = &c.allowed, c.allowedHead
	}
	if *rows <= limit {
		return nil
	}
	gone, err := w.QueryContext(w.ctx, `DELETE FROM egress WHERE id IN (
		SELECT id FROM egress WHERE sandbox_uid = ? AND allow = ? AND seq > ? ORDER BY seq LIMIT ?)
		RETURNING count, dropped`, c.uid, allow, head, *rows-limit)
	if err != nil {
		return fault(err)
	}
	defer func() { _ = gone.Close() }() // rows.Err is checked
	for gone.Next() {
		var count, dropped int64
		if err := gone.Scan(&count, &dropped); err != nil {
			return fault(err)
		}
		c.dropped += count + dropped
		*rows--
	}
	return fault(gone.Err())
}

// storeDropped stores the number of decisions without a row, with the data of the
// record last.
func (c *egressCursor) storeDropped(w *tx, last agentlab.EgressEntry) error {
	n, err := w.execN("UPDATE egress SET dropped = ?, last_ts = ? WHERE sandbox_uid = ? AND allow = 0 AND seq = 0", c.dropped, timeCol{&last.Last}, c.uid)
	if err != nil || n > 0 {
		return err
	}
	e := agentlab.EgressEntry{UID: c.uid, JobID: last.JobID, EgressRecord: agentlab.EgressRecord{
		VMID: c.vmid, Time: last.Time, Last: last.Last, Rule: agentlab.RuleAuditLimit, Dropped: int(c.dropped),
	}}
	return egress.insert(w, &e)
}

// Egress lists entries in ascending order of ID.
func (s *Store) Egress(ctx context.Context, f agentlab.EgressFilter) ([]agentlab.EgressEntry, error) {
	tail, args := egressList(f)
	out, err := egress.query(ctx, s.r, tail, args...)
	if f.Tail {
		slices.Reverse(out)
	}
	return out, err
}

func egressList(f agentlab.EgressFilter) (tail string, args []any) {
	where := egressWhere(f)
	return where.tail(newestFirst(f.Tail), f.Limit), where.args
}

func egressWhere(f agentlab.EgressFilter) *filter {
	var where filter
	where.add("id > ?", f.AfterID)
	if f.VMID != 0 {
		where.add("sandbox_vmid = ?", f.VMID)
	}
	if f.UID != "" {
		where.add("sandbox_uid = ?", f.UID)
	}
	if f.JobID != "" {
		where.add("job_id = ? AND job_id <> ''", f.JobID)
	}
	if f.Denied {
		where.add("allow = 0")
	}
	if !f.Since.IsZero() {
		where.add("last_ts >= ?", timeCol{&f.Since})
	}
	return &where
}

// EgressSummary summarises the entries that f selects, without regard to its
// Limit and Tail. It lists at most targets refused targets, and at most as
// many reached private destinations.
func (s *Store) EgressSummary(ctx context.Context, f agentlab.EgressFilter, targets int) (agentlab.EgressSummary, error) {
	f.Denied, f.Limit = false, 0
	where := egressWhere(f)
	var out agentlab.EgressSummary
	err := s.r.QueryRowContext(ctx, `SELECT coalesce(sum(iif(allow = 1, count, 0)), 0), coalesce(sum(iif(allow = 0, count, 0)), 0), coalesce(sum(dropped), 0)
		FROM egress `+where.tail("1", 0), where.args...).Scan(&out.Allowed, &out.Denied, &out.Dropped)
	if err != nil {
		return agentlab.EgressSummary{}, fault(err)
	}
	if out.Allowed > 0 {
		if out.Private, _, err = s.egressTargets(ctx, f, "allow = 1 AND substr(rule, 1, 8) = 'private:' AND proto <> 'dns'", targets); err != nil {
			return agentlab.EgressSummary{}, err
		}
	}
	if out.Denied > 0 {
		var all int
		if out.Targets, all, err = s.egressTargets(ctx, f, "allow = 0 AND seq > 0", targets); err != nil {
			return agentlab.EgressSummary{}, err
		}
		out.More = all - len(out.Targets)
	}
	return out, nil
}

// egressTargets lists at most n targets of the entries that f and a condition
// select, the most frequent first, and returns how many there are.
func (s *Store) egressTargets(ctx context.Context, f agentlab.EgressFilter, condition string, n int) (out []agentlab.EgressTarget, all int, err error) {
	defer wasRead(s.r, time.Now())
	where := egressWhere(f)
	where.add(condition)
	const by = "proto, name, addr, port, rule"
	query := "SELECT " + by + ", sum(count), max(last_ts), count(*) OVER () FROM egress " + where.tailBy(by, "6 DESC, 7 DESC, "+by, n)
	rows, err := s.r.QueryContext(ctx, query, where.args...)
	if err != nil {
		return nil, 0, fault(err)
	}
	defer func() { _ = rows.Close() }() // rows.Err is checked
	for rows.Next() {
		var t agentlab.EgressTarget
		if err := rows.Scan(&t.Proto, &t.Name, &t.Addr, &t.Port, &t.Rule, &t.Count, timeCol{&t.Last}, &all); err != nil {
			return nil, 0, damaged("egress", err)
		}
		out = append(out, t)
	}
	return out, all, fault(rows.Err())
}

// DeleteEgressBefore deletes entries whose last decision was before t and
// returns their number.
func (s *Store) DeleteEgressBefore(ctx context.Context, t time.Time) (n int, err error) {
	err = s.write(ctx, func(w *tx) error {
		deleted, err := w.execN("DELETE FROM egress WHERE last_ts < ?", timeCol{&t})
		if n = int(deleted); err != nil || n == 0 {
			return err
		}
		return w.exec(`UPDATE egress_cursors AS c SET
			allowed = (SELECT count(*) FROM egress e WHERE e.sandbox_uid = c.sandbox_uid AND e.allow = 1),
			denied = (SELECT count(*) FROM egress e WHERE e.sandbox_uid = c.sandbox_uid AND e.allow = 0 AND e.seq > 0)`)
	})
	return n, err
}
