package fakellm_test

import (
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab/test/fakellm"
)

func post(t *testing.T, url, body string) string {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer sk-test")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	text, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		t.Fatalf("status %d, %v: %s", resp.StatusCode, err, text)
	}
	return string(text)
}

// The script advances with the tool results in the conversation, for both
// APIs, and requests without tools do not count.
func TestScriptAdvances(t *testing.T) {
	llm := fakellm.New(fakellm.Step{Run: "first-command"}, fakellm.Step{Run: "second-command"}, fakellm.Step{Say: "all done"})
	srv := httptest.NewServer(llm)
	defer srv.Close()
	const result = `{"role":"user","content":[{"type":"tool_result","tool_use_id":"x","content":"ok"}]}`
	tests := []struct{ name, path, body, want string }{
		{"claude first", "/v1/messages", `{"stream":true,"tools":[{"name":"Bash"}],"messages":[{"role":"user","content":"hi"}]}`, "first-command"},
		{"claude second", "/v1/messages?beta=true", `{"stream":true,"tools":[{"name":"Bash"}],"messages":[` + result + `]}`, "second-command"},
		{"claude end", "/v1/messages", `{"tools":[{"name":"Bash"}],"messages":[` + result + `,` + result + `]}`, "all done"},
		{"claude past the end", "/v1/messages", `{"tools":[{"name":"Bash"}],"messages":[` + result + `,` + result + `,` + result + `]}`, "all done"},
		{"claude side request", "/v1/messages", `{"messages":[{"role":"user","content":"title?"}]}`, `"text":"ok"`},
		{"codex first", "/v1/responses", `{"tools":[{"name":"exec_command"}],"input":[{"type":"message"}]}`, "first-command"},
		{"codex second", "/v1/responses", `{"tools":[{"name":"shell"}],"input":[{"type":"function_call_output"}]}`, "second-command"},
		{"codex end", "/v1/responses", `{"tools":[{"name":"shell"}],"input":[{"type":"function_call_output"},{"type":"function_call_output"}]}`, "all done"},
	}
	for _, tt := range tests {
		if got := post(t, srv.URL+tt.path, tt.body); !strings.Contains(got, tt.want) {
			t.Errorf("%s: no %q in %s", tt.name, tt.want, got)
		}
	}
	seen := llm.Requests()
	if len(seen) != len(tests) || seen[4].Turn != -1 || seen[0].Auth != "sk-test" {
		t.Errorf("requests noted: %+v", seen)
	}
}
