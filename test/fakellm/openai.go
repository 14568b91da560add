package fakellm

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
)

// responsesTool is a tool, or a namespace of tools.
type responsesTool struct {
	Type  string          `json:"type"`
	Name  string          `json:"name"`
	Tools []responsesTool `json:"tools"`
}

type responsesRequest struct {
	Model string `json:"model"`
	Input []struct {
		Type  string          `json:"type"`
		Tools []responsesTool `json:"tools"` // of type additional_tools
	} `json:"input"`
	Tools []responsesTool `json:"tools"`
}

// turn counts the tool results in the conversation.
func (r responsesRequest) turn() int {
	n := 0
	for _, i := range r.Input {
		if strings.HasSuffix(i.Type, "_call_output") {
			n++
		}
	}
	return n
}

// offer is a tool with the namespace that it was offered in.
type offer struct {
	responsesTool
	namespace string
}

// offers flattens all tools of the request. Codex gives them beside the
// input or, for its newer models, inside it and in namespaces.
func (r responsesRequest) offers() []offer {
	var out []offer
	var walk func(namespace string, tools []responsesTool)
	walk = func(namespace string, tools []responsesTool) {
		for _, t := range tools {
			if t.Type == "namespace" {
				walk(t.Name, t.Tools)
				continue
			}
			out = append(out, offer{t, namespace})
		}
	}
	walk("", r.Tools)
	for _, i := range r.Input {
		walk("", i.Tools)
	}
	return out
}

// shellCall makes the item that runs command with tool, if that is one of
// the shell tools that Codex has offered in its versions; which one it is
// depends on version and model.
func shellCall(tool offer, turn int, command string) (map[string]any, bool) {
	var args any
	switch tool.Name {
	case "exec_command":
		args = map[string]any{"cmd": command}
	case "shell_command":
		args = map[string]any{"command": command}
	case "shell", "container.exec":
		args = map[string]any{"command": []string{"bash", "-c", command}}
	case "exec":
		// A JavaScript program that calls the shell tool.
		args = map[string]any{"cmd": command}
	default:
		return nil, false
	}
	text, err := json.Marshal(args)
	if err != nil {
		panic(err)
	}
	item := map[string]any{"type": "function_call", "id": fmt.Sprintf("fc_%02d", turn), "call_id": fmt.Sprintf("call_%02d", turn), "name": tool.Name}
	if tool.namespace != "" {
		item["namespace"] = tool.namespace
	}
	if tool.Type == "custom" {
		item["type"] = "custom_tool_call"
		item["input"] = "text(await tools.exec_command(" + string(text) + "))"
	} else {
		item["arguments"] = string(text)
	}
	return item, true
}

func (s *Server) responses(w http.ResponseWriter, r *http.Request) {
	var req responsesRequest
	if !decode(w, r, &req) {
		return
	}
	seen := Request{Path: r.URL.Path, Auth: credential(r), Model: req.Model, Turn: -1}
	item := say("ok")
	for _, t := range req.offers() {
		seen.Tools = append(seen.Tools, t.Name)
		if seen.Turn >= 0 {
			continue
		}
		turn := req.turn()
		step := s.step(turn)
		call, ok := shellCall(t, turn, step.Run)
		if !ok {
			continue
		}
		seen.Turn, item = turn, call
		if step.Say != "" {
			item = say(step.Say)
		}
	}
	s.note(seen)
	id := fmt.Sprintf("resp_%02d", seen.Turn+1)
	out := newSSE(w)
	out.event(map[string]any{"type": "response.created", "response": map[string]any{"id": id}})
	out.event(map[string]any{"type": "response.output_item.done", "output_index": 0, "item": item})
	out.event(map[string]any{"type": "response.completed", "response": map[string]any{
		"id":    id,
		"usage": map[string]any{"input_tokens": 10, "input_tokens_details": nil, "output_tokens": 10, "output_tokens_details": nil, "total_tokens": 20},
	}})
}

func say(text string) map[string]any {
	return map[string]any{
		"type": "message", "role": "assistant", "id": "msg_00",
		"content": []any{map[string]any{"type": "output_text", "text": text}},
	}
}
