package proxmox

import (
	"errors"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/config"
)

// parse reads a config.yaml, in which this backend is not the default.
func parse(text string) (config.Config, error) {
	return config.Parse([]byte(text), config.Backend{Name: "other"}, config.Backend{Name: Name, Section: newSettings})
}

func TestSettingsRefused(t *testing.T) {
	rest := "backend: proxmox\nproxmox:\n  transport: rest\n  url: https://pve:8006\n  token_id: agentlab@pve!main\n  token_file: /etc/agentlab/token\n"
	for text, field := range map[string]string{
		"proxmox:\n  transport: ssh\n":                                               "proxmox.transport",
		"proxmox:\n  addressing: slaac\n":                                            "proxmox.addressing",
		"proxmox:\n  model: ne2k\n":                                                  "proxmox.model",
		"proxmox:\n  token_id: root@pam!t\n":                                         "proxmox.token_id",
		"proxmox:\n  storage: local-zfs\n":                                           "proxmox.storage",
		"proxmox:\n  snippets_storage: ../x\n":                                       "proxmox.snippets_storage",
		"proxmox:\n  pool: a b\n":                                                    "proxmox.pool",
		"proxmox:\n  nameserver: 1.1.1.1\n":                                          "proxmox.nameserver",
		"proxmox:\n  ssh_public_key_file: keys\n":                                    "proxmox.ssh_public_key_file",
		"proxmox:\n  templates: {Base: 9000}\n":                                      "proxmox.templates",
		"proxmox:\n  templates: {base: 99}\n":                                        "proxmox.templates.base",
		"proxmox:\n  nodes: [{name: a}, {name: a}]\n":                                "proxmox.nodes[1].name",
		"proxmox:\n  nodes: [{name: a, templates: {base: 1}}]\n":                     "proxmox.nodes[0].templates.base",
		"backend: proxmox\nproxmox:\n  transport: rest\n":                            "proxmox.url",
		"proxmox:\n  transport: rest\n  url: http://pve:8006\n":                      "proxmox.url",
		strings.Replace(rest, "main", "", 1):                                         "proxmox.token_id",
		rest + "  fingerprint: aa\n":                                                 "proxmox.fingerprint",
		rest + "  ca_file: /c\n  fingerprint: " + strings.Repeat("AA:", 31) + "AA\n": "proxmox.ca_file",
		"backend: proxmox\nproxmox:\n  snippets_storage: \"\"\n":                     "proxmox.snippets_storage",
		rest + "  snippets_storage: cephfs\n":                                        "proxmox.snippets_storage", // would be ignored
	} {
		_, err := parse(text)
		e, ok := errors.AsType[*agentlab.Error](err)
		if !ok || e.Code != agentlab.CodeInvalid || e.Field != field {
			t.Errorf("%q: %v, want %s refused", text, err, field)
		}
	}
	c, err := parse(rest + "  nodes: [{name: pve1}, {name: pve2, templates: {base: 9100}}]\n  nameserver: 10.77.0.1\n")
	if err != nil {
		t.Fatal(err)
	}
	if got := c.Section(Name).(*Settings).TemplateVMIDs("pve2"); got["base"] != 9100 || got["agents"] != 9001 {
		t.Errorf("templates of pve2: %v", got)
	}
}

// The kernel routes what a bridge carries, so no proxy can be used.
func TestUpstreamProxyRefused(t *testing.T) {
	const text = "upstream_proxy: {url: \"https://proxy.corp:3128\"}\n"
	if _, err := parse(text); err != nil {
		t.Errorf("with another backend: %v", err)
	}
	_, err := parse(text + "backend: proxmox\n")
	e, ok := errors.AsType[*agentlab.Error](err)
	if !ok || e.Code != agentlab.CodeUnsupported || e.Field != "upstream_proxy.url" || !strings.HasPrefix(e.Message, "line 1: ") || e.Hint == "" {
		t.Errorf("%+v", e)
	}
}
