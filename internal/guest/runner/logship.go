package runner

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"time"

	"github.com/agentlab-vm/agentlab/guestapi"
)

// shipper sends the agent's log to the controller as it grows. The controller
// reports what it has, so nothing is lost or doubled when either restarts.
type shipper struct {
	r      *Runner
	offset int64 // bytes that the controller has; -1: unknown
	tried  int64 // size of the log at the last send
	full   bool  // the controller accepts no more
}

const maxChunk = 512 << 10

// run sends until ctx ends.
func (s *shipper) run(ctx context.Context) {
	for sleep(ctx, s.r.cfg.Timing.LogBatch) {
		err := s.r.api.retry(ctx, 0, func() error { return s.send(ctx, false) })
		if denied(err) {
			s.r.control.abandon()
			return
		}
		if err != nil && ctx.Err() == nil {
			s.r.log.Warn("the log is not sent", "err", err)
		}
	}
}

// finish sends the rest, after the last line was added.
func (s *shipper) finish(ctx context.Context) error {
	return s.r.api.retry(ctx, s.r.cfg.Timing.Patience, func() error { return s.send(ctx, true) })
}

// send sends the part of the log that the controller does not have. Unless it
// is final, bytes that the controller did not accept are sent again only
// together with new ones.
func (s *shipper) send(ctx context.Context, final bool) error {
	if s.full {
		return nil
	}
	f, err := os.Open(s.r.dir.path(fileLog))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return &localError{err}
	}
	defer func() { _ = f.Close() }()
	st, err := f.Stat()
	if err != nil {
		return &localError{err}
	}
	if s.offset < 0 {
		if err := s.post(ctx, 0, nil, false); err != nil {
			return err
		}
	}
	for size := st.Size(); !s.full && s.offset < size && (final || size > s.tried); {
		p := make([]byte, min(size-s.offset, maxChunk))
		if _, err := io.ReadFull(io.NewSectionReader(f, s.offset, int64(len(p))), p); err != nil {
			return &localError{err}
		}
		before := s.offset
		last := before+int64(len(p)) == size
		if err := s.post(ctx, before, p, final && last); err != nil {
			return err
		}
		if last {
			s.tried = size
		}
		if s.offset <= before { // it should have accepted some
			if final {
				return fmt.Errorf("the controller accepts at most %d bytes of the log", s.offset)
			}
			return nil
		}
	}
	return nil
}

func (s *shipper) post(ctx context.Context, offset int64, p []byte, final bool) error {
	path := fmt.Sprintf("%s%s?offset=%d", s.r.api.base, guestapi.PathLog, offset)
	if final {
		path += "&final=1"
	}
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	var ack guestapi.LogAck
	if err := s.r.api.do(ctx, "POST", path, s.r.api.token, bytes.NewReader(p), int64(len(p)), &ack); err != nil {
		return err
	}
	s.offset, s.full = ack.Size, ack.Full
	return nil
}
