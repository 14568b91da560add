package link

import (
	"bytes"
	"io"
	"os"
	"os/exec"
	"testing"
	"testing/synctest"
	"time"

	testguard "github.com/agentlab-vm/agentlab/test/guard"
)

// What a guest has sent before it closes a stream reaches a host that is slow to read. The
// test is a process of its own: yamux has timers for all sessions of a process, and those
// of a bubble cannot leave it.
func TestSlowReader(t *testing.T) {
	if os.Getenv("AGENTLAB_TEST_BUBBLE") == "" {
		cmd := exec.CommandContext(testguard.Context(t), os.Args[0], "-test.run=^TestSlowReader$")
		cmd.Env = append(os.Environ(), "AGENTLAB_TEST_BUBBLE=1")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("%v\n%s", err, out)
		}
		return
	}
	synctest.Test(t, func(t *testing.T) {
		s := newSerial(64 << 10)
		h := Host(t.Context(), s.host())
		g := Guest(s.guest())
		if err := h.WaitUp(t.Context()); err != nil {
			t.Fatal(err)
		}
		ours, err := h.Dial(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		theirs, err := g.Accept()
		if err != nil {
			t.Fatal(err)
		}
		sent := nasty(200 << 10)
		if _, err := theirs.Write(sent); err != nil {
			t.Fatal(err)
		}
		if err := theirs.Close(); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Hour) // of the bubble
		if got, err := io.ReadAll(ours); err != nil || !bytes.Equal(got, sent) {
			t.Errorf("%d bytes of %d, %v", len(got), len(sent), err)
		}
		_ = ours.Close()
		_, _ = h.Close(), g.Close()
	})
}
