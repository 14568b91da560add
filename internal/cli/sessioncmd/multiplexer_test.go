package sessioncmd

import (
	"bytes"
	"encoding/json"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/cli"
	"github.com/agentlab-vm/agentlab/internal/work/attach"
	"github.com/agentlab-vm/agentlab/internal/work/guestrun"
	"github.com/agentlab-vm/agentlab/internal/work/worktest"
)

// terminalDaemon is a daemon with one profile and one port. Its guests answer all
// commands with a document, and add the commands to the list.
func terminalDaemon(t *testing.T, profile api.Profile, answer string, port int) (c *client.Client, commands *[][]string) {
	t.Helper()
	commands = &[][]string{}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/profiles/interactive", func(w http.ResponseWriter, _ *http.Request) { _ = json.NewEncoder(w).Encode(profile) })
	mux.HandleFunc("GET /v1/ports", func(w http.ResponseWriter, _ *http.Request) {
		_ = json.NewEncoder(w).Encode(api.List[api.Port]{Items: []api.Port{{Port: port, URL: "http://app.sandbox.localhost:8082/"}}})
	})
	mux.HandleFunc("POST /v1/sandboxes/7/exec", worktest.CommandHandler(t, func(command []string, _ []byte) ([]byte, string, int) {
		*commands = append(*commands, command)
		return []byte(answer), "", 0
	}))
	return worktest.HandlerClient(t, mux), commands
}

func TestChooseMultiplexer(t *testing.T) {
	for _, tc := range []struct {
		flag, profile, answer string
		command               string
		code                  agentlab.Code
		say                   string
	}{
		{"", "", "", "", "", ""}, // no command
		{"zellij", "tmux", `{"name":"zellij"}`, "agentlab-agent terminal zellij", "", ""},
		{"", "zellij", `{"name":"tmux"}`, "agentlab-agent terminal --default zellij", "", ""},
		{"zellij", "", `{"name":"zellij","missing":true}`, "agentlab-agent terminal zellij", agentlab.CodeUnsupported, "--terminal tmux"},
		{"zellij", "", `{"name":"zellij","running":"tmux"}`, "agentlab-agent terminal zellij", agentlab.CodeConflict, "agentlab stop app"},
		{"zellij", "", `{"name":"\u001b]0;x\u0007","missing":true}`, "agentlab-agent terminal zellij", agentlab.CodeDenied, "invalid"},
		{"zellij", "", `{"name":"zellij","running":"rm -rf /"}`, "agentlab-agent terminal zellij", agentlab.CodeDenied, "invalid"},
		{"zellij", "", `x`, "agentlab-agent terminal zellij", agentlab.CodeDenied, "invalid"},
		{"zellij", "", strings.Repeat(" ", guestrun.MaxGuestDocument+1) + `{"name":"zellij"}`, "agentlab-agent terminal zellij", agentlab.CodeUnavailable, "too large"},
	} {
		c, commands := terminalDaemon(t, api.Profile{Terminal: tc.profile}, tc.answer, 0)
		s := api.Session{Name: "app", Profile: "interactive"}
		choice, err := attach.MultiplexerChoice(t.Context(), c, s, tc.flag)
		if err == nil {
			err = attach.ChooseMultiplexer(t.Context(), c, s, "7", choice)
		}
		text := ""
		if err != nil {
			text = err.Error() + agentlab.HintOf(err)
		}
		if agentlab.CodeOf(err) != tc.code || !strings.Contains(text, tc.say) || strings.ContainsRune(text, 0x1b) {
			t.Errorf("%+v: %v %q", tc, agentlab.CodeOf(err), text)
		}
		var got string
		for _, command := range *commands {
			got += strings.Join(command, " ")
		}
		if got != tc.command {
			t.Errorf("%+v: ran %q", tc, got)
		}
	}
	if err := attach.CheckMultiplexer("screen"); agentlab.CodeOf(err) == "" {
		t.Error("screen is accepted")
	}
}

func TestTerminalWeb(t *testing.T) {
	token := "5f0c1e0e-0000-4000-8000-000000000000"
	for _, tc := range []struct {
		answer, out string
		code        agentlab.Code
	}{
		{`{"port":8082,"session":"main.claude","token":"` + token + `"}`, "http://app.sandbox.localhost:8082/main.claude\ntoken: " + token + "\n", ""},
		{`{"port":0}`, "", agentlab.CodeUnsupported},
		{`{"port":8082,"session":"../x","token":"` + token + `"}`, "", agentlab.CodeDenied},
		{`{"port":8082,"session":"main","token":"\u001b[31m"}`, "", agentlab.CodeDenied},
	} {
		c, commands := terminalDaemon(t, api.Profile{}, tc.answer, 8082)
		var out, errOut bytes.Buffer
		open := guestapi.ExecRequest{Command: []string{"agentlab-agent", "open", "--session", "main", "--dir", "/work/repo", "--agent", "claude"}, TTY: true}
		err := openTerminalWeb(t.Context(), &cli.App{Stdout: &out, Stderr: &errOut}, c, api.Session{Name: "app"}, "7", open)
		if agentlab.CodeOf(err) != tc.code || out.String() != tc.out {
			t.Errorf("%s: %v, %q", tc.answer, err, out.String())
		}
		if got := (*commands)[0]; !slices.Equal(got[:3], []string{"agentlab-agent", "open", "--web"}) {
			t.Errorf("ran %q", got)
		}
	}
}
