package profile

import (
	"errors"
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

	// honoured reports whether a backend honours the key, mostly by its
	// capabilities.
	honoured func(backend.Info, *Doc) bool
}

// rules reports whether a backend enforces rules in every mode, as backends
// with allow lists do.
func rules(i backend.Info, _ *Doc) bool { return i.Capabilities.Allowlist }

var requirements = []requirement{
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
	{key: "artifacts.endpoint", set: func(d *Doc) bool { return d.Artifacts.Endpoint != nil },
		why: "artifacts can only be stored by AgentLab", hint: "remove it",
		honoured: func(i backend.Info, d *Doc) bool {
			return strings.TrimSuffix(*d.Artifacts.Endpoint, "/") == strings.TrimSuffix(i.UploadURL, "/")
		}},
}

// Usable reports whether one of the backends that infos describe honours every key of
// d; if not, the error has code unsupported and names the first that the first backend does
// not honour.
func (d *Doc) Usable(infos ...backend.Info) (err error) {
	for i, info := range infos {
		switch e := d.usable(info); {
		case e == nil:
			return nil
		case i == 0:
			err = e
		}
	}
	return err
}

func (d *Doc) usable(info backend.Info) error {
	unusable := func(key, why, hint string) error {
		return agentlab.Errorf(agentlab.CodeUnsupported, "profile %s cannot be used on backend %s: %s", d.Name, info.Name, why).
			WithField(key).WithHint("%s", hint)
	}
	for _, r := range requirements {
		if r.set(d) && !r.honoured(info, d) {
			return unusable(r.key, r.why, r.hint)
		}
	}
	err := d.optionsUsable(info)
	if e, ok := errors.AsType[*agentlab.Error](err); ok {
		return unusable(e.Field, e.Message, e.Hint)
	}
	return err
}
