package server

import (
	"context"
	"strconv"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
)

type egressInput struct {
	After       int64     `query:"after" minimum:"-1" doc:"Only records with a larger ID. Without it, a list has the newest records and a stream starts with the first; with -1, a stream starts with the next record"`
	LastEventID string    `header:"Last-Event-ID" doc:"Same as after, sent by clients of event streams; takes precedence over after"`
	Sandbox     string    `query:"sandbox" doc:"Only records of this sandbox (VMID or name)"`
	Job         string    `query:"job" doc:"Only records of this job"`
	Denied      bool      `query:"denied" doc:"Only denied requests"`
	Since       time.Time `query:"since" doc:"Only records from this time on"`
	Oldest      bool      `query:"oldest" doc:"A list without after has the oldest records instead of the newest"`
	Limit       int       `query:"limit" minimum:"1" maximum:"10000" default:"100" doc:"Maximum length of a list"`
	Follow      bool      `query:"follow" doc:"Respond with an event stream: first ready, then one message per record. To resume, set after to the ID of the last message"`
	CursorInput
}

func (s *Server) egress(ctx context.Context, in *egressInput) (*huma.StreamResponse, error) {
	after, sb, j, err := s.ofLog(ctx, in.After, in.LastEventID, in.Sandbox, in.Job)
	if err != nil {
		return nil, err
	}
	f := agentlab.EgressFilter{AfterID: after, Denied: in.Denied, Since: in.Since, Limit: in.Limit}
	if sb != nil {
		f.VMID, f.UID = sb.VMID, sb.UID
	}
	if j != nil {
		f.JobID = j.ID
	}
	if in.Follow {
		return s.followEgress(f), nil
	}
	if in.Cursor != "" {
		if f.AfterID, err = in.afterID("egress"); err != nil {
			return nil, err
		}
	}
	given := in.After > 0 || in.LastEventID != "" || in.Cursor != ""
	f.Tail, f.AfterID = !given && !in.Oldest, max(f.AfterID, 0)
	if !f.Tail {
		f.Limit++ // one more shows whether there is a next page
	}
	list, err := s.cfg.Services.Egress.List(ctx, f)
	if err != nil {
		return nil, err
	}
	return jsonBody(pageOf("egress", list, in.Limit, toEgressRecord, func(e agentlab.EgressEntry) []string { return []string{strconv.FormatInt(e.ID, 10)} })), nil
}

// followEgress sends the stored records after f.AfterID and then new ones,
// each exactly once.
func (s *Server) followEgress(f agentlab.EgressFilter) *huma.StreamResponse {
	return s.eventStream("egress", func(ctx context.Context, _ huma.Context, out *sse) error {
		defer s.cfg.Services.Egress.Watch(f)()
		return s.runEgress(ctx, f, out)
	})
}

func (s *Server) runEgress(ctx context.Context, f agentlab.EgressFilter, out *sse) error {
	svc := s.cfg.Services.Egress
	if f.AfterID < 0 { // from now on: after the newest record
		newest, err := svc.List(ctx, agentlab.EgressFilter{Limit: 1, Tail: true})
		if err != nil {
			return err
		}
		f.AfterID = 0
		if len(newest) > 0 {
			f.AfterID = newest[0].ID
		}
	}
	if err := out.send("ready", strconv.FormatInt(f.AfterID, 10), struct{}{}); err != nil {
		return err
	}
	f.Limit, f.Tail = eventPage, false
	for {
		changed := svc.Changed() // before the read, so that no change is missed
		list, err := svc.List(ctx, f)
		if err != nil {
			return err
		}
		for _, e := range list {
			if err := out.send("record", strconv.FormatInt(e.ID, 10), toEgressRecord(e)); err != nil {
				return err
			}
			f.AfterID = e.ID
		}
		if len(list) == f.Limit {
			continue
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil
		}
	}
}

func toEgressRecord(e agentlab.EgressEntry) api.EgressRecord {
	return api.EgressRecord{
		ID: e.ID, Time: e.Time.UTC(), Last: e.Last.UTC(), VMID: e.VMID, JobID: e.JobID, Seq: e.Seq, Proto: e.Proto, Name: e.Name,
		Addr: e.Addr, Port: e.Port, Allow: e.Allow, Rule: e.Rule, Error: e.Error, Count: e.Count, Dropped: e.Dropped,
	}
}

func toEgressSummary(s agentlab.EgressSummary) *api.EgressSummary {
	out := &api.EgressSummary{Allowed: s.Allowed, Denied: s.Denied, Dropped: s.Dropped, More: s.More}
	out.Targets, out.Private = toEgressTargets(s.Targets), toEgressTargets(s.Private)
	return out
}

func toEgressTargets(list []agentlab.EgressTarget) (out []api.EgressTarget) {
	for _, t := range list {
		t.Last = t.Last.UTC()
		out = append(out, api.EgressTarget(t))
	}
	return out
}
