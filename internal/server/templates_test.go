package server

import (
	"context"
	"errors"
	"slices"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/fleet"
)

type stubTemplates struct{ *stub }

func (s stubTemplates) Warm(_ context.Context, r agentlab.SandboxRequest, progress func(string)) (fleet.Template, error) {
	progress("making it")
	return fleet.Template{Template: backend.Template{Key: "new", Image: r.Image + "@0", Resources: agentlab.Resources{Cores: 2, MemoryMB: 512}}, Backend: "lab"}, s.called("template.warm " + r.Image + " " + r.Profile + r.Backend)
}

func (s stubTemplates) Templates(context.Context) ([]fleet.Template, []error, error) {
	return []fleet.Template{{Template: backend.Template{Key: "one", Bytes: 5, Stale: true}}}, []error{errors.New("backend far did not answer")}, s.called("template.list")
}

func (s stubTemplates) DeleteTemplate(_ context.Context, prefix string) ([]fleet.Template, error) {
	return []fleet.Template{{Template: backend.Template{Key: "one"}}}, s.called("template.delete " + prefix)
}

// A template is made with progress, and listed and removed with all its fields.
func TestTemplates(t *testing.T) {
	h := start(t, nil)
	var lines []string
	made, err := h.client.WarmImage(t.Context(), "base", api.TemplateWarm{Profile: "large"}, func(l string) { lines = append(lines, l) })
	if err != nil || made.Key != "new" || made.Backend != "lab" || made.Image != "base@0" || made.Cores != 2 || made.MemoryMB != 512 || !slices.Equal(lines, []string{"making it"}) {
		t.Errorf("%+v, %v, progress %q", made, err, lines)
	}
	list, err := h.client.Templates(t.Context())
	if err != nil || len(list.Items) != 1 || list.Items[0].Key != "one" || list.Items[0].DiskUsage != 5 || !list.Items[0].Stale || !slices.Equal(list.Missing, []string{"backend far did not answer"}) {
		t.Errorf("%+v, %v", list, err)
	}
	if _, err := h.client.RemoveTemplate(t.Context(), "on"); err != nil {
		t.Error(err)
	}
	if _, err := h.client.RemoveTemplates(t.Context()); err != nil {
		t.Error(err)
	}
	if want := []string{"template.warm base large", "template.list", "template.delete on", "template.delete "}; !slices.Equal(h.calls, want) {
		t.Errorf("calls %q, want %q", h.calls, want)
	}
	h.err = agentlab.Errorf(agentlab.CodeUnsupported, "no templates").WithHint("use another backend")
	if _, err := h.client.WarmImage(t.Context(), "base", api.TemplateWarm{}, nil); agentlab.CodeOf(err) != agentlab.CodeUnsupported || agentlab.HintOf(err) == "" {
		t.Errorf("%v (%s)", err, agentlab.HintOf(err))
	}
}
