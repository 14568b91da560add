package server

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"testing"
)

// Only the end of the daemon cancels a call whose client waits for the answer.
func TestProblemOfCancelledCall(t *testing.T) {
	p := problemOf(fmt.Errorf("building: %w", context.Canceled))
	if p.Status != http.StatusServiceUnavailable || !strings.Contains(p.Detail, "the daemon stops") || p.Hint == "" {
		t.Errorf("%+v", p)
	}
}
