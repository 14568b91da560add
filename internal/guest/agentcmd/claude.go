package agentcmd

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/agentlab-vm/agentlab"
)

// renderClaude makes a readable log of Claude Code's stream-json, which is
// its only output with any content before the end. Unknown lines are passed on
// unchanged.
func renderClaude(w io.Writer) io.WriteCloser {
	return &lines{max: maxEvent, each: func(line []byte, whole bool) error {
		out := string(line) + "\n"
		switch text, ok := claudeEvent(line); {
		case !whole:
			out = fmt.Sprintf("[an event of more than %d bytes is left out]\n", maxEvent)
		case ok:
			out = text
		}
		_, err := io.WriteString(w, out)
		return err
	}}
}

const (
	maxEvent       = 8 << 20 // bytes of one line of JSON
	maxResultLines = 20
	maxInput       = 2000 // bytes of a tool's input that are shown
	maxError       = 100  // bytes of the kind of an error that are shown
)

type claudeLine struct {
	Type    string `json:"type"`
	Subtype string `json:"subtype"`
	Model   string `json:"model"`
	Message struct {
		Content json.RawMessage `json:"content"`
	} `json:"message"`
	Result     string  `json:"result"`
	IsError    bool    `json:"is_error"`
	Turns      int     `json:"num_turns"`
	DurationMS int64   `json:"duration_ms"`
	Cost       float64 `json:"total_cost_usd"`
	APIStatus  int     `json:"api_error_status"`

	// Of the subtype api_retry.
	Status  int    `json:"error_status"`
	Error   string `json:"error"`
	Attempt int    `json:"attempt"`
	Retries int    `json:"max_retries"`
}

type claudeBlock struct {
	Type    string          `json:"type"`
	Text    string          `json:"text"`
	Name    string          `json:"name"`
	Input   json.RawMessage `json:"input"`
	Content json.RawMessage `json:"content"`
	IsError bool            `json:"is_error"`
}

// claudeEvent renders one event. It reports false for lines that are not events.
func claudeEvent(line []byte) (string, bool) {
	var e claudeLine
	if len(line) == 0 || line[0] != '{' || json.Unmarshal(line, &e) != nil {
		return "", false
	}
	var b strings.Builder
	switch e.Type {
	case "system":
		switch {
		case e.Subtype == "init":
			fmt.Fprintf(&b, "[claude: model %s]\n", e.Model)
		case e.Subtype == "api_retry" && e.Status != 0:
			fmt.Fprintf(&b, "[claude: the model answers %d (%s); retry %d of %d]\n", e.Status, agentlab.Cut(e.Error, maxError), e.Attempt, e.Retries)
		case e.Subtype == "api_retry":
			fmt.Fprintf(&b, "[claude: the model does not answer (%s); retry %d of %d]\n", agentlab.Cut(e.Error, maxError), e.Attempt, e.Retries)
		}
	case "assistant", "user":
		var blocks []claudeBlock
		if json.Unmarshal(e.Message.Content, &blocks) != nil {
			blocks = []claudeBlock{{Type: "text", Text: plainText(e.Message.Content)}}
		}
		for _, block := range blocks {
			renderBlock(&b, block)
		}
	case "result":
		if e.APIStatus != 0 {
			fmt.Fprintf(&b, "[claude: the model answers %d to the last request]\n", e.APIStatus)
		}
		if e.IsError || e.Subtype != "success" {
			fmt.Fprintf(&b, "[claude: %s] %s\n", e.Subtype, e.Result)
		}
		fmt.Fprintf(&b, "[claude: ended after %d turns, %s, $%.4f]\n", e.Turns, (time.Duration(e.DurationMS) * time.Millisecond).Round(100*time.Millisecond), e.Cost)
	case "stream_event", "rate_limit_event", "control_request", "control_response", "keep_alive":
	default:
		return "", false
	}
	return b.String(), true
}

func renderBlock(b *strings.Builder, block claudeBlock) {
	switch block.Type {
	case "text":
		if t := strings.TrimSpace(block.Text); t != "" {
			fmt.Fprintf(b, "%s\n", t)
		}
	case "tool_use":
		fmt.Fprintf(b, "> %s %s\n", block.Name, toolInput(block.Input))
	case "tool_result":
		text := strings.TrimRight(plainText(block.Content), "\n")
		if block.IsError {
			text = "error: " + text
		}
		shown, rest := firstLines(text, maxResultLines)
		if shown != "" {
			fmt.Fprintf(b, "  %s\n", strings.ReplaceAll(shown, "\n", "\n  "))
		}
		if rest > 0 {
			fmt.Fprintf(b, "  … %d more lines\n", rest)
		}
	}
}

// toolInput returns the most informative field of a tool's input.
func toolInput(raw json.RawMessage) string {
	var m map[string]any
	if json.Unmarshal(raw, &m) != nil {
		return string(raw)
	}
	out := string(raw)
	for _, key := range []string{"command", "file_path", "path", "pattern", "url", "query", "description", "prompt"} {
		if s, ok := m[key].(string); ok {
			out = s
			break
		}
	}
	return strings.ReplaceAll(strings.TrimSpace(agentlab.Cut(out, maxInput)), "\n", "\n  ")
}

// plainText returns the text of a content that is a string or a list of
// blocks.
func plainText(raw json.RawMessage) string {
	var s string
	if json.Unmarshal(raw, &s) == nil {
		return s
	}
	var blocks []claudeBlock
	_ = json.Unmarshal(raw, &blocks) // any other value has no text
	var parts []string
	for _, b := range blocks {
		if b.Type == "text" {
			parts = append(parts, b.Text)
		} else {
			parts = append(parts, "["+b.Type+"]")
		}
	}
	return strings.Join(parts, "\n")
}

func firstLines(s string, n int) (shown string, rest int) {
	all := strings.Split(s, "\n")
	if len(all) <= n {
		return s, 0
	}
	return strings.Join(all[:n], "\n"), len(all) - n
}

// lines calls each with each complete line that is written to it, without the
// line end. For a line longer than max it passes only the beginning, as not
// whole. Close passes an unfinished last line.
type lines struct {
	max  int
	each func(line []byte, whole bool) error
	buf  []byte
	over bool
}

func (l *lines) Write(p []byte) (int, error) {
	n := len(p)
	for len(p) > 0 {
		i := 0
		for i < len(p) && p[i] != '\n' {
			i++
		}
		take := min(i, l.max-len(l.buf))
		l.buf = append(l.buf, p[:take]...)
		l.over = l.over || take < i
		if i == len(p) {
			break
		}
		p = p[i+1:]
		if err := l.flush(); err != nil {
			return 0, err
		}
	}
	return n, nil
}

func (l *lines) flush() error {
	err := l.each(l.buf, !l.over)
	l.buf, l.over = l.buf[:0], false
	return err
}

func (l *lines) Close() error {
	if len(l.buf) == 0 && !l.over {
		return nil
	}
	return l.flush()
}
