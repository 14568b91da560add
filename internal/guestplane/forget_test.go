package guestplane

import (
	"io"
	"log/slog"
	"net"
	"testing"
	"testing/synctest"
	"time"
)

// TestIdleGuestIsForgotten checks that a guest without connections keeps its state
// while a rate limit depends on it, and only then.
func TestIdleGuestIsForgotten(t *testing.T) {
	for _, lines := range []int{0, 1, logBurst} {
		synctest.Test(t, func(t *testing.T) {
			s := New(Config{Logger: slog.New(slog.NewTextHandler(io.Discard, nil))})
			l := &line{s: s, vmid: 7}
			current := func() *guest {
				l.mu.Lock()
				defer l.mu.Unlock()
				return l.g
			}
			connect := func() (*guest, net.Conn) {
				near, far := net.Pipe()
				l.accept(near)
				synctest.Wait()
				return current(), far
			}
			g, far := connect()
			for range lines {
				g.log.Info("a line of the guest")
			}
			time.Sleep(headerTimeout / 2)
			if current() != g {
				t.Error("a connected guest was forgotten")
			}
			_ = far.Close()
			time.Sleep(forgetAfter - time.Second)
			if current() != g {
				t.Error("the state was deleted before the limits had recovered")
			}
			again, far := connect()
			if again != g {
				t.Error("the guest has a new state")
			}
			time.Sleep(2 * time.Second)
			synctest.Wait()
			if current() != g {
				t.Error("the first timer deleted the state of a connected guest")
			}
			_ = far.Close()
			time.Sleep(forgetAfter + time.Second)
			synctest.Wait()
			if kept := lines == logBurst; (current() == g) != kept {
				t.Errorf("%d lines: forgotten %t", lines, current() == nil)
			}
			time.Sleep(logBurst * logEvery)
			synctest.Wait()
			if current() != nil {
				t.Errorf("%d lines: the guest is never forgotten", lines)
			}
			l.stop()
			_, far = connect()
			if _, err := far.Read(make([]byte, 1)); err == nil {
				t.Error("a connection was served after the end")
			}
		})
	}
}
