package job_test

import (
	"context"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
)

// give sets env.K of the bundle of profile secrets.
func (w *world) give(value string) {
	w.Helper()
	if err := w.vault.Set(context.Background(), "team", "env.K", strings.NewReader(value), false); err != nil {
		w.Fatal(err)
	}
}

// out fetches the bootstrap of a sandbox, which must hold a value.
func (w *world) out(vmid int, value string) {
	w.Helper()
	if got := w.fetch(vmid, w.token(vmid, time.Minute), vmid); got.status != http.StatusOK || !strings.Contains(got.body, value) {
		w.Fatalf("%+v", got)
	}
}

func (w *world) redacted(id string, values ...string) {
	w.Helper()
	for _, v := range values {
		if got := w.boot.RedactFunc(context.Background(), id)("x " + v + " y"); strings.Contains(got, v) {
			w.Errorf("kept would be %q", got)
		}
	}
}

// A sandbox that is kept after its job, and starts again, is given what its
// bundle holds then: that is redacted too.
func TestRedactionAfterTheJob(t *testing.T) {
	inWorld(t, func(w *world) {
		ctx := context.Background()
		w.give("value-before-change")
		ended := w.final(w.run(agentlab.JobRequest{Profile: "secrets", Task: "echo done", Keepalive: new(true)}).ID)
		w.give("value-after-change")
		w.out(w.sandbox(ended.ID).VMID, "value-after-change")
		w.redacted(ended.ID, "value-before-change", "value-after-change")
		w.restart()
		w.redacted(ended.ID, "value-before-change", "value-after-change")
		if n, err := w.boot.Sweep(ctx, w.jobs.Known); n != 0 || err != nil {
			t.Errorf("forgot %d, %v", n, err)
		}
	})
}

// Of a sandbox without a job, too, nothing is kept that it was given.
func TestRedactionWithoutJob(t *testing.T) {
	inWorld(t, func(w *world) {
		ctx := context.Background()
		w.give("value-of-k")
		sb, err := w.sandboxes.Create(ctx, agentlab.SandboxRequest{Profile: "secrets", TTL: time.Hour})
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute) // in the bubble's time; its own runner has fetched
		w.out(sb.VMID, "value-of-k")
		w.redacted(sb.UID, "value-of-k")
		w.restart()
		w.redacted(sb.UID, "value-of-k")
		if n, err := w.boot.Sweep(ctx, w.jobs.Known); n != 0 || err != nil {
			t.Errorf("forgot %d, %v", n, err)
		}
		if _, err := w.sandboxes.Destroy(ctx, sb.VMID); err != nil {
			t.Fatal(err)
		}
		w.eventually("destroyed", func() bool {
			now, err := w.store.Sandbox(ctx, sb.VMID)
			return err == nil && now.State == agentlab.SandboxDestroyed
		})
		if n, err := w.boot.Sweep(ctx, w.jobs.Known); n != 1 || err != nil {
			t.Errorf("forgot %d, %v", n, err)
		}
	})
}

// A redactor that is being made while a job is given other values does not
// outlive that.
func TestRedactorRace(t *testing.T) {
	inWorld(t, func(w *world) {
		ctx := context.Background()
		w.give("value-before-change")
		j := w.run(agentlab.JobRequest{Profile: "secrets", Task: "hang"})
		w.phase(j.ID, "agent")
		w.restart()
		reading, given := make(chan struct{}), make(chan struct{})
		hook := func() {
			close(reading)
			<-given
		}
		w.afterKept.Store(&hook)
		made := make(chan struct{})
		go func() {
			defer close(made)
			if _, err := w.boot.Redactor(ctx, j.ID); err != nil {
				t.Error(err)
			}
		}()
		<-reading
		w.give("value-after-change")
		w.out(w.sandbox(j.ID).VMID, "value-after-change")
		close(given)
		<-made
		w.redacted(j.ID, "value-before-change", "value-after-change")
		if _, err := w.jobs.Cancel(ctx, j.ID); err != nil {
			t.Fatal(err)
		}
		w.final(j.ID)
	})
}

// To make a redactor is work: a guest cannot have it made again with each
// call, after the end of its job neither.
func TestRedactorIsMadeOnce(t *testing.T) {
	inWorld(t, func(w *world) {
		w.give("value-of-k")
		j := w.final(w.run(agentlab.JobRequest{Profile: "secrets", Task: "echo done", Keepalive: new(true)}).ID)
		w.kept.Store(0)
		for range 20 {
			w.redacted(j.ID, "value-of-k")
		}
		if n := w.kept.Load(); n > 1 {
			t.Errorf("made %d times", n)
		}
	})
}
