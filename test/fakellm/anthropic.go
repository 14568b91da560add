package fakellm

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
)

type messagesRequest struct {
	Model    string `json:"model"`
	Stream   bool   `json:"stream"`
	Messages []struct {
		Role    string          `json:"role"`
		Content json.RawMessage `json:"content"`
	} `json:"messages"`
	Tools []struct {
		Name string `json:"name"`
	} `json:"tools"`
}

// turn counts the tool results in the conversation.
func (r messagesRequest) turn() int {
	n := 0
	for _, m := range r.Messages {
		var blocks []struct {
			Type string `json:"type"`
		}
		if json.Unmarshal(m.Content, &blocks) != nil {
			continue // a plain string
		}
		for _, b := range blocks {
			if b.Type == "tool_result" {
				n++
			}
		}
	}
	return n
}

// claudeShell is Claude Code's shell tool.
const claudeShell = "Bash"

func (s *Server) messages(w http.ResponseWriter, r *http.Request) {
	var req messagesRequest
	if !decode(w, r, &req) {
		return
	}
	seen := Request{Path: r.URL.Path, Auth: credential(r), Model: req.Model, Turn: -1}
	for _, t := range req.Tools {
		seen.Tools = append(seen.Tools, t.Name)
	}
	block := map[string]any{"type": "text", "text": "ok"}
	stop := "end_turn"
	if slices.Contains(seen.Tools, claudeShell) {
		seen.Turn = req.turn()
		step := s.step(seen.Turn)
		if step.Run != "" {
			stop = "tool_use"
			block = map[string]any{
				"type": "tool_use", "id": fmt.Sprintf("toolu_%02d", seen.Turn), "name": claudeShell,
				"input": map[string]string{"command": step.Run, "description": "a step of the script"},
			}
		} else {
			block["text"] = step.Say
		}
	}
	s.note(seen)
	message := map[string]any{
		"id": fmt.Sprintf("msg_%02d", seen.Turn+1), "type": "message", "role": "assistant", "model": req.Model,
		"content": []any{}, "stop_reason": nil, "stop_sequence": nil,
		"usage": map[string]int{"input_tokens": 10, "output_tokens": 1},
	}
	if !req.Stream {
		message["content"], message["stop_reason"] = []any{block}, stop
		writeJSON(w, message)
		return
	}
	streamMessage(newSSE(w), message, block, stop)
}

// streamMessage sends one content block in the event order of the Messages
// API: message_start, content_block_start, _delta, _stop, message_delta,
// message_stop.
func streamMessage(out sse, message, block map[string]any, stop string) {
	out.event(map[string]any{"type": "message_start", "message": message})
	empty, delta := map[string]any{"type": "text", "text": ""}, map[string]any{"type": "text_delta", "text": block["text"]}
	if block["type"] == "tool_use" {
		input, err := json.Marshal(block["input"])
		if err != nil {
			panic(err)
		}
		empty = map[string]any{"type": "tool_use", "id": block["id"], "name": block["name"], "input": map[string]any{}}
		delta = map[string]any{"type": "input_json_delta", "partial_json": string(input)}
	}
	out.event(map[string]any{"type": "content_block_start", "index": 0, "content_block": empty})
	out.event(map[string]any{"type": "content_block_delta", "index": 0, "delta": delta})
	out.event(map[string]any{"type": "content_block_stop", "index": 0})
	out.event(map[string]any{
		"type": "message_delta", "delta": map[string]any{"stop_reason": stop, "stop_sequence": nil},
		"usage": map[string]int{"output_tokens": 10},
	})
	out.event(map[string]any{"type": "message_stop"})
}
