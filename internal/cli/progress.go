package cli

import (
	"sync"
	"time"
)

// slowAfter is how long a command waits in silence.
const slowAfter = 2 * time.Second

// saySlow prints what the command waits for, if it still does so after slowAfter, until stop
// is called. Nothing else may be printed in between.
func (a *App) saySlow(what string) (stop func()) {
	return a.saySlowAfter(time.After(slowAfter), what)
}

func (a *App) saySlowAfter(slow <-chan time.Time, what string) (stop func()) {
	ended, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		select {
		case <-ended:
		case <-slow:
			a.Progressf("%s", what)
		}
	}()
	return sync.OnceFunc(func() {
		close(ended)
		<-done
	})
}
