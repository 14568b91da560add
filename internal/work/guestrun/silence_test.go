package guestrun

import (
	"bytes"
	"context"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/work/worktest"
)

// The limit is for the time without progress, not for the whole time.
func TestSilenceIsLimited(t *testing.T) {
	limits := Silence{Quiet: 30 * time.Second, Answer: 2 * time.Minute, Most: 20 * time.Minute}
	lives := func(context.Context) error { return nil }
	refuses := func(context.Context) error { return agentlab.Errorf(agentlab.CodeLimit, "too many") }
	hangs := func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }
	for _, test := range []struct {
		name   string
		limits Silence
		alive  func(context.Context) error
		moves  time.Duration // how long there is progress, once in each 3 minutes
		ends   time.Duration // when watch returns an error; 0 is never
		what   string
	}{
		{"no answer", limits, hangs, 0, 150 * time.Second, "does not answer: nothing for 2m30s"},
		{"no answer, any command", AnySilence, hangs, 0, 150 * time.Second, "does not answer"},
		{"no progress", limits, lives, 0, 20 * time.Minute, "no progress: nothing for 20m0s"},
		{"refused", limits, refuses, 0, 20 * time.Minute, "no progress"},
		{"any command", AnySilence, lives, 0, 0, ""},
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

// An interrupt is not the fault of the guest.
func TestInterruptOfASilentGuest(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	c := worktest.HandlerClient(t, http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		cancel()
		<-r.Context().Done()
	}))
	err := Run(ctx, c, "7", guestapi.ExecRequest{Command: []string{"sleep"}}, nil, &bytes.Buffer{})
	if err == nil || agentlab.CodeOf(err) == agentlab.CodeUnavailable && strings.Contains(err.Error(), "does not answer") || ctx.Err() == nil {
		t.Errorf("%v", err)
	}
}
