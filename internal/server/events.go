package server

import (
	"context"
	"encoding/json"
	"net/http"
	"strconv"

	"github.com/danielgtaylor/huma/v2"

	"github.com/agentlab-vm/agentlab"
)

// eventPage is how many events are read from the database at a time.
const eventPage = 500

type eventsInput struct {
	After       int64  `query:"after" minimum:"-1" doc:"Only events with a larger ID. Without it, a list has the newest events and a stream starts with the first; with -1, a stream starts with the next event"`
	LastEventID string `header:"Last-Event-ID" doc:"Same as after, sent by clients of event streams; takes precedence over after"`
	Kind        string `query:"kind" doc:"Only events of this kind, e.g. job.status"`
	Sandbox     string `query:"sandbox" doc:"Only events of this sandbox (VMID or name)"`
	Job         string `query:"job" doc:"Only events of this job"`
	Attempts    bool   `query:"attempts" doc:"With job: also events of its attempts, and of the job that prepares their sandbox"`
	Limit       int    `query:"limit" minimum:"1" maximum:"10000" default:"100" doc:"Maximum length of a list"`
	Follow      bool   `query:"follow" doc:"Respond with an event stream: first ready, then one message per event. To resume, set after to the ID of the last message"`
	CursorInput
}

func (s *Server) events(ctx context.Context, in *eventsInput) (*huma.StreamResponse, error) {
	f, err := s.eventFilter(ctx, in)
	if err != nil {
		return nil, err
	}
	if in.Follow {
		return s.followEvents(f), nil
	}
	f.Tail, f.AfterID = f.AfterID <= 0, max(f.AfterID, 0)
	if !f.Tail {
		f.Limit++ // one more shows whether there is a next page
	}
	list, err := s.cfg.Services.Events.Events(ctx, f)
	if err != nil {
		return nil, err
	}
	return jsonBody(pageOf("events", list, in.Limit, toEvent, func(e agentlab.Event) []string { return []string{strconv.FormatInt(e.ID, 10)} })), nil
}

// jsonBody returns v as the answer of a call that may also answer with a
// stream.
func jsonBody(v any) *huma.StreamResponse {
	return &huma.StreamResponse{Body: func(hc huma.Context) {
		hc.SetHeader("Content-Type", "application/json")
		hc.SetStatus(http.StatusOK)
		_ = json.NewEncoder(hc.BodyWriter()).Encode(v)
	}}
}

func (s *Server) eventFilter(ctx context.Context, in *eventsInput) (agentlab.EventFilter, error) {
	f := agentlab.EventFilter{Kinds: optionalFilter(in.Kind), Limit: in.Limit}
	after, sb, j, err := s.ofLog(ctx, in.After, in.LastEventID, in.Sandbox, in.Job)
	f.AfterID = after
	if err == nil && in.Cursor != "" && in.LastEventID == "" {
		f.AfterID, err = in.afterID("events")
	}
	if err == nil && j != nil {
		f.JobIDs = []string{j.ID}
		if in.Attempts {
			err = s.addAttempts(ctx, &f, *j)
		}
	}
	if err != nil || sb == nil {
		return f, err
	}
	// Events before its creation are about an earlier sandbox with the same number.
	// Their order counts, because the clock may have been set.
	f.SandboxVMID = sb.VMID
	created, err := s.cfg.Services.Events.Events(ctx, agentlab.EventFilter{SandboxVMID: sb.VMID, Kinds: []string{agentlab.EventSandboxCreated}, Tail: true, Limit: 1})
	if len(created) > 0 { // otherwise retention has deleted it, and those before it
		f.From = created[0].ID
	}
	return f, err
}

