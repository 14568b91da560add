package lock

import (
	"context"
	"sync"
)

// Mutex is a lock within this process that is waited for only as long as a
// context lasts. Its zero value is not locked; it must not be copied.
type Mutex struct {
	once sync.Once
	held chan struct{} // has room for one token, and holds it while locked
}

// Lock takes the lock. When ctx ends first, or has ended already, the lock is
// not taken, and the error is ctx's cause.
func (m *Mutex) Lock(ctx context.Context) error {
	held := m.token()
	select {
	case held <- struct{}{}:
		if ctx.Err() == nil { // of two that are ready, select takes either
			return nil
		}
		<-held
	case <-ctx.Done():
	}
	return context.Cause(ctx)
}

// Unlock gives the lock back. One that is not held is not to be unlocked: it
// would wait for somebody to take it.
func (m *Mutex) Unlock() { <-m.token() }

func (m *Mutex) token() chan struct{} {
	m.once.Do(func() { m.held = make(chan struct{}, 1) })
	return m.held
}

// Keyed is a Mutex for every key. It remembers only those keys that somebody
// holds or waits for. Its zero value has none; it must not be copied.
type Keyed[K comparable] struct {
	mu   sync.Mutex // guards what follows
	keys map[K]*keyMutex
}

type keyMutex struct {
	Mutex
	users int // who hold it or wait for it
}

// Lock takes the lock of a key, which unlock gives back; unlock is to be called
// once. When ctx ends first, or has ended already, the lock is not taken, and
// the error is ctx's cause.
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
