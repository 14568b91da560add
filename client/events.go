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

// EventQuery chooses events.
type EventQuery struct {
	Kind    string // only this kind; "" means all
	Sandbox string // only about this sandbox (VMID or name)
	JobID   string // only about this job
	// After is the id of the last event that is already known. 0: for Events
	// the newest ones, for FollowEvents all from the beginning. -1: for
	// FollowEvents only what happens from now on.
	After int64
	Limit int // for Events: at most this many; 0 means 100
}

func (q EventQuery) values() url.Values {
	v := url.Values{}
	set(v, "kind", q.Kind)
	set(v, "sandbox", q.Sandbox)
	set(v, "job", q.JobID)
	set(v, "after", q.After)
	return v
}

// Events lists events in the order in which they happened.
func (c *Client) Events(ctx context.Context, q EventQuery) (api.List[api.Event], error) {
	v := q.values()
	set(v, "limit", q.Limit)
	return get[api.List[api.Event]](ctx, c, "/v1/events", v)
}

// Pauses between attempts to reach a daemon that went away.
const (
	firstRetry = 100 * time.Millisecond
	lastRetry  = 2 * time.Second
	maxRetries = 10
)

// FollowEvents gives events as they happen, each once and in order, until ctx
// ends or the caller stops. When the connection breaks, it connects again and
// goes on after the last event. When there is no daemon at first, when it
// stays away for about fifteen seconds, or refuses, the last pair holds the
// error. The end of ctx is no error.
func (c *Client) FollowEvents(ctx context.Context, q EventQuery) iter.Seq2[api.Event, error] {
	return follow(ctx, func() int64 { return q.After }, func(ctx context.Context, connected *bool, yield func(api.Event, error) bool) (bool, error) {
		return followOnce(ctx, c, "/v1/events", q.values(), "event", &q.After, connected, yield)
	})
}

// follow calls once, which reads one connection to its end, as long as there
// is hope. after tells how far it has come.
func follow[T any](ctx context.Context, after func() int64,
	once func(ctx context.Context, connected *bool, yield func(T, error) bool) (stopped bool, err error)) iter.Seq2[T, error] {
	return func(yield func(T, error) bool) {
		connected := false
		for failures := 0; ; {
			before := after()
			stopped, err := once(ctx, &connected, yield)
			if stopped || ctx.Err() != nil {
				return
			}
			if after() != before {
				failures = 0
			}
			failures++
			if err != nil && (!connected || agentlab.CodeOf(err) != agentlab.CodeUnavailable || failures > maxRetries) {
				var none T
				yield(none, err)
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

// followOnce reads one event stream to its end, gives the messages named
// event, and keeps after at the last one. connected is set once a daemon has
// agreed; stopped says that the caller wants no more.
func followOnce[T any](ctx context.Context, c *Client, path string, v url.Values, event string, after *int64, connected *bool,
	yield func(T, error) bool) (stopped bool, err error) {
	ctx, cancel := context.WithCancel(ctx) // a break in the caller's loop ends the request
	defer cancel()
	v.Set("follow", "1")
	resp, err := c.request(ctx, http.MethodGet, path, v, nil, "")
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

// BuildImage builds an image and calls progress with each line that the build
// prints.
func (c *Client) BuildImage(ctx context.Context, b api.ImageBuild, progress func(line string)) (api.Image, error) {
	p, err := json.Marshal(b)
	if err != nil {
		return api.Image{}, agentlab.Errorf(agentlab.CodeInvalid, "%w", err)
	}
	resp, err := c.request(ctx, http.MethodPost, "/v1/images", nil, strings.NewReader(string(p)), "application/json")
	if err != nil {
		return api.Image{}, err
	}
	defer func() { _ = resp.Body.Close() }()
	var img api.Image
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
			if err := json.Unmarshal(m.data, &img); err != nil {
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
		return img, nil
	case err == nil:
		return img, agentlab.Errorf(agentlab.CodeUnknownOutcome, "the daemon went away during the build").
			WithHint("see whether it is there: agentlab image list")
	}
	return img, callError(ctx, err)
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

// maxSSELine bounds one line of an event stream.
const maxSSELine = 4 << 20

// readSSE calls fn with each message until fn fails or the stream ends; an
// end is no error.
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