// ofLog returns where a list or stream of a log begins, and of which sandbox and job it
// is; nil means of any.
func (s *Server) ofLog(ctx context.Context, after int64, last, sandbox, job string) (int64, *agentlab.Sandbox, *agentlab.Job, error) {
	if last != "" {
		id, err := strconv.ParseInt(last, 10, 64)
		if err != nil || id < 0 {
			return 0, nil, nil, agentlab.Errorf(agentlab.CodeInvalid, "it is not an event ID").WithField("Last-Event-ID")
		}
		after = id
	}
	var ofJob *agentlab.Job
	if job != "" {
		j, err := s.cfg.Services.Jobs.Get(ctx, job)
		if err != nil {
			return 0, nil, nil, err
		}
		ofJob = &j
	}
	if sandbox == "" {
		return after, nil, ofJob, nil
	}
	sb, err := s.cfg.Services.Sandboxes.Get(ctx, sandbox)
	if err == nil && ofJob != nil && ofJob.SandboxVMID != 0 && ofJob.SandboxVMID != sb.VMID { // 0: it has no sandbox yet
		err = agentlab.Errorf(agentlab.CodeInvalid, "job %s belongs to sandbox %d, not to %s", job, ofJob.SandboxVMID, sandbox).WithField("job").
			WithHint("set only the job or only the sandbox")
	}
	return after, &sb, ofJob, err
}

// addAttempts adds the jobs of which a job consists.
func (s *Server) addAttempts(ctx context.Context, f *agentlab.EventFilter, j agentlab.Job) error {
	parts, err := s.cfg.Services.Jobs.List(ctx, agentlab.JobFilter{ParentID: j.ID})
	for _, p := range parts {
		f.JobIDs = append(f.JobIDs, p.ID)
	}
	return err
}

// followEvents sends the stored events after f.AfterID and then new ones, each
// exactly once. A caller that does not read is disconnected and may connect
// again with the last ID that it received.
func (s *Server) followEvents(f agentlab.EventFilter) *huma.StreamResponse {
	return s.eventStream("event", func(ctx context.Context, _ huma.Context, out *sse) error {
		fo := follower{s: s, filter: f, out: out, last: f.AfterID}
		return fo.run(ctx)
	})
}

// follower is one event stream. last is the ID up to which all matching events
// were sent.
type follower struct {
	s      *Server
	filter agentlab.EventFilter
	out    *sse
	last   int64
}

func (f *follower) run(ctx context.Context) error {
	for ready := false; ; {
		live, cancel := f.s.cfg.Services.Events.Subscribe()
		err := f.subscribed(ctx, live, &ready)
		cancel()
		if err != nil || ctx.Err() != nil {
			return err
		}
	}
}

// subscribed sends the stored events and then live ones, until the
// subscription was too slow (nil) or the stream ends.
func (f *follower) subscribed(ctx context.Context, live <-chan agentlab.Event, ready *bool) error {
	if f.last < 0 { // from now on: after the newest event
		newest, err := f.s.cfg.Services.Events.Events(ctx, agentlab.EventFilter{Limit: 1, Tail: true})
		if err != nil {
			return err
		}
		f.last = 0
		if len(newest) > 0 {
			f.last = newest[len(newest)-1].ID
		}
	}
	if !*ready {
		*ready = true
		if err := f.out.send("ready", strconv.FormatInt(f.last, 10), struct{}{}); err != nil {
			return err
		}
	}
	if err := f.catchUp(ctx); err != nil {
		return err
	}
	for {
		select {
		case <-ctx.Done():
			return nil
		case e, ok := <-live:
			if !ok {
				return nil
			}
			if err := f.sendLive(ctx, e); err != nil {
				return err
			}
		}
	}
}

// sendLive sends a live event. IDs are assigned in commit order, so a gap after the
// last ID means that other events were not received yet; they are already in
// the database.
func (f *follower) sendLive(ctx context.Context, e agentlab.Event) error {
	switch {
	case e.ID <= f.last:
		return nil
	case e.ID > f.last+1:
		if err := f.catchUp(ctx); err != nil {
			return err
		}
		f.last = max(f.last, e.ID)
		return nil
	}
	f.last = e.ID
	if !f.filter.Match(e) {
		return nil
	}
	return f.send(e)
}

func (f *follower) catchUp(ctx context.Context) error {
	q := f.filter
	q.Limit = eventPage
	for {
		q.AfterID = f.last
		list, err := f.s.cfg.Services.Events.Events(ctx, q)
		if err != nil {
			return err
		}
		for _, e := range list {
			if err := f.send(e); err != nil {
				return err
			}
			f.last = e.ID
		}
		if len(list) < q.Limit {
			return nil
		}
	}
}

func (f *follower) send(e agentlab.Event) error {
	return f.out.send("event", strconv.FormatInt(e.ID, 10), toEvent(e))
}
