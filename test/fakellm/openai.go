package fakellm

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
)

type responsesRequest struct {
	Model string `json:"model"`
	Input []struct {
		Type string `json:"type"`
	} `json:"input"`
	Tools []struct {
		Name string `json:"name"`
		Type string `json:"type"`
	} `json:"tools"`
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

// shellArguments gives the arguments of the shell tools that Codex has
// offered in its versions; which one it is depends on version and model.
func shellArguments(tool, command string) (string, bool) {
	var args any
	switch tool {
	case "exec_command":
		args = map[string]any{"cmd": command}
	case "shell_command":
		args = map[string]any{"command": command}
	case "shell", "container.exec":
		args = map[string]any{"command": []string{"bash", "-c", command}}
	default:
		return "", false
	}
	text, err := json.Marshal(args)
	if err != nil {
		panic(err)
	}
	return string(text), true
}

func (s *Server) responses(w http.ResponseWriter, r *http.Request) {
	var req responsesRequest
	if !decode(w, r, &req) {
		return
	}
	seen := Request{Path: r.URL.Path, Auth: credential(r), Model: req.Model, Turn: -1}
	item := map[string]any{
		"type": "message", "role": "assistant", "id": "msg_00",
		"content": []any{map[string]any{"type": "output_text", "text": "ok"}},
	}
	for _, t := range req.Tools {
		seen.Tools = append(seen.Tools, t.Name)
		if _, ok := shellArguments(t.Name, ""); !ok || seen.Turn >= 0 {
			continue
		}
		seen.Turn = req.turn()
		if step := s.step(seen.Turn); step.Run != "" {
			args, _ := shellArguments(t.Name, step.Run)
			item = map[string]any{"type": "function_call", "id": fmt.Sprintf("fc_%02d", seen.Turn), "call_id": fmt.Sprintf("call_%02d", seen.Turn), "name": t.Name, "arguments": args}
		} else {
			item["content"] = []any{map[string]any{"type": "output_text", "text": step.Say}}
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
