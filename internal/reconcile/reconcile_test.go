package reconcile

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// run starts l inside the current synctest bubble and stops it at the end.
func run[K comparable](t *testing.T, l *Loop[K]) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); l.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
}

func TestNeverTwoAtOnceForOneKey(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var inside, most, total atomic.Int32
		l := New(Config[int]{Workers: 8, Step: func(context.Context, int) (time.Duration, error) {
			n := inside.Add(1)
			most.Store(max(most.Load(), n))
			time.Sleep(time.Millisecond)
			inside.Add(-1)
			total.Add(1)
			return 0, nil
		}})
		run(t, l)
		for range 20 {
			l.Wake(1)
			time.Sleep(300 * time.Microsecond)
		}
		time.Sleep(time.Second)
		synctest.Wait()
		if most.Load() != 1 || total.Load() < 2 {
			t.Fatalf("most at once %d, total %d", most.Load(), total.Load())
		}
	})
}

func TestWorkersBound(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var inside, most, total atomic.Int32
		l := New(Config[int]{Workers: 3, Step: func(context.Context, int) (time.Duration, error) {
			most.Store(max(most.Load(), inside.Add(1)))
			time.Sleep(time.Second)
			inside.Add(-1)
			total.Add(1)
			return 0, nil
		}})
		run(t, l)
		for k := range 10 {
			l.Wake(k)
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		if most.Load() != 3 || total.Load() != 10 {
			t.Fatalf("most at once %d, total %d", most.Load(), total.Load())
		}
	})
}

func TestWokenWhileRunningRunsAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var n atomic.Int32
		var l *Loop[string]
		l = New(Config[string]{Step: func(context.Context, string) (time.Duration, error) {
			if n.Add(1) == 1 {
				l.Wake("a")
			}
			return 0, nil
		}})
		run(t, l)
		l.Wake("a")
		synctest.Wait()
		if n.Load() != 2 {
			t.Fatalf("ran %d times, want 2", n.Load())
		}
		l.mu.Lock()
		defer l.mu.Unlock()
		if len(l.entries) != 0 || l.timers.Len() != 0 {
			t.Fatal("an idle key is kept")
		}
	})
}

func TestAfterAndEarlierWake(t *testing.T) {
	var mu sync.Mutex
	var at []time.Duration
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		l := New(Config[string]{Step: func(context.Context, string) (time.Duration, error) {
			mu.Lock()
			defer mu.Unlock()
			at = append(at, time.Since(start))
			return 10 * time.Second, nil
		}})
		run(t, l)
		l.Wake("a") // at 0, then due at 10 s
		time.Sleep(4 * time.Second)
		l.Wake("a") // at 4, then due at 14 s
		time.Sleep(11 * time.Second)
		synctest.Wait()
	})
	want := []time.Duration{0, 4 * time.Second, 14 * time.Second}
	if len(at) != 3 || at[0] != want[0] || at[1] != want[1] || at[2] != want[2] {
		t.Fatalf("ran at %v, want %v", at, want)
	}
}

func TestBackoffGrowsAndEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var attempts []int
		var gaps []time.Duration
		last := time.Now()
		l := New(Config[string]{
			MinBackoff: time.Second, MaxBackoff: 8 * time.Second,
			Step: func(context.Context, string) (time.Duration, error) {
				gaps = append(gaps, time.Since(last))
				last = time.Now()
				if len(gaps) == 8 {
					return 0, nil
				}
				return 0, errors.New("no")
			},
			Failed: func(_ string, n int, _ error) { attempts = append(attempts, n) },
		})
		run(t, l)
		l.Wake("a")
		time.Sleep(time.Hour)
		synctest.Wait()
		if len(gaps) != 8 || len(attempts) != 7 || attempts[6] != 7 {
			t.Fatalf("gaps %v, attempts %v", gaps, attempts)
		}
		for i, g := range gaps[1:] {
			full := min(time.Second<<i, 8*time.Second)
			if g > full || g < full*3/4 {
				t.Errorf("pause %d was %v, want %v less up to a quarter", i+1, g, full)
			}
		}
	})
}

