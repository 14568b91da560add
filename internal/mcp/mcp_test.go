package mcp

import (
	"context"
	"encoding/json"
	"io"
	"strings"
	"testing"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// connect serves tools to a client, and returns what its progress handler gets and a
// function that ends the client's process. The result of the server is checked at the end.
func connect(t *testing.T, tools ...Tool) (s *sdk.ClientSession, progress <-chan string, die func()) {
	fromClient, toServer := io.Pipe()
	fromServer, toClient := io.Pipe()
	served := make(chan error, 1)
	go func() {
		s := &Server{Name: "test", Version: "1", Instructions: "read this", Tools: tools}
		served <- s.Serve(context.Background(), fromClient, toClient)
		_ = toClient.Close() // the process of the server ends
	}()
	lines := make(chan string, 10)
	c := sdk.NewClient(&sdk.Implementation{Name: "client"}, &sdk.ClientOptions{
		ProgressNotificationHandler: func(_ context.Context, r *sdk.ProgressNotificationClientRequest) {
			lines <- r.Params.Message
		},
	})
	session, err := c.Connect(context.Background(), &sdk.IOTransport{Reader: fromServer, Writer: toServer}, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = session.Close()
		if err := <-served; err != nil {
			t.Errorf("server: %v", err)
		}
	})
	return session, lines, func() { _ = toServer.Close() }
}

func call(t *testing.T, s *sdk.ClientSession, tool, args string) *sdk.CallToolResult {
	t.Helper()
	p := &sdk.CallToolParams{Name: tool, Arguments: json.RawMessage(args)}
	p.SetProgressToken(tool)
	r, err := s.CallTool(context.Background(), p)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func TestServe(t *testing.T) {
	got := map[string]any{}
	s, progress, _ := connect(t, Tool{
		Name: "run", Description: "Runs it.", Destructive: true,
		Params: []Param{{Name: "name", Description: "its name", Required: true}, {Name: "count", Type: Integer}, {Name: "yes", Type: Boolean}, {Name: "list", Type: Strings}},
		Run: func(_ context.Context, args map[string]any, progress func(string)) Result {
			got = args
			progress("half")
			return Result{Text: []string{"a", "b"}, Data: json.RawMessage(`{"x":1}`)}
		},
	})
	if in := s.InitializeResult(); in.Instructions != "read this" || in.ServerInfo.Name != "test" {
		t.Errorf("%+v", in)
	}
	list, err := s.ListTools(context.Background(), nil)
	if err != nil || len(list.Tools) != 1 || list.Tools[0].Annotations.ReadOnlyHint || !*list.Tools[0].Annotations.DestructiveHint {
		t.Fatalf("%+v, %v", list, err)
	}
	r := call(t, s, "run", `{"name":"n","count":2,"yes":true,"list":["a","b"]}`)
	if r.IsError || len(r.Content) != 2 || r.StructuredContent.(map[string]any)["x"] != 1.0 {
		t.Errorf("%+v", r)
	}
	if got["name"] != "n" || got["count"] != 2.0 || got["yes"] != true || len(got["list"].([]any)) != 2 {
		t.Errorf("%v", got)
	}
	if line := <-progress; line != "half" {
		t.Error(line)
	}
	got = nil
	for _, bad := range []string{`{}`, `{"name":1}`, `{"name":"n","count":1.5}`, `{"name":"n","other":""}`, `{"name":"n","list":"a"}`} {
		if r := call(t, s, "run", bad); !r.IsError || got != nil || !strings.HasPrefix(r.Content[0].(*sdk.TextContent).Text, "invalid arguments of run: ") {
			t.Errorf("%s: %+v", bad, r)
		}
	}
}

// A call ends when its client cancels it, and when the client is gone.
func TestCanceledCalls(t *testing.T) {
	began, ended := make(chan struct{}), make(chan struct{}, 2)
	s, _, die := connect(t, Tool{Name: "wait", Run: func(ctx context.Context, _ map[string]any, _ func(string)) Result {
		began <- struct{}{}
		<-ctx.Done()
		ended <- struct{}{}
		return Result{}
	}})
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		<-began
		cancel()
	}()
	if _, err := s.CallTool(ctx, &sdk.CallToolParams{Name: "wait"}); err == nil {
		t.Error("no error")
	}
	<-ended
	done := make(chan struct{})
	go func() {
		defer close(done)
		_, _ = s.CallTool(context.Background(), &sdk.CallToolParams{Name: "wait"})
	}()
	<-began
	die()
	<-ended
	<-done
}
