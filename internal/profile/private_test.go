package profile

import (
	"errors"
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
		"the API":        {able, "network: {private: [{host: host.agentlab.internal, port: 8843, reason: no}]}", agentlab.CodeInvalid, "network.private", 0},
		"another port":   {able, "network: {private: [{host: host.agentlab.internal, port: 11434, reason: Ollama}]}", "", "", 2},
		"loopback":       {able, "network: {private: [{host: 127.0.0.1, port: 11434, reason: Ollama}]}", agentlab.CodeInvalid, "network.private", 0},
		"unknown key":    {able, "network: {private: [{host: gateway.corp, ports: 443, reason: models}]}", agentlab.CodeInvalid, "network.private[0].ports", 0},
		"unable":         {rulesInfo, "network: {private: [{host: gateway.corp, port: 443, reason: models}]}", agentlab.CodeUnsupported, "network.private", 2},
	} {
		e := NewLibrary(t.TempDir(), c.info).Open(ours).Close(8843).Check("name: p\n" + c.yaml + "\n")
		told, _ := errors.AsType[*agentlab.Error](e.Err)
		if c.code == "" && e.Err != nil || c.code != "" && (told == nil || told.Code != c.code || told.Field != c.field) {
			t.Errorf("%s: %+v", name, e.Err)
		}
		if got := len(e.Profile.Network.Private); got != c.open {
			t.Errorf("%s: %d destinations are open: %+v", name, got, e.Profile.Network.Private)
		}
	}
}