func TestInterruptCancelsAndRunsAgainWithoutPause(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var causes []error
		failed := 0
		start := time.Now()
		l := New(Config[string]{
			Step: func(ctx context.Context, _ string) (time.Duration, error) {
				if len(causes) == 1 {
					causes = append(causes, nil)
					return 0, nil
				}
				<-ctx.Done()
				causes = append(causes, context.Cause(ctx))
				return 0, ctx.Err()
			},
			Failed: func(string, int, error) { failed++ },
		})
		run(t, l)
		l.Wake("a")
		synctest.Wait()
		l.Interrupt("a")
		synctest.Wait()
		if len(causes) != 2 || !errors.Is(causes[0], ErrInterrupted) {
			t.Fatalf("causes %v", causes)
		}
		if failed != 0 || time.Since(start) != 0 {
			t.Fatalf("failed %d times, took %v", failed, time.Since(start))
		}
	})
}

func TestRunWaitsForSteps(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ended := false
		l := New(Config[int]{Step: func(ctx context.Context, _ int) (time.Duration, error) {
			<-ctx.Done()
			time.Sleep(time.Second) // cleaning up
			ended = true
			return 0, ctx.Err()
		}})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { defer close(done); l.Run(ctx) }()
		l.Wake(1)
		synctest.Wait()
		cancel()
		<-done
		if !ended {
			t.Fatal("Run returned while a step was running")
		}
	})
}

func TestStats(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hold := make(chan struct{})
		l := New(Config[string]{Workers: 1, MinBackoff: time.Hour, MaxBackoff: time.Hour, Step: func(_ context.Context, key string) (time.Duration, error) {
			switch key {
			case "fails":
				return 0, errors.New("no")
			case "later":
				return time.Hour, nil
			}
			<-hold
			return 0, nil
		}})
		run(t, l)
		if s := l.Stats(); s != (Stats{}) {
			t.Errorf("at the beginning: %+v", s)
		}
		for _, key := range []string{"fails", "later", "runs"} {
			l.Wake(key)
			synctest.Wait()
		}
		l.Wake("waits")
		time.Sleep(3 * time.Second)
		l.Wake("waits too")
		time.Sleep(time.Second)
		if s, want := l.Stats(), (Stats{Ready: 2, Running: 1, Delayed: 2, Failing: 1, Lag: 4 * time.Second}); s != want {
			t.Errorf("%+v, want %+v", s, want)
		}
		close(hold)
		synctest.Wait()
		if s, want := l.Stats(), (Stats{Delayed: 2, Failing: 1}); s != want {
			t.Errorf("%+v, want %+v", s, want)
		}
	})
}

func TestCancelledStepsAreNotReported(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var failed atomic.Int32
		l := New(Config[int]{
			Step: func(ctx context.Context, _ int) (time.Duration, error) {
				<-ctx.Done()
				return 0, errors.New("the driver was cut off")
			},
			Failed: func(int, int, error) { failed.Add(1) },
		})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { defer close(done); l.Run(ctx) }()
		l.Wake(1)
		synctest.Wait()
		cancel()
		<-done
		if failed.Load() != 0 {
			t.Error("Failed was called for a step that the end of the context of Run has cancelled")
		}
	})
}

// Steps that hang delay only the steps of their own lane, and a key that its step puts into
// another lane continues there.
func TestLanes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		ran := map[int]int{}
		var l *Loop[int]
		l = New(Config[int]{Workers: 2, Step: func(ctx context.Context, key int) (time.Duration, error) {
			if l.Assign(key, map[bool]string{true: "hung", false: "works"}[key < 10]) {
				l.Wake(key)
				return 0, nil
			}
			if key < 10 {
				<-ctx.Done()
				return 0, ctx.Err()
			}
			mu.Lock()
			defer mu.Unlock()
			ran[key]++
			return 0, nil
		}})
		run(t, l)
		for key := range 20 {
			l.Wake(key)
		}
		synctest.Wait()
		time.Sleep(time.Minute)
		s := l.Stats()
		mu.Lock()
		defer mu.Unlock()
		if len(ran) != 10 || ran[10] != 1 || s.Running != 2 || s.Ready != 8 || s.Lag != time.Minute {
			t.Errorf("%d keys ran, %+v", len(ran), s)
		}
		if l.Forget(10); !l.Assign(10, "works") || l.Assign(10, "works") {
			t.Error("Assign does not return whether the lane has changed")
		}
	})
}
