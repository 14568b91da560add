package guestcheck_test

import (
	"encoding/json"
	"math"
	"reflect"
	"strings"
	"testing"
	"unicode"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/guestcheck"
	"github.com/agentlab-vm/agentlab/internal/stream"
)

// written are all types that guests write and the host parses.
func written() []any {
	return []any{
		&guestapi.BootstrapRequest{}, &guestapi.Report{}, &guestapi.NetworkNarrow{}, &guestapi.Health{},
		&guestapi.SSHKeyResponse{}, &guestapi.ErrorBody{}, &guestapi.ProbeResult{}, &stream.ExitStatus{},
	}
}

func TestDecodeBounds(t *testing.T) {
	deep := func(n int) string { return strings.Repeat(`{"a":`, n) + "1" + strings.Repeat("}", n) }
	for name, test := range map[string]struct {
		in string
		ok bool
	}{
		"empty":              {"", false},
		"null":               {"null", false},
		"array":              {"[]", false},
		"two values":         {"{} {}", false},
		"tail":               {`{"status":"x"}]`, false},
		"as deep as may be":  {deep(guestcheck.MaxDepth), true},
		"too deep":           {deep(guestcheck.MaxDepth + 1), false},
		"a million brackets": {strings.Repeat("[", 1<<20), false},
		"deep in a string":   {`{"status":"` + strings.Repeat("[", 1000) + `"}`, true},
		"quote in a string":  {`{"status":"\"[[[[[[[[[[[[[[[[[[[["}`, true},
		"unknown key":        {`{"other":1}`, true},
		"huge number":        {`{"exit_code":1e999}`, false},
		"cut short":          {`{"status":"\`, false},
	} {
		var r guestapi.Report
		if err := guestcheck.Decode([]byte(test.in), &r); (err == nil) != test.ok {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestReport(t *testing.T) {
	code := func(n int) *int { return &n }
	good := guestapi.Report{Status: "COMPLETED", Phase: "done", ExitCode: code(0), Result: &guestapi.Result{BaseCommit: strings.Repeat("a", 40)}}
	if err := guestcheck.Report(&good); err != nil {
		t.Error(err)
	}
	for field, bad := range map[string]guestapi.Report{
		"status":     {Status: "QUEUED", Phase: "agent"},
		"phase":      {Status: "RUNNING", Phase: "waiting"},
		"exit_code":  {Status: "FAILED", Phase: "done", ExitCode: code(256)},
		"commit":     {Status: "FAILED", Phase: "done", Result: &guestapi.Result{HeadCommit: "--exec"}},
		"branch":     {Status: "FAILED", Phase: "done", Result: &guestapi.Result{Branch: "a..b"}},
		"kills":      {Status: "RUNNING", Phase: "agent", Kills: &guestapi.MemoryKills{Nested: math.MaxInt32}},
		"judge_exit": {Status: "COMPLETED", Phase: "done", Result: &guestapi.Result{JudgeExit: code(-2)}},
		"commits":    {Status: "FAILED", Phase: "done", Result: &guestapi.Result{Commits: math.MaxInt32}},
	} {
		err := guestcheck.Report(&bad)
		if e, ok := err.(*agentlab.Error); !ok || e.Code != agentlab.CodeInvalid || e.Field != field {
			t.Errorf("%s: %v", field, err)
		}
	}
}

func TestHealthNested(t *testing.T) {
	for state, ok := range map[string]bool{"": true, "works": true, "no-vm": true, "yes": false, "works\n": false} {
		if err := guestcheck.Health(guestapi.Health{Nested: state}); (err == nil) != ok {
			t.Errorf("%q: %v", state, err)
		}
	}
}

// FuzzGuestJSON decodes any bytes as every type that guests write: nothing
// panics, what is taken is bounded, and what passes a check is fit to be kept.
func FuzzGuestJSON(f *testing.F) {
	for _, v := range written() {
		p, err := json.Marshal(v)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(p)
	}
	f.Add([]byte(`{"status":"FAILED","phase":"done","exit_code":-1,"message":"a\u001b[31m\u202e\ud800","result":{"branch":"x","commits":1}}`))
	f.Add([]byte(`{"version":"1","boot_id":"b","uptime_ns":-1,"identity":"\u0000","system":"running"}`))
	f.Add([]byte(`{"user":"agent","port":22,"host_keys":["ssh-ed25519 AAAA"]}`))
	f.Fuzz(func(t *testing.T, p []byte) {
		for _, v := range written() {
			if guestcheck.Decode(p, v) != nil {
				continue
			}
			if _, err := json.Marshal(v); err != nil {
				t.Fatalf("%T cannot be written again: %v", v, err)
			}
			checked(t, v)
		}
	})
}

func checked(t *testing.T, v any) {
	t.Helper()
	plain := func(s string, most int) {
		if len(s) > most || strings.ContainsFunc(s, func(r rune) bool { return !unicode.IsPrint(r) }) {
			t.Fatalf("%T holds %.200q", v, s)
		}
	}
	switch v := v.(type) {
	case *guestapi.Report:
		if guestcheck.Report(v) != nil {
			return
		}
		plain(v.Message, agentlab.MaxReasonBytes+len("…"))
		if v.Result != nil {
			plain(v.Result.Branch, agentlab.MaxRefBytes)
			plain(v.Result.HeadCommit, 64)
		}
		before := *v
		if err := guestcheck.Report(v); err != nil || !reflect.DeepEqual(before, *v) {
			t.Fatalf("checked twice: %v %+v, before %+v", err, *v, before)
		}
	case *guestapi.Health:
		if guestcheck.Health(*v) == nil {
			for _, s := range []string{v.Version, v.BootID, v.Identity, v.System} {
				plain(s, 128)
			}
		}
	case *guestapi.SSHKeyResponse:
		if guestcheck.SSHKey(*v) == nil {
			for _, k := range v.HostKeys {
				plain(k, 16<<10)
			}
		}
	}
}
