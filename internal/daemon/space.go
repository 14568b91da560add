package daemon

import (
	"context"
	"time"

	"github.com/agentlab-vm/agentlab"
)

const spaceEvery = 15 * time.Second

// watchSpace tells, as events, when the host's disk becomes too full to start
// anything and when it is no more.
func (s *services) watchSpace(ctx context.Context) error {
	t := time.NewTicker(spaceEvery)
	defer t.Stop()
	full := false
	for {
		if err := s.space.Start(); (err != nil) != full {
			full = err != nil
			s.tellSpace(ctx, err)
		}
		select {
		case <-t.C:
		case <-ctx.Done():
			return nil
		}
	}
}

func (s *services) tellSpace(ctx context.Context, err error) {
	e := agentlab.Event{Kind: agentlab.EventSpace, Message: "there is enough free disk space again", Data: `{"full":false}`}
	if err != nil {
		e.Message, e.Data = agentlab.OneLine(err.Error(), agentlab.MaxReasonBytes), `{"full":true}`
		s.log.Warn("the disk is nearly full", "err", err)
	}
	if err := s.store.AppendEvents(ctx, e); err != nil && ctx.Err() == nil {
		s.log.Error("an event was not written", "kind", e.Kind, "err", err)
	}
}
