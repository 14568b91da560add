//go:build linux

package guestd

import (
	"net"
	"testing"
	"testing/synctest"
	"time"
)

// slow is a client that takes each part of the output after a pause.
type slow struct {
	pause time.Duration
	got   int
}

func (s *slow) Write(p []byte) (int, error) {
	time.Sleep(s.pause)
	s.got += len(p)
	return len(p), nil
}

// A client that is slow to read gets all that a process has written before its end.
func TestDrainForASlowClient(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, process := net.Pipe()
		done := make(chan struct{})
		close(done)
		go func() {
			_, _ = process.Write(make([]byte, pipeMax/2))
			_ = process.Close()
		}()
		w := &slow{pause: time.Minute}
		if drain(w, f, done); w.got != pipeMax/2 {
			t.Errorf("%d bytes of %d", w.got, pipeMax/2)
		}
	})
}

// What other processes write after it has a limit.
func TestDrainEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, other := net.Pipe()
		done := make(chan struct{})
		close(done)
		go func() {
			for {
				if _, err := other.Write(make([]byte, 32<<10)); err != nil {
					return
				}
			}
		}()
		w, began := &slow{pause: time.Second}, time.Now()
		if drain(w, f, done); w.got > pipeMax+32<<10 || time.Since(began) > time.Minute {
			t.Errorf("%d bytes in %v", w.got, time.Since(began))
		}
		_ = f.Close()
	})
}
