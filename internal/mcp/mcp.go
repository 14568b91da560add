// Package mcp serves tools over the Model Context Protocol
// (https://modelcontextprotocol.io) on a pair of streams. It checks the arguments of
// each call against the parameters of the tool, and limits and cleans the results: their
// text may come from a guest.
package mcp

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"

	"github.com/google/jsonschema-go/jsonschema"
	sdk "github.com/modelcontextprotocol/go-sdk/mcp"
)

// maxRequest is the length of the longest request, in bytes; a longer one ends the
// session. The longest argument is the task of a job.
const maxRequest = 16 << 20

// The types of parameters.
const (
	Boolean = "boolean"
	Integer = "integer"
	String  = "string"
	Strings = "strings" // a list of strings
)

// Param is a parameter of a tool.
type Param struct {
	Name, Description string
	Type              string // String if it is ""
	Required          bool
}

// Tool is a function that clients can call.
type Tool struct {
	Name, Description string
	Params            []Param
	// ReadOnly and Destructive are hints for the client, which may ask its user before
	// it calls a tool.
	ReadOnly, Destructive bool
	// Run is a call. The values of args have the types bool, float64, string and []any.
	// progress reports one line.
	Run func(ctx context.Context, args map[string]any, progress func(line string)) Result
}

// Result is the result of a call.
type Result struct {
	Text   []string        // for the model
	Data   json.RawMessage // a JSON object for programs; nil if there is none
	Failed bool
}

// Server is a set of tools.
type Server struct {
	Name, Version string
	Instructions  string // for the model
	Tools         []Tool
}

// Serve answers the requests of one client until it closes in or ctx ends. Calls run at
// the same time; those that run at the end are canceled.
func (s *Server) Serve(ctx context.Context, in io.Reader, out io.Writer) error {
	server := sdk.NewServer(&sdk.Implementation{Name: s.Name, Version: s.Version}, &sdk.ServerOptions{
		Instructions: s.Instructions, Logger: slog.New(slog.DiscardHandler), Capabilities: &sdk.ServerCapabilities{},
	})
	calls, cancel := context.WithCancel(ctx)
	defer cancel()
	for _, t := range s.Tools {
		schema := t.schema()
		check, err := schema.Resolve(nil)
		if err != nil {
			return fmt.Errorf("parameters of %s: %w", t.Name, err)
		}
		server.AddTool(t.declare(schema), func(cctx context.Context, req *sdk.CallToolRequest) (*sdk.CallToolResult, error) {
			cctx, stop := context.WithCancel(cctx)
			defer stop()
			defer context.AfterFunc(calls, stop)()
			return t.call(cctx, check, req), nil
		})
	}
	return server.Run(ctx, &sdk.IOTransport{Reader: requests{in, cancel}, Writer: nopCloser{out}, MaxLineLength: maxRequest})
}

// requests reads what a client sends. At its end, the calls are canceled: the server
// would wait for them.
type requests struct {
	io.Reader
	ended func()
}

func (r requests) Read(p []byte) (int, error) {
	n, err := r.Reader.Read(p)
	if err != nil {
		r.ended()
	}
	return n, err
}

func (requests) Close() error { return nil }

type nopCloser struct{ io.Writer }

func (nopCloser) Close() error { return nil }

func (t Tool) declare(schema *jsonschema.Schema) *sdk.Tool {
	return &sdk.Tool{
		Name: t.Name, Description: t.Description, InputSchema: schema,
		Annotations: &sdk.ToolAnnotations{ReadOnlyHint: t.ReadOnly, DestructiveHint: &t.Destructive},
	}
}

func (t Tool) schema() *jsonschema.Schema {
	s := &jsonschema.Schema{Type: "object", Properties: map[string]*jsonschema.Schema{}, AdditionalProperties: &jsonschema.Schema{Not: &jsonschema.Schema{}}}
	for _, p := range t.Params {
		of := &jsonschema.Schema{Type: p.Type, Description: p.Description}
		switch p.Type {
		case "":
			of.Type = String
		case Strings:
			of.Type, of.Items = "array", &jsonschema.Schema{Type: String}
		}
		s.Properties[p.Name] = of
		s.PropertyOrder = append(s.PropertyOrder, p.Name)
		if p.Required {
			s.Required = append(s.Required, p.Name)
		}
	}
	return s
}

// call runs a call, if its arguments are valid.
func (t Tool) call(ctx context.Context, check *jsonschema.Resolved, req *sdk.CallToolRequest) *sdk.CallToolResult {
	args := map[string]any{}
	err := json.Unmarshal(orEmpty(req.Params.Arguments), &args)
	if err == nil {
		err = check.Validate(args)
	}
	if err != nil {
		return toResult(Result{Text: []string{fmt.Sprintf("invalid arguments of %s: %v", t.Name, err)}, Failed: true})
	}
	return toResult(t.Run(ctx, args, reporter(ctx, req)))
}

func orEmpty(args json.RawMessage) json.RawMessage {
	if len(args) == 0 || string(args) == "null" {
		return json.RawMessage("{}")
	}
	return args
}

// reporter returns the function that sends progress, if the client wants it.
func reporter(ctx context.Context, req *sdk.CallToolRequest) func(line string) {
	token := req.Params.GetProgressToken()
	if token == nil {
		return func(string) {}
	}
	count := 0
	return func(line string) {
		count++
		// Without a client the call is about to be canceled.
		_ = req.Session.NotifyProgress(ctx, &sdk.ProgressNotificationParams{ProgressToken: token, Progress: float64(count), Message: line})
	}
}

func toResult(r Result) *sdk.CallToolResult {
	out := &sdk.CallToolResult{Content: []sdk.Content{}, IsError: r.Failed}
	for _, text := range r.Text {
		out.Content = append(out.Content, &sdk.TextContent{Text: text})
	}
	if r.Data != nil {
		out.StructuredContent = r.Data
	}
	return out
}
