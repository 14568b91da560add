package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/stream"
	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
	"github.com/agentlab-vm/agentlab/test/guard"
)

// The limit is for the time without progress, not for the whole time.
func TestSilenceIsLimited(t *testing.T) {
	limits := silence{quiet: 30 * time.Second, answer: 2 * time.Minute, most: 20 * time.Minute}
	lives := func(context.Context) error { return nil }
	refuses := func(context.Context) error { return agentlab.Errorf(agentlab.CodeLimit, "too many") }
	hangs := func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }
	for _, test := range []struct {
		name   string
		limits silence
		alive  func(context.Context) error
		moves  time.Duration // how long there is progress, once in each 3 minutes
		ends   time.Duration // when watch returns an error; 0 is never
		what   string
	}{
		{"no answer", limits, hangs, 0, 150 * time.Second, "does not answer: nothing for 2m30s"},
		{"no answer, any command", anySilence, hangs, 0, 150 * time.Second, "does not answer"},
		{"no progress", limits, lives, 0, 20 * time.Minute, "no progress: nothing for 20m0s"},
		{"refused", limits, refuses, 0, 20 * time.Minute, "no progress"},
		{"any command", anySilence, lives, 0, 0, ""},
		{"slow", limits, lives, 5 * time.Hour, 5*time.Hour + 20*time.Minute, "no progress: nothing for 20m0s"},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithTimeout(t.Context(), 24*time.Hour)
				defer cancel()
				began := time.Now()
				var moved atomic.Int64
				go func() {
					for time.Since(began) < test.moves {
						time.Sleep(3 * time.Minute)
						moved.Add(1)
					}
				}()
				err := test.limits.watch(ctx, "7", &moved, test.alive)
				took := time.Since(began)
				if test.ends == 0 {
					if err != nil || took < 24*time.Hour {
						t.Errorf("after %s: %v", took, err)
					}
					return
				}
				if took < test.ends || took > test.ends+time.Minute || agentlab.CodeOf(err) != agentlab.CodeUnavailable || !strings.Contains(err.Error(), test.what) {
					t.Errorf("after %s, want %s: %v", took, test.ends, err)
				}
				if hint := agentlab.HintOf(err); !strings.Contains(hint, "agentlab sandbox stop 7") || !strings.Contains(hint, "agentlab stop, then agentlab start") {
					t.Errorf("hint %q", hint)
				}
			})
		})
	}
}

// silentGuest never answers a command of the repository, and lets run what else is
// asked with other.
func silentGuest(t *testing.T, upgrades bool, other func(conn io.Writer)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		var req guestapi.ExecRequest
		if err := json.NewDecoder(r.Body).Decode(&req); err != nil {
			t.Error(err)
		}
		command := strings.Join(req.Command, " ")
		if command != "true" && !upgrades || command == "true" && other == nil {
			<-r.Context().Done()
			return
		}
		conn, rw, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer func() { _ = conn.Close() }()
		_, _ = io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: "+guestapi.StreamProtocol+"\r\n\r\n")
		if command == "true" {
			other(conn)
			return
		}
		_, _ = io.Copy(io.Discard, rw) // until the host gives up
	}
}

// 'agentlab sync' and 'diff' do not wait for ever for a guest.
func TestRepositoryOfASilentGuest(t *testing.T) {
	w := newSessionWorld(t)
	lives := func(conn io.Writer) { _ = stream.NewWriter(conn).JSON(stream.Exit, stream.ExitStatus{}) }
	for name, test := range map[string]struct {
		handler http.HandlerFunc
		limits  silence
		want    string
	}{
		"nothing answers":       {silentGuest(t, false, nil), silence{time.Millisecond, time.Millisecond, guard.Patience}, "does not answer"},
		"no command answers":    {silentGuest(t, true, nil), silence{time.Millisecond, time.Millisecond, guard.Patience}, "does not answer"},
		"only this one is mute": {silentGuest(t, true, lives), silence{time.Millisecond, guard.Patience, 20 * time.Millisecond}, "makes no progress"},
	} {
		r := sessionRepo{c: handlerClient(t, test.handler), sandbox: "7", path: w.user, silence: test.limits}
		if _, err := r.state(t.Context()); agentlab.CodeOf(err) != agentlab.CodeUnavailable || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: state: %v", name, err)
		}
		err := r.fetch(t.Context(), []string{"trunk"}, true, "", func(*gitsafe.Bundle) error { return nil })
		if agentlab.CodeOf(err) != agentlab.CodeUnavailable || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: fetch: %v", name, err)
		}
	}
}

// An interrupt is not the fault of the guest.
func TestInterruptOfASilentGuest(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	c := handlerClient(t, http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		cancel()
		<-r.Context().Done()
	}))
	err := guestRun(ctx, c, "7", guestapi.ExecRequest{Command: []string{"sleep"}}, nil, &bytes.Buffer{})
	if err == nil || agentlab.CodeOf(err) == agentlab.CodeUnavailable && strings.Contains(err.Error(), "does not answer") || ctx.Err() == nil {
		t.Errorf("%v", err)
	}
}
