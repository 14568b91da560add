package server

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/client"
)

type stubEgress struct{ *stub }

func (s stubEgress) List(_ context.Context, f agentlab.EgressFilter) ([]agentlab.EgressEntry, error) {
	if err := s.called("egress"); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []agentlab.EgressEntry
	for _, e := range s.egress {
		if f.Match(e) {
			out = append(out, e)
		}
	}
	if len(out) > f.Limit {
		if f.Tail {
			return out[len(out)-f.Limit:], nil
		}
		return out[:f.Limit], nil
	}
	return out, nil
}

func (s stubEgress) Summary(context.Context, agentlab.EgressFilter, int) (agentlab.EgressSummary, error) {
	return agentlab.EgressSummary{Allowed: 2, Denied: 3, Targets: []agentlab.EgressTarget{{Proto: "tcp", Addr: "10.0.0.1", Port: 22, Rule: "always.private", Count: 3}}}, nil
}

func (s stubEgress) Changed() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.more
}

func (s stubEgress) Watch(agentlab.EgressFilter) func() { return func() {} }

// addEgress records refused questions with the next ids.
func (st *stub) addEgress(n int) {
	st.mu.Lock()
	defer st.mu.Unlock()
	for range n {
		id := int64(len(st.egress) + 1)
		st.egress = append(st.egress, agentlab.EgressEntry{ID: id, UID: ownUID, JobID: stubJobID, EgressRecord: agentlab.EgressRecord{
			Seq: id, VMID: 1, Time: time.Unix(id, 0), Last: time.Unix(id, 0), Proto: "dns", Name: fmt.Sprintf("n%d.example", id), Allow: id%2 == 0, Rule: "mode.nat", Count: 1,
		}})
	}
	close(st.more)
	st.more = make(chan struct{})
}

func TestEgressList(t *testing.T) {
	h := start(t, nil)
	h.addEgress(10)
	for _, tc := range []struct {
		q    client.EgressQuery
		want []int64
		next string
	}{
		{client.EgressQuery{Limit: 3}, []int64{8, 9, 10}, ""},
		{client.EgressQuery{Limit: 3, Oldest: true}, []int64{1, 2, 3}, cursorOf("egress", "3")},
		{client.EgressQuery{Limit: 3, Cursor: cursorOf("egress", "3")}, []int64{4, 5, 6}, cursorOf("egress", "6")},
		{client.EgressQuery{Limit: 3, After: 8}, []int64{9, 10}, ""},
		{client.EgressQuery{Denied: true}, []int64{1, 3, 5, 7, 9}, ""},
		{client.EgressQuery{Since: time.Unix(9, 0), Sandbox: "box", JobID: stubJobID}, []int64{9, 10}, ""},
	} {
		list, err := h.client.Egress(t.Context(), tc.q)
		if err != nil {
			t.Fatal(err)
		}
		var got []int64
		for _, r := range list.Items {
			got = append(got, r.ID)
		}
		if fmt.Sprint(got) != fmt.Sprint(tc.want) || list.Next != tc.next {
			t.Errorf("%+v: %v, next %q", tc.q, got, list.Next)
		}
	}
	if _, err := h.client.Egress(t.Context(), client.EgressQuery{Sandbox: "nobody"}); agentlab.CodeOf(err) != agentlab.CodeNotFound {
		t.Error(err)
	}
	j, err := h.client.Job(t.Context(), stubJobID)
	if err != nil || j.Egress == nil || j.Egress.Denied != 3 || len(j.Egress.Targets) != 1 {
		t.Errorf("%+v, %v", j.Egress, err)
	}
}

func TestFollowEgress(t *testing.T) {
	h := start(t, nil)
	h.addEgress(eventPage + 20)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	want := int64(1)
	for r, err := range h.client.FollowEgress(ctx, client.EgressQuery{}) {
		if err != nil || r.ID != want {
			t.Fatalf("got %d, want %d, %v", r.ID, want, err)
		}
		if want++; want == eventPage+21 {
			h.addEgress(3)
		}
		if want == eventPage+24 {
			break
		}
	}

	// From now on only what is new.
	stream, ready := make(chan int64), make(chan struct{})
	go func() {
		close(ready)
		for r := range h.client.FollowEgress(ctx, client.EgressQuery{After: -1, Denied: true}) {
			stream <- r.ID
		}
		close(stream)
	}()
	<-ready
	for {
		h.addEgress(2) // until the stream has begun
		select {
		case id := <-stream:
			if id <= eventPage+23 || id%2 == 0 {
				t.Errorf("got %d", id)
			}
			stop()
			for range stream {
			}
			return
		case <-time.After(10 * time.Millisecond):
		}
	}
}
