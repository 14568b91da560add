package lock

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
)

func TestMutexHoldsOneAtATime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var m Mutex
		if err := m.Lock(t.Context()); err != nil {
			t.Fatal(err)
		}
		got := false
		go func() {
			if err := m.Lock(t.Context()); err != nil {
				t.Error(err)
			}
			got = true
		}()
		synctest.Wait()
		if got {
			t.Fatal("two hold the lock")
		}
		m.Unlock()
		synctest.Wait()
		if !got {
			t.Fatal("who waits does not get what was given back")
		}
	})
}

// A context that has ended gets no lock, however free it is: with a select
// alone it would, every other time.
func TestEndedContextGetsNoLock(t *testing.T) {
	why := errors.New("enough")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(why)
	var m Mutex
	var k Keyed[int]
	for range 100 {
		if err := m.Lock(ctx); !errors.Is(err, why) {
			t.Fatalf("Mutex: got %v, want the cause", err)
		}
		if _, err := k.Lock(ctx, 1); !errors.Is(err, why) {
			t.Fatalf("Keyed: got %v, want the cause", err)
		}
	}
	if err := m.Lock(t.Context()); err != nil {
		t.Errorf("the refused have kept the lock: %v", err)
	}
	if n := len(k.keys); n != 0 {
		t.Errorf("%d keys are remembered after refusals", n)
	}
}

func TestWaitEndsWithTheContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var k Keyed[string]
		unlock, err := k.Lock(t.Context(), "a")
		if err != nil {
			t.Fatal(err)
		}
		why := errors.New("enough")
		ctx, cancel := context.WithCancelCause(t.Context())
		var got error
		go func() { _, got = k.Lock(ctx, "a") }()
		synctest.Wait()
		if got != nil {
			t.Fatalf("did not wait: %v", got)
		}
		if n := k.keys["a"].users; n != 2 {
			t.Errorf("%d users, want who holds it and who waits", n)
		}
		cancel(why)
		synctest.Wait()
		if !errors.Is(got, why) {
			t.Fatalf("got %v, want the cause", got)
		}
		unlock()
		if n := len(k.keys); n != 0 {
			t.Errorf("%d keys are remembered", n)
		}
		if unlock, err = k.Lock(t.Context(), "a"); err != nil {
			t.Fatal(err)
		}
		unlock()
	})
}

func TestKeysDoNotWaitForEachOther(t *testing.T) {
	var k Keyed[int]
	for key := range 1000 {
		unlock, err := k.Lock(t.Context(), key) // would wait without end for another's
		if err != nil {
			t.Fatal(err)
		}
		defer unlock()
	}
}

// Many callers on many keys: one at a time for each key, and no memory of any
// once all are done.
func TestManyKeysLeaveNothingBehind(t *testing.T) {
	const keys, callers = 1000, 8
	var k Keyed[int]
	var counts [keys]int // each guarded by its key's lock: the race detector looks on
	var wg sync.WaitGroup
	for range callers {
		wg.Go(func() {
			for key := range keys {
				unlock, err := k.Lock(t.Context(), key)
				if err != nil {
					t.Error(err)
					return
				}
				n := counts[key]
				counts[key] = n + 1
				unlock()
			}
		})
	}
	wg.Wait()
	for key, n := range counts {
		if n != callers {
			t.Fatalf("key %d was held by %d, want %d", key, n, callers)
		}
	}
	if n := len(k.keys); n != 0 {
		t.Errorf("%d keys are remembered", n)
	}
}
