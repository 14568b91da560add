package profile

import (
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

// requirement is a key that not every backend supports.
type requirement struct {
	key  string
	set  func(*Doc) bool
	why  string
	hint string

	// honoured reports whether a backend honours the key; nil means that no
	// backend does yet. A driver that starts to honour a key gets a
	// capability, named here.
	honoured func(backend.Info, *Doc) bool
}

// rules reports whether a backend enforces rules in every mode, as backends
// with allow lists do.
func rules(i backend.Info, _ *Doc) bool { return i.Capabilities.Allowlist }

var requirements = []requirement{
	{key: "template_vmid", set: func(d *Doc) bool { return d.TemplateVMID != nil },
		why: "the backend boots images, not template VMs", hint: "name an image instead: image: base",
		honoured: func(i backend.Info, _ *Doc) bool { return i.Capabilities.Templates }},
	{key: "network.mode", set: func(d *Doc) bool { return d.Network.Mode == agentlab.NetworkAllowlist },
		why: "the backend cannot enforce an allow list", hint: "use mode: nat", honoured: rules},
	{key: "network.mode", set: func(d *Doc) bool { return d.Network.Mode == agentlab.NetworkOff },
		why: "the backend cannot switch a sandbox's network off", hint: "use mode: nat",
		honoured: func(i backend.Info, _ *Doc) bool { return i.Capabilities.NetworkOff }},
	{key: "network.deny", set: func(d *Doc) bool { return len(d.Network.Deny) > 0 },
		why: "the backend cannot enforce a deny list", hint: "remove it", honoured: rules},
	{key: "network.ports", set: func(d *Doc) bool { return len(d.Network.Ports) > 0 },
		why: "the backend cannot enforce a list of ports", hint: "remove it", honoured: rules},
	{key: "network.limits", set: func(d *Doc) bool { return d.Network.Limits != limits{} },
		why: "the backend cannot limit a sandbox's network", hint: "remove it", honoured: rules},
	{key: "network.private", set: func(d *Doc) bool { return len(d.net.Private) > 0 },
		why: "the backend cannot open single private destinations", hint: "remove it",
		honoured: func(i backend.Info, _ *Doc) bool { return i.Capabilities.Private }},
	{key: "network.bridge", set: func(d *Doc) bool { return d.Network.Bridge != nil },
		why: "its network policy is not enforced on that bridge", hint: "remove it: the backend chooses",
		honoured: oneOfCapability(func(c backend.Capabilities) []string { return c.Bridges }, func(d *Doc) *string { return d.Network.Bridge })},
	{key: "network.model", set: func(d *Doc) bool { return d.Network.Model != nil },
		why: "the backend does not have that network device", hint: "remove it: the backend chooses",
		honoured: oneOfCapability(func(c backend.Capabilities) []string { return c.NICModels }, func(d *Doc) *string { return d.Network.Model })},
	{key: "network.firewall_group", set: func(d *Doc) bool { return d.Network.FirewallGroup != nil },
		why: "the backend has no firewall groups; it enforces the network policy itself", hint: "remove it",
		honoured: func(i backend.Info, _ *Doc) bool { return i.Capabilities.FirewallGroup }},
	{key: "resources.balloon", set: func(d *Doc) bool { return d.Resources.Balloon },
		why: "the backend has no memory balloon", hint: "remove it, or set it to false",
		honoured: func(i backend.Info, _ *Doc) bool { return i.Capabilities.Balloon }},
	{key: "resources.cpulist", set: func(d *Doc) bool { return d.Resources.CPUList != nil },
		why: "the backend cannot pin CPUs", hint: "remove it",
		honoured: func(i backend.Info, _ *Doc) bool { return i.Capabilities.CPUList }},
	{key: "storage.workspace", set: func(d *Doc) bool { return d.Storage.Workspace == "attach" },
		why: "there are no workspaces yet", hint: "use a profile with workspace: none, such as yolo-ephemeral"},
	{key: "artifacts.endpoint", set: func(d *Doc) bool { return d.Artifacts.Endpoint != nil },
		why: "artifacts go to AgentLab itself and nowhere else", hint: "remove it",
		honoured: func(i backend.Info, d *Doc) bool {
			return strings.TrimSuffix(*d.Artifacts.Endpoint, "/") == strings.TrimSuffix(i.UploadURL, "/")
		}},
}

// Usable reports whether the backend that info describes honours every key of
// d; if not, the error has code unsupported and names the first that it does
// not.
func (d *Doc) Usable(info backend.Info) error {
	for _, r := range requirements {
		if r.set(d) && (r.honoured == nil || !r.honoured(info, d)) {
			return agentlab.Errorf(agentlab.CodeUnsupported, "profile %s cannot be used on backend %s: %s", d.Name, info.Name, r.why).
				WithField(r.key).WithHint("%s", r.hint)
		}
	}
	return nil
}
