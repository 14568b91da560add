package bootstrap

import (
	"context"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/secret"
)

// deliveries stores what was delivered.
type deliveries struct {
	Secrets
	values map[string][]string
}

func (d deliveries) SaveDelivered(_ context.Context, id string, values []string) error {
	d.values[id] = append(d.values[id], values...)
	return nil
}

func (d deliveries) Delivered(id string) ([]string, bool, error) {
	values, ok := d.values[id]
	return values, ok, nil
}

var _ Secrets = (*secret.Vault)(nil)

// A sandbox that continues the memory of another one has its secrets: they are
// redacted from what its guest sends, also if a redactor was built before.
func TestInherit(t *testing.T) {
	s := New(Config{Store: noStore{}, Secrets: deliveries{values: map[string][]string{"a": {"hunter2-hunter2"}}}})
	from, to, clean := agentlab.Sandbox{UID: "a"}, agentlab.Sandbox{UID: "b"}, agentlab.Sandbox{UID: "c"}
	text := "it is hunter2-hunter2"
	if got := s.RedactFunc(t.Context(), "b")(text); got != text {
		t.Fatalf("before: %q", got)
	}
	if some, err := s.Inherit(t.Context(), clean, to); some || err != nil {
		t.Errorf("of a sandbox without secrets: %t, %v", some, err)
	}
	if ok, err := s.ReceivedSecrets(to); ok || err != nil {
		t.Errorf("received before: %t, %v", ok, err)
	}
	if some, err := s.Inherit(t.Context(), from, to); !some || err != nil {
		t.Errorf("%t, %v", some, err)
	}
	if ok, err := s.ReceivedSecrets(to); !ok || err != nil {
		t.Errorf("received: %t, %v", ok, err)
	}
	if got := s.RedactFunc(t.Context(), "b")(text); strings.Contains(got, "hunter2") {
		t.Errorf("after: %q", got)
	}
}

// noStore is the store of a service that does not run.
type noStore struct{ Store }

func (noStore) Subscribe(func(agentlab.Commit)) {}
