package client

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"io"
	"iter"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
)

// EventQuery selects events.
type EventQuery struct {
	Kind    string // only events of this kind; "" means all
	Sandbox string // only events of this sandbox (VMID or name)
	JobID   string // only events of this job
	// Attempts adds the events of the attempts of the job, and of the job that prepares
	// their sandbox.
	Attempts bool
	// After is the ID of the last known event. 0 means the newest events for
	// Events, all events for FollowEvents. -1 means new events only, for
	// FollowEvents.
	After int64
	Limit int // maximum number of events of Events; 0 means 100

	Cursor string // Next of the previous page, instead of After; not for FollowEvents
}

func (q EventQuery) values() url.Values {
	v := url.Values{}
	set(v, "kind", q.Kind)
	set(v, "sandbox", q.Sandbox)
	set(v, "job", q.JobID)
	set(v, "attempts", q.Attempts)
	set(v, "after", q.After)
	return v
}

// Events lists events in chronological order.
func (c *Client) Events(ctx context.Context, q EventQuery) (api.List[api.Event], error) {
	v := q.values()
	set(v, "limit", q.Limit)
	set(v, "cursor", q.Cursor)
	return get[api.List[api.Event]](ctx, c, v, "events")
}

// EachEvent yields the stored events after q.After, as EachSandbox does sandboxes;
// Limit 0 means all.
func (c *Client) EachEvent(ctx context.Context, q EventQuery) iter.Seq2[api.Event, error] {
	return items[api.Event](ctx, c, q.values(), q.Limit, q.Cursor, "events")
}

// Delays between attempts to reconnect to the daemon.
const (
	firstRetry = 100 * time.Millisecond
	lastRetry  = 2 * time.Second
	maxRetries = 10
)

// FollowEvents yields events as they happen, each once and in order, until ctx
// ends or the caller stops. When the connection breaks, it reconnects and
// continues after the last event. If no daemon is running at first, is away for
// about fifteen seconds, or returns an error, the last pair has the error. The
// end of ctx is not an error.
func (c *Client) FollowEvents(ctx context.Context, q EventQuery) iter.Seq2[api.Event, error] {
	return follow(ctx, func() int64 { return q.After }, func(ctx context.Context, connected *bool, yield func(api.Event, error) bool) (bool, error) {
		return followOnce(ctx, c, []string{"events"}, q.values(), "event", &q.After, connected, yield)
	})
}

// follow calls once, which reads one connection to its end and sets connected if a
// daemon accepted it, until the caller stops or an error is final. after returns the ID of the last message.
func follow[T any](ctx context.Context, after func() int64,
	once func(ctx context.Context, connected *bool, yield func(T, error) bool) (stopped bool, err error)) iter.Seq2[T, error] {
	return func(yield func(T, error) bool) {
		connected := false
		for failures := 0; ; {
			before, begun, accepted := after(), time.Now(), false
			stopped, err := once(ctx, &accepted, yield)
			if stopped || ctx.Err() != nil {
				return
			}
			connected = connected || accepted
			if after() != before || accepted && time.Since(begun) > lastRetry { // a quiet stream is healthy, too
				failures = 0
			}
			failures = min(failures+1, maxRetries+1)
			if err != nil && (!connected || agentlab.CodeOf(err) != agentlab.CodeUnavailable || failures > maxRetries) {
				var zero T
				yield(zero, err)
				return
			}
			select {
			case <-ctx.Done():
				return
			case <-time.After(min(firstRetry<<(failures-1), lastRetry)):
			}
		}
	}
}

// followOnce reads one event stream to its end, yields the messages named
// event, and sets after to the ID of the last one. It sets connected once a
// daemon has accepted the call; stopped means that the caller stopped.
func followOnce[T any](ctx context.Context, c *Client, path []string, v url.Values, event string, after *int64, connected *bool,
	yield func(T, error) bool) (stopped bool, err error) {
	ctx, cancel := context.WithCancel(ctx) // a break of the caller's loop cancels the request
	defer cancel()
	v.Set("follow", "1")
	resp, err := c.request(ctx, http.MethodGet, v, nil, "", path...)
	if err != nil {
		return false, err
	}
	defer func() { _ = resp.Body.Close() }()
	*connected = true
	err = readSSE(resp.Body, func(m sseMessage) error {
		if id, perr := strconv.ParseInt(m.id, 10, 64); perr == nil {
			*after = id
		}
		switch m.event {
		case event:
			var e T
			if err := json.Unmarshal(m.data, &e); err != nil {
				return agentlab.Errorf(agentlab.CodeInternal, "malformed %s: %w", event, err)
			}
			if !yield(e, nil) {
				stopped = true
				return errStop
			}
		case "error":
			return wireError(m.data)
		}
		return nil
	})
	if err != nil && !stopped {
		err = callError(ctx, err)
	}
	return stopped, err
}

