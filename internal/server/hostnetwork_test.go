package server

import (
	"context"

	"github.com/agentlab-vm/agentlab/internal/hostnet"
)

type stubHostNetwork struct{ st *stub }

func (s stubHostNetwork) Rules(context.Context) (string, error) {
	return "table inet agentlab {}\n", s.st.called("host.rules")
}

func (s stubHostNetwork) Apply(context.Context) (hostnet.Status, error) {
	return hostnet.Status{Serving: true}, s.st.called("host.apply")
}

func (s stubHostNetwork) Remove(context.Context) (hostnet.Status, error) {
	return hostnet.Status{}, s.st.called("host.remove")
}

func (s stubHostNetwork) Status(context.Context) (hostnet.Status, error) {
	return hostnet.Status{}, s.st.called("host.status")
}
