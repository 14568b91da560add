package work

import (
	"sync"
	"time"
)

// slowAfter is how long a command waits in silence.
const slowAfter = 2 * time.Second

// SaySlow prints what the command waits for, if it still does so after slowAfter, until stop
// is called. Nothing else may be printed in between.
func SaySlow(ui UI, what string) (stop func()) {
	return saySlowAfter(ui, time.After(slowAfter), what)
}

func saySlowAfter(ui UI, slow <-chan time.Time, what string) (stop func()) {
	ended, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		select {
		case <-ended:
		case <-slow:
			ui.Progressf("%s", what)
		}
	}()
	return sync.OnceFunc(func() {
		close(ended)
		<-done
	})
}
