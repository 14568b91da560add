package guestplane_test

import (
	"net/http"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/artifact"
)

// If the secrets of a job are not available for redaction, that is an error of
// the daemon: the runner retries, and learns nothing about the host.
func TestNoRedactor(t *testing.T) {
	for _, code := range []agentlab.Code{agentlab.CodeInvalid, agentlab.CodeDenied, agentlab.CodeNotFound, agentlab.CodeInternal} {
		c := setup(t, artifact.Limits{})
		c.NoRedactor = agentlab.Errorf(code, "other users can read /home/owner/.local/secrets/identity.txt")
		for name, call := range map[string]func() (int, []byte){
			"log": func() (int, []byte) {
				return c.do("POST", guestapi.PathLog+"?offset=0", c.runner(), strings.NewReader("text"))
			},
			"upload": func() (int, []byte) {
				return c.do("PUT", guestapi.PathUpload+"a.txt", c.uploads(), strings.NewReader("text"))
			},
		} {
			if st, p := call(); st != http.StatusServiceUnavailable || strings.Contains(string(p), "identity") {
				t.Errorf("%s, %s: %d %s", code, name, st, p)
			}
		}
	}
}
