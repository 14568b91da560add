package server

import (
	"context"

	"github.com/agentlab-vm/agentlab/api"
)

type stubHostNetwork struct{ st *stub }

func (s stubHostNetwork) Rules(context.Context) (string, error) {
	return "table inet agentlab {}\n", s.st.called("host.rules")
}

func (s stubHostNetwork) Apply(context.Context) (api.HostNetwork, error) {
	return api.HostNetwork{Applied: true, Serving: true}, s.st.called("host.apply")
}

func (s stubHostNetwork) Remove(context.Context) (api.HostNetwork, error) {
	return api.HostNetwork{}, s.st.called("host.remove")
}

func (s stubHostNetwork) Status(context.Context) (api.HostNetwork, error) {
	return api.HostNetwork{Applied: true}, s.st.called("host.status")
}
