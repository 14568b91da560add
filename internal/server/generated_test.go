package server

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/danielgtaylor/huma/v2"
)

var update = flag.Bool("update", false, "write docs/openapi.yaml and docs/api.md anew")

// TestGenerated compares the documents in docs with what the route table
// makes of them now.
func TestGenerated(t *testing.T) {
	s, err := New(Config{Services: newStub().services(), Version: "v1"})
	if err != nil {
		t.Fatal(err)
	}
	yaml, err := s.OpenAPI()
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string][]byte{"openapi.yaml": yaml, "api.md": markdown(s)} {
		path := filepath.Join("..", "..", "docs", name)
		if *update {
			if err := os.WriteFile(path, want, 0o644); err != nil {
				t.Fatal(err)
			}
			continue
		}
		got, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, want) {
			t.Errorf("docs/%s is not what the API is now; run: go generate ./internal/server", name)
		}
	}
	if doc := s.api.OpenAPI(); doc.OpenAPI[:3] != "3.1" {
		t.Errorf("OpenAPI %s", doc.OpenAPI)
	}
	for path := range s.api.OpenAPI().Paths {
		if strings.Contains(path, "...") {
			t.Errorf("%s is not a path template of OpenAPI", path)
		}
	}
	for _, r := range s.routes() {
		if op := operation(s, r); op == nil || op.Extensions["x-access"] != r.access.String() {
			t.Errorf("%s %s is not in the document", r.method, r.path)
		}
	}
}

func operation(s *Server, r route) *huma.Operation {
	item := s.api.OpenAPI().Paths[documented(r.path)]
	if item == nil {
		return nil
	}
	return map[string]*huma.Operation{"GET": item.Get, "PUT": item.Put, "POST": item.Post, "DELETE": item.Delete}[r.method]
}

// markdown is docs/api.md.
func markdown(s *Server) []byte {
	var b bytes.Buffer
	b.WriteString(`<!-- Generated from the route table in internal/server; do not edit. -->
# The control API

HTTP and JSON on the daemon's unix socket. All calls and fields are documented in [openapi.yaml](openapi.yaml); the Go client is package ` + "`client`" + `.

Callers are identified by their user ID. **read** and **write** are open to root, the daemon's own user and, in system mode, members of group ` + "`agentlab`" + `; **admin** is open to root and the daemon's own user. Unknown fields and parameters are rejected. A failed call returns ` + "`application/problem+json`" + ` (see Problem below). Lists return ` + "`items`" + `. Those that can be long accept ` + "`?limit=&cursor=`" + ` and return ` + "`next`" + `, the cursor of the next page, unless the page is the last one. A cursor is opaque and belongs to one list: repeat the call with it and the same other parameters. It stays valid when items are added or deleted, and a page costs the same wherever it begins.

` + "```sh" + `
curl --unix-socket "$(agentlab --json daemon status | jq -r .socket)" http://localhost/v1/status
` + "```" + `

## Calls
| Call | Access | Verb | Request | Response | |
|---|---|---|---|---|---|
`)
	for _, r := range s.routes() {
		op := operation(s, r)
		fmt.Fprintf(&b, "| `%s %s` | %s | %s | %s | %s | %s |\n", r.method, documented(r.path), r.access, r.verb, takes(op), answers(op), r.summary)
	}
	b.WriteString("\n## Codes\nThe `code` of a Problem is stable; programs can depend on it.\n\n| Code | HTTP status |\n|---|---|\n")
	var codes []string
	for code, status := range statusOf {
		codes = append(codes, fmt.Sprintf("| `%s` | %d |\n", code, status))
	}
	slices.Sort(codes)
	b.WriteString(strings.Join(codes, ""))
	b.WriteString("\n## Types\n")
	schemas := s.api.OpenAPI().Components.Schemas.Map()
	var names []string
	for name, schema := range schemas {
		if schema.Type == huma.TypeObject && len(schema.Properties) > 0 {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	for _, name := range names {
		fmt.Fprintf(&b, "\n### %s\n| Field | Type | |\n|---|---|---|\n", name)
		schema := schemas[name]
		for _, field := range propertyNames(schema) {
			p := schema.Properties[field]
			required := ""
			if slices.Contains(schema.Required, field) {
				required = "required"
			}
			fmt.Fprintf(&b, "| `%s` | %s | %s |\n", field, typeName(p), notes(required, p))
		}
	}
	return b.Bytes()
}

func propertyNames(s *huma.Schema) []string {
	var names []string
	for name := range s.Properties {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

func takes(op *huma.Operation) string {
	var out []string
	for _, p := range op.Parameters {
		if p.In != "path" {
			out = append(out, "`"+map[string]string{"query": "?", "header": ""}[p.In]+p.Name+"`")
		}
	}
	if op.RequestBody != nil {
		for kind, m := range op.RequestBody.Content {
			out = append(out, contentName(kind, m))
		}
	}
	return strings.Join(out, " ")
}

func answers(op *huma.Operation) string {
	var out []string
	for status, r := range op.Responses {
		if status == "default" {
			continue
		}
		if len(r.Content) == 0 {
			out = append(out, status)
		}
		for kind, m := range r.Content {
			out = append(out, status+" "+contentName(kind, m))
		}
		for name, h := range r.Headers {
			out = append(out, fmt.Sprintf("`%s: %v`", name, h.Schema.Enum[0]))
		}
	}
	slices.Sort(out)
	return strings.Join(out, ", ")
}

func contentName(kind string, m *huma.MediaType) string {
	switch {
	case kind == "application/json":
		return typeName(m.Schema)
	case m.Schema != nil && m.Schema.Items != nil:
		var events []string
		for _, one := range m.Schema.Items.OneOf {
			events = append(events, fmt.Sprintf("%v %s", one.Properties["event"].Enum[0], typeName(one.Properties["data"])))
		}
		return kind + " (" + strings.Join(events, ", ") + ")"
	}
	return kind
}

func typeName(s *huma.Schema) string {
	switch {
	case s.Ref != "":
		name := s.Ref[strings.LastIndex(s.Ref, "/")+1:]
		return "[" + name + "](#" + strings.ToLower(name) + ")"
	case s.Type == huma.TypeArray:
		return "array of " + typeName(s.Items)
	case s.Type == huma.TypeObject:
		if v, ok := s.AdditionalProperties.(*huma.Schema); ok && v.Type != "" {
			return "map to " + typeName(v)
		}
	case s.Format == "date-time":
		return "time"
	}
	return s.Type
}

func notes(first string, s *huma.Schema) string {
	var out []string
	if first != "" {
		out = append(out, first)
	}
	if s.Description != "" {
		out = append(out, s.Description)
	}
	if len(s.Enum) > 0 {
		out = append(out, strings.Trim(fmt.Sprint(s.Enum), "[]"))
	}
	if s.Minimum != nil {
		out = append(out, fmt.Sprintf("≥ %v", *s.Minimum))
	}
	if s.Maximum != nil {
		out = append(out, fmt.Sprintf("≤ %v", *s.Maximum))
	}
	return strings.Join(out, "; ")
}
