package guestplane_test

import (
	"bytes"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/artifact"
	"github.com/agentlab-vm/agentlab/internal/guestplane/guesttest"
)

// FuzzCalls sends any body to every call of a guest that has good tokens.
func FuzzCalls(f *testing.F) {
	f.Add(0, "", []byte(`{"token":"x","vmid":42}`))
	f.Add(1, "", []byte(`{"status":"COMPLETED","phase":"done","exit_code":0,"result":{"base_commit":"","commits":1}}`))
	f.Add(2, "offset=3&final=1", []byte("log text"))
	f.Add(3, "outputs/x", []byte("content"))
	f.Add(4, "wait=0", []byte(""))
	c := guesttest.New(f, guestapi.BootstrapResponse{Job: &guestapi.Job{Upload: true}, Env: map[string]string{"K": secret}}, artifact.Limits{})
	h := c.Unlimited().Handler(c.VMID)
	f.Fuzz(func(t *testing.T, call int, arg string, body []byte) {
		method, target, token := "POST", "", c.Response().Runner.Token
		switch call {
		case 0:
			target = guestapi.PathBootstrap
		case 1:
			target = guestapi.PathReport
		case 2:
			target = guestapi.PathLog + "?" + strings.Map(printable, arg)
		case 3:
			method, target, token = "PUT", guestapi.PathUpload+url.PathEscape(arg), c.Response().Artifact.Token
		case 4:
			method, target = "GET", guestapi.PathDirective+"?x&"+strings.ReplaceAll(strings.Map(printable, arg), "wait=", "")
		default:
			return
		}
		req, err := http.NewRequestWithContext(t.Context(), method, "http://controller"+target, io.NopCloser(bytes.NewReader(body)))
		if err != nil {
			return
		}
		req.Header.Set("Authorization", "Bearer "+token)
		w := httptest.NewRecorder()
		h.ServeHTTP(w, req)
		if w.Code >= 500 {
			t.Errorf("%s %s: %d %s", method, target, w.Code, w.Body)
		}
		if call == 3 && w.Code == 200 && agentlab.ValidateArtifactPath(arg) != nil {
			t.Errorf("path %q is taken", arg)
		}
		if r := c.LastReport(); strings.Contains(r.Message, secret) {
			t.Errorf("the message %q is not redacted", r.Message)
		}
	})
}

func printable(r rune) rune {
	if r <= ' ' || r > '~' || r == '#' || r == '%' {
		return -1
	}
	return r
}
