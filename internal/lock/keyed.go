package lock

import (
	"context"
	"sync"
)

// Mutex is a lock within this process; a wait for it ends with a context. Its
// zero value is not locked; it must not be copied.
type Mutex struct {
	once sync.Once
	held chan struct{} // capacity 1; full while locked
}

// Lock takes the lock. If ctx ends first, or has already ended, the lock is
// not taken, and the error is ctx's cause.
func (m *Mutex) Lock(ctx context.Context) error {
	held := m.token()
	select {
	case held <- struct{}{}:
		if ctx.Err() == nil { // if both are ready, select chooses either
			return nil
		}
		<-held
	case <-ctx.Done():
	}
	return context.Cause(ctx)
}

// Unlock releases the lock, which must be held: otherwise Unlock would block
// until another goroutine takes it.
func (m *Mutex) Unlock() { <-m.token() }

func (m *Mutex) token() chan struct{} {
	m.once.Do(func() { m.held = make(chan struct{}, 1) })
	return m.held
}

// Keyed is a Mutex for every key. It stores only keys that are locked or
// waited for. Its zero value is ready to use; it must not be copied.
type Keyed[K comparable] struct {
	mu   sync.Mutex // guards the following fields
	keys map[K]*keyMutex
}

type keyMutex struct {
	Mutex
	users int // holders and waiters
}

// Lock takes the lock of a key. unlock releases it and must be called once. If
// ctx ends first, or has already ended, the lock is not taken, and the error is
// ctx's cause.
func (k *Keyed[K]) Lock(ctx context.Context, key K) (unlock func(), err error) {
	m := k.enter(key)
	if err := m.Lock(ctx); err != nil {
		k.leave(key, m)
		return nil, err
	}
	return func() { m.Unlock(); k.leave(key, m) }, nil
}

func (k *Keyed[K]) enter(key K) *keyMutex {
	k.mu.Lock()
	defer k.mu.Unlock()
	m := k.keys[key]
	if m == nil {
		if k.keys == nil {
			k.keys = map[K]*keyMutex{}
		}
		m = &keyMutex{}
		k.keys[key] = m
	}
	m.users++
	return m
}

func (k *Keyed[K]) leave(key K, m *keyMutex) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if m.users--; m.users == 0 {
		delete(k.keys, key)
	}
}
