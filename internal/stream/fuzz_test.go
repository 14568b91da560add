package stream_test

import (
	"bytes"
	"errors"
	"io"
	"testing"
	"testing/iotest"

	"github.com/agentlab-vm/agentlab/internal/stream"
)

// FuzzReader reads frames from any bytes: no frame is larger than it may be,
// and what was read is written again as the same bytes.
func FuzzReader(f *testing.F) {
	var good bytes.Buffer
	w := stream.NewWriter(&good)
	_ = w.Frame(stream.Stdout, []byte("text"))
	_ = w.JSON(stream.Exit, stream.ExitStatus{Code: 3})
	f.Add(good.Bytes())
	f.Add([]byte{5, 0, 0xff, 0xff, 0xff, 1})
	f.Add([]byte{5, 0, 1, 0, 0})
	f.Add([]byte{8, 0, 0, 0, 0, 9, 0, 0, 0, 0})
	f.Fuzz(func(t *testing.T, p []byte) {
		var again bytes.Buffer
		out := stream.NewWriter(&again)
		r := stream.NewReader(iotest.HalfReader(bytes.NewReader(p)))
		for {
			kind, payload, err := r.Next()
			if errors.Is(err, io.EOF) && again.Len() != len(p) {
				t.Fatalf("a clean end after %d of %d bytes", again.Len(), len(p))
			}
			if err != nil {
				break
			}
			if len(payload) > stream.MaxPayload || kind < stream.Stdin || kind > stream.Ping {
				t.Fatalf("type %d, %d bytes", kind, len(payload))
			}
			if err := out.Frame(kind, payload); err != nil {
				t.Fatal(err)
			}
		}
		if !bytes.HasPrefix(p, again.Bytes()) {
			t.Fatalf("read %x of %x", again.Bytes(), p)
		}
	})
}