// EgressQuery selects egress records.
type EgressQuery struct {
	Sandbox string    // only records of this sandbox (VMID or name)
	JobID   string    // only records of this job
	Denied  bool      // only denied requests
	Since   time.Time // only records from this time on; zero means any
	// After is the ID of the last known record, as in EventQuery.
	After int64
	// Oldest makes Egress start with the oldest records when After is 0.
	Oldest bool
	Limit  int // maximum number of records of Egress; 0 means 100

	Cursor string // Next of the previous page, instead of After; not for FollowEgress
}

func (q EgressQuery) values() url.Values {
	v := url.Values{}
	set(v, "sandbox", q.Sandbox)
	set(v, "job", q.JobID)
	set(v, "denied", q.Denied)
	set(v, "after", q.After)
	if !q.Since.IsZero() {
		v.Set("since", q.Since.UTC().Format(time.RFC3339Nano))
	}
	return v
}

// Egress lists egress records in chronological order: the newest Limit
// records, or with After the first ones after it.
func (c *Client) Egress(ctx context.Context, q EgressQuery) (api.List[api.EgressRecord], error) {
	v := q.values()
	set(v, "oldest", q.Oldest)
	set(v, "limit", q.Limit)
	set(v, "cursor", q.Cursor)
	return get[api.List[api.EgressRecord]](ctx, c, v, "egress")
}

// FollowEgress yields egress records as they are made, as FollowEvents does
// events.
func (c *Client) FollowEgress(ctx context.Context, q EgressQuery) iter.Seq2[api.EgressRecord, error] {
	return follow(ctx, func() int64 { return q.After }, func(ctx context.Context, connected *bool, yield func(api.EgressRecord, error) bool) (bool, error) {
		return followOnce(ctx, c, []string{"egress"}, q.values(), "record", &q.After, connected, yield)
	})
}

// BuildImage builds an image and calls progress with each line of the build's
// output.
func (c *Client) BuildImage(ctx context.Context, b api.ImageBuild, progress func(line string)) (api.Image, error) {
	return postWithProgress[api.Image](ctx, c, b, progress, "check whether the image was built: agentlab image list", "images")
}

// WarmImage makes the template from which sandboxes with an image and the
// resources of a profile start, and builds the image if it is missing. It calls
// progress with lines about both.
func (c *Client) WarmImage(ctx context.Context, image string, w api.TemplateWarm, progress func(line string)) (api.Template, error) {
	return postWithProgress[api.Template](ctx, c, w, progress, "check whether the template was made: agentlab template list", "images", image, "warm")
}

// postWithProgress makes a call that is answered with lines of progress and then
// the result. hint is for a connection that ends before.
func postWithProgress[T any](ctx context.Context, c *Client, body any, progress func(line string), hint string, path ...string) (T, error) {
	var result T
	in, contentType, err := jsonBody(body)
	if err != nil {
		return result, err
	}
	resp, err := c.request(ctx, http.MethodPost, nil, in, contentType, path...)
	if err != nil {
		return result, err
	}
	defer func() { _ = resp.Body.Close() }()
	err = readSSE(resp.Body, func(m sseMessage) error {
		switch m.event {
		case "progress":
			var line api.ImageProgress
			if err := json.Unmarshal(m.data, &line); err != nil {
				return err
			}
			if progress != nil {
				progress(line.Line)
			}
		case "done":
			if err := json.Unmarshal(m.data, &result); err != nil {
				return err
			}
			return errStop
		case "error":
			return wireError(m.data)
		}
		return nil
	})
	switch {
	case errors.Is(err, errStop):
		return result, nil
	case err == nil:
		return result, agentlab.Errorf(agentlab.CodeUnknownOutcome, "the connection to the daemon ended before the result").WithHint("%s", hint)
	}
	return result, callError(ctx, err)
}

func wireError(data []byte) error {
	var e api.Error
	if err := json.Unmarshal(data, &e); err != nil {
		return err
	}
	return fromWire(e)
}

var errStop = errors.New("stop")

type sseMessage struct {
	event, id string
	data      []byte
}

// maxSSELine limits one line of an event stream.
const maxSSELine = 4 << 20

// readSSE calls fn with each message until fn returns an error or the stream
// ends, which is not an error.
func readSSE(r io.Reader, fn func(sseMessage) error) error {
	sc := bufio.NewScanner(r)
	sc.Buffer(make([]byte, 0, 4096), maxSSELine)
	var m sseMessage
	for sc.Scan() {
		field, value, _ := strings.Cut(sc.Text(), ":")
		value = strings.TrimPrefix(value, " ")
		switch field {
		case "event":
			m.event = value
		case "id":
			m.id = value
		case "data":
			if m.data != nil {
				m.data = append(m.data, '\n')
			}
			m.data = append(m.data, value...)
		case "":
			if sc.Text() != "" { // a comment
				continue
			}
			if m.data != nil {
				if err := fn(m); err != nil {
					return err
				}
			}
			m = sseMessage{}
		}
	}
	return sc.Err()
}
