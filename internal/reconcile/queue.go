package reconcile

import (
	"container/heap"
	"time"
)

// Queue has entries in the order of their times: thousands of things that are due at some
// time need no timer for each. The zero value is empty. Its methods must not be called at
// the same time.
type Queue[T any] struct{ entries ordered[T] }

// Entry is a place for a value in a queue. The zero value is in none.
type Entry[T any] struct {
	Value T
	at    time.Time
	place int // index in the queue + 1; 0 if it is in none
}

// At returns the time of the entry, also after Remove.
func (e *Entry[T]) At() time.Time { return e.at }

// Queued reports whether the entry is in a queue.
func (e *Entry[T]) Queued() bool { return e.place > 0 }

// Len returns the number of entries.
func (q *Queue[T]) Len() int { return len(q.entries) }

// First returns the entry with the earliest time, nil if there is none.
func (q *Queue[T]) First() *Entry[T] {
	if len(q.entries) == 0 {
		return nil
	}
	return q.entries[0]
}

// Set puts an entry into the queue, or moves it to another time.
func (q *Queue[T]) Set(e *Entry[T], at time.Time) {
	e.at = at
	if e.place > 0 {
		heap.Fix(&q.entries, e.place-1)
		return
	}
	heap.Push(&q.entries, e)
}

// Remove takes an entry out of the queue, if it is there.
func (q *Queue[T]) Remove(e *Entry[T]) {
	if e.place > 0 {
		heap.Remove(&q.entries, e.place-1)
	}
}

// ordered implements heap.Interface.
type ordered[T any] []*Entry[T]

func (o ordered[T]) Len() int           { return len(o) }
func (o ordered[T]) Less(i, j int) bool { return o[i].at.Before(o[j].at) }
func (o ordered[T]) Swap(i, j int) {
	o[i], o[j] = o[j], o[i]
	o[i].place, o[j].place = i+1, j+1
}

// Push adds an entry; called by container/heap only.
func (o *ordered[T]) Push(x any) {
	e := x.(*Entry[T])
	*o = append(*o, e)
	e.place = len(*o)
}

// Pop removes the last entry; called by container/heap only.
func (o *ordered[T]) Pop() any {
	last := len(*o) - 1
	e := (*o)[last]
	(*o)[last] = nil
	*o = (*o)[:last]
	e.place = 0
	return e
}
