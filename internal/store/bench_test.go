package store

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"

	"github.com/agentlab-vm/agentlab"
)

func fill(b testing.TB, s *testStore, n int) {
	b.Helper()
	err := s.write(context.Background(), func(w *tx) error { // one transaction: the fill is not what is measured
		for i := range n {
			sb := newSandbox(fmt.Sprintf("box-%d", i))
			sb.VMID, sb.CreatedAt, sb.UpdatedAt = 1000+i, epoch, epoch
			if err := sandboxes.insert(w, &sb); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		b.Fatal(err)
	}
}

// BenchmarkSandboxList: 10,000 rows must cost at most 12 times 1,000.
func BenchmarkSandboxList(b *testing.B) {
	for _, n := range []int{1000, 10000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			s := newStore(b)
			fill(b, s, n)
			for b.Loop() {
				if got, err := s.Sandboxes(b.Context(), agentlab.SandboxFilter{}); err != nil || len(got) != n {
					b.Fatal(len(got), err)
				}
			}
		})
	}
}

// BenchmarkCreate1000 makes 1,000 sandboxes, each in its own durable commit.
func BenchmarkCreate1000(b *testing.B) {
	for b.Loop() {
		s := newStore(b)
		for i := range 1000 {
			if _, err := s.AllocateSandbox(b.Context(), newSandbox(fmt.Sprintf("box-%d", i)), agentlab.Allocation{First: 1000, Last: 99999, MaxLive: 2000}, agentlab.Event{Kind: agentlab.EventSandboxCreated}); err != nil {
				b.Fatal(err)
			}
		}
	}
	b.ReportMetric(float64(b.Elapsed().Microseconds())/float64(b.N)/1000, "µs/create")
}

// BenchmarkAllocateAt10000 is one more sandbox beside 10,000.
func BenchmarkAllocateAt10000(b *testing.B) {
	s := newStore(b)
	fill(b, s, 10000)
	i := 0
	for b.Loop() {
		i++
		if _, err := s.AllocateSandbox(b.Context(), newSandbox(fmt.Sprintf("more-%d", i)), agentlab.Allocation{First: 1000, Last: 9999999}); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkOpen is Open and Close of a database with 10,000 sandboxes.
func BenchmarkOpen(b *testing.B) {
	s := newStore(b)
	fill(b, s, 10000)
	for b.Loop() {
		again, err := Open(b.Context(), s.path, Options{})
		if err != nil {
			b.Fatal(err)
		}
		if err := again.Close(); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkAllocateAddresses is one of many that ask for number and addresses
// at once, beside a thousand sandboxes that have them and a thousand numbers
// of others.
func BenchmarkAllocateAddresses(b *testing.B) {
	s := newStore(b)
	room := lab
	for n := range 1000 {
		room.Taken = append(room.Taken, 2000+2*n)
	}
	for i := range 1000 {
		if _, err := s.AllocateSandbox(b.Context(), newSandbox(fmt.Sprintf("box-%d", i)), room); err != nil {
			b.Fatal(err)
		}
	}
	room.Last = 1 << 20
	var n atomic.Int64
	b.ResetTimer()
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			if _, err := s.AllocateSandbox(b.Context(), newSandbox(fmt.Sprintf("more-%d", n.Add(1))), room); err != nil {
				b.Error(err)
			}
		}
	})
}
