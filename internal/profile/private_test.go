package profile

import (
	"errors"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

func TestPrivateDestinations(t *testing.T) {
	able := rulesInfo
	able.Capabilities.Private = true
	ours := []agentlab.PrivateTarget{{Host: "10.9.9.9", Port: 8080, Reason: "mirror", Source: SourceConfig}}
	for name, c := range map[string]struct {
		info  backend.Info
		yaml  string
		code  agentlab.Code
		field string
		open  int
	}{
		"opened":         {able, "network: {private: [{host: gateway.corp, port: 443, reason: models}]}", "", "", 2},
		"the same twice": {able, "network: {private: [{host: 10.9.9.9, port: 8080, reason: mine}]}", "", "", 1},
		"none":           {able, "network: {mode: nat}", "", "", 1},
		"off":            {able, "network: {mode: 'off'}", "", "", 0},
		"off with one":   {able, "network: {mode: 'off', private: [{host: gateway.corp, port: 443, reason: models}]}", agentlab.CodeInvalid, "network.private", 0},
		"the API":        {able, "network: {private: [{host: host.agentlab.internal, port: 8843, reason: no}]}", agentlab.CodeInvalid, "network.private[0].port", 0},
		"another port":   {able, "network: {private: [{host: host.agentlab.internal, port: 11434, reason: Ollama}]}", "", "", 2},
		"loopback":       {able, "network: {private: [{host: 127.0.0.1, port: 11434, reason: Ollama}]}", agentlab.CodeInvalid, "network.private[0].host", 0},
		"unknown key":    {able, "network: {private: [{host: gateway.corp, ports: 443, reason: models}]}", agentlab.CodeInvalid, "network.private[0].ports", 0},
		"unable":         {rulesInfo, "network: {private: [{host: gateway.corp, port: 443, reason: models}]}", agentlab.CodeUnsupported, "network.private", 2},
	} {
		e := NewLibrary(t.TempDir(), c.info).AllowPrivate(ours).ReservePorts(8843).Check("name: p\n" + c.yaml + "\n")
		told, _ := errors.AsType[*agentlab.Error](e.Err)
		if c.code == "" && e.Err != nil || c.code != "" && (told == nil || told.Code != c.code || told.Field != c.field) {
			t.Errorf("%s: %+v", name, e.Err)
		}
		if got := len(e.Profile.Network.Private); got != c.open {
			t.Errorf("%s: %d destinations are open: %+v", name, got, e.Profile.Network.Private)
		}
	}
}

// An error about a private destination names the entry and its line.
func TestPrivateErrorsNameTheEntry(t *testing.T) {
	info := rulesInfo
	info.Capabilities.Private = true
	const hint = "write {host: gateway.corp"
	for name, c := range map[string]struct{ entry, text, hint string }{
		"port missing": {"- host: other.corp\n      reason: x", `network.private[1].port: line 7: "other.corp" is not a private destination: port is missing`, hint},
		"host missing": {"- reason: x\n      port: 443", `network.private[1].host: line 7: ":443" is not a private destination: host is missing`, hint},
		"large port":   {"- host: other.corp\n      reason: x\n      port: 70000", `network.private[1].port: line 9: "other.corp:70000" is not a private destination: the port is not between 1 and 65535`, hint},
		"port range":   {"- host: other.corp\n      port: 8000-9000\n      reason: x", `network.private[1].port: line 8: a whole number is expected`, "give one port; for several ports, write one entry for each"},
		"loopback":     {"- host: 127.0.0.1\n      port: 80\n      reason: x", `network.private[1].host: line 7: "127.0.0.1:80" is not a private destination`, hint},
		"twice":        {"- {host: GATEWAY.corp, port: 443, reason: x}", `network.private[1]: line 7: gateway.corp:443 is listed twice`, "remove one"},
		"the API":      {"- host: host.agentlab.internal\n      port: 8843\n      reason: x", `network.private[1].port: line 8: port 8843 of the host`, "remove host.agentlab.internal:8843"},
	} {
		text := "name: p\nnetwork:\n  private:\n    - host: gateway.corp\n      port: 443\n      reason: models\n    " + c.entry + "\n"
		err := NewLibrary(t.TempDir(), info).ReservePorts(8843).Check(text).Err
		if err == nil || !strings.HasPrefix(err.Error(), c.text) || !strings.HasPrefix(agentlab.HintOf(err), c.hint) {
			t.Errorf("%s: got %v (%s)", name, err, agentlab.HintOf(err))
		}
	}
}
