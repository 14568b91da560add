package reconcile

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// Entries come in the order of their last times, whatever was changed before.
func TestQueueOrder(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	var q Queue[int]
	all := make([]*Entry[int], 200)
	for i := range all {
		all[i] = &Entry[int]{Value: i}
	}
	for range 2000 {
		e := all[r.IntN(len(all))]
		if r.IntN(3) == 0 {
			q.Remove(e)
			if e.Queued() {
				t.Fatal("it is still queued")
			}
			continue
		}
		q.Set(e, time.Unix(int64(r.IntN(1000)), 0))
	}
	var want []time.Time
	for _, e := range all {
		if e.Queued() {
			want = append(want, e.At())
		}
	}
	slices.SortFunc(want, time.Time.Compare)
	if len(want) == 0 || len(want) == len(all) || q.Len() != len(want) {
		t.Fatalf("%d entries, %d in the queue", len(want), q.Len())
	}
	for _, at := range want {
		e := q.First()
		if !e.At().Equal(at) {
			t.Fatalf("%s comes before %s", e.At(), at)
		}
		q.Remove(e)
	}
	if q.First() != nil {
		t.Error("the queue is not empty")
	}
}
