// Package fakellm serves the two model APIs that coding agents speak, from a
// script instead of a model: the Anthropic Messages API (Claude Code) and the
// OpenAI Responses API (Codex). A real agent runs the script's commands with
// its own tools, so that a test can watch the whole path of a job without a
// model, a key or a network.
//
// The server keeps no state between requests: which step comes next follows
// from how many tool results the conversation holds already. Requests that
// offer no tools (titles, summaries, quota checks) get a short text.
package fakellm

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
)

// Step is one turn of the model.
type Step struct {
	Run string // a shell command for the agent's shell tool
	Say string // the final text; ends the conversation
}

// Request is what a test may want to know of a request that was served.
type Request struct {
	Path  string
	Auth  string   // credential as it was sent, without its scheme
	Model string   // model that was asked for
	Tools []string // names of the tools that were offered
	Turn  int      // index of the step that was answered; -1 for a side request
}

// Server is the http.Handler of both APIs.
type Server struct {
	script []Step

	mu   sync.Mutex
	seen []Request
}

// maxRequestBytes bounds a request; agents send their whole conversation.
const maxRequestBytes = 16 << 20

// New returns a server that plays script. A conversation that continues after
// the last step gets that step again, which must be a Say.
func New(script ...Step) *Server {
	if len(script) == 0 || script[len(script)-1].Say == "" {
		panic("fakellm: a script must end with Say")
	}
	return &Server{script: script}
}

// Requests returns what was asked so far.
func (s *Server) Requests() []Request {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.seen)
}

func (s *Server) note(r Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.seen = append(s.seen, r)
}

func (s *Server) step(turn int) Step { return s.script[min(turn, len(s.script)-1)] }

// ServeHTTP implements http.Handler.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	path := strings.TrimSuffix(r.URL.Path, "/")
	switch {
	case r.Method == http.MethodPost && path == "/v1/messages":
		s.messages(w, r)
	case r.Method == http.MethodPost && path == "/v1/messages/count_tokens":
		writeJSON(w, map[string]int{"input_tokens": 10})
	case r.Method == http.MethodPost && path == "/v1/responses":
		s.responses(w, r)
	case r.Method == http.MethodGet && path == "/v1/models":
		writeJSON(w, map[string]any{"object": "list", "data": []any{}})
	case r.Method == http.MethodHead:
		w.WriteHeader(http.StatusOK)
	default:
		http.NotFound(w, r)
	}
}

func decode(w http.ResponseWriter, r *http.Request, v any) bool {
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxRequestBytes))
	if err == nil {
		err = json.Unmarshal(body, v)
	}
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return false
	}
	return true
}

func writeJSON(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(v)
}

// credential strips the scheme of whichever header the agent used.
func credential(r *http.Request) string {
	if key := r.Header.Get("X-Api-Key"); key != "" {
		return key
	}
	return strings.TrimPrefix(r.Header.Get("Authorization"), "Bearer ")
}

// sse writes server-sent events; data objects carry their own "type".
type sse struct {
	w http.ResponseWriter
}

func newSSE(w http.ResponseWriter) sse {
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("Cache-Control", "no-cache")
	return sse{w}
}

func (s sse) event(data map[string]any) {
	text, err := json.Marshal(data)
	if err != nil {
		panic(err) // only maps of plain values are passed
	}
	fmt.Fprintf(s.w, "event: %s\ndata: %s\n\n", data["type"], text)
	if f, ok := s.w.(http.Flusher); ok {
		f.Flush()
	}
}
