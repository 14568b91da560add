package snapshot

import (
	"context"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/sandbox"
)

// Warm makes the template of sandboxes with an image and the resources of a
// profile, unless there is one. It builds the image if it is missing, and calls
// progress with lines about both. An empty name is the default.
func (s *Service) Warm(ctx context.Context, image, profile string, progress func(line string)) (backend.Template, error) {
	t, err := s.fleet.Default().NeedTemplates()
	if err != nil {
		return backend.Template{}, err
	}
	r := agentlab.SandboxRequest{Image: image, Profile: profile}
	sb, prof, err := s.core.PlanOn(s.fleet.Default().Name(), r, nil)
	if err == nil {
		err = s.core.CheckPlan(ctx, r, sb, prof)
	}
	if err != nil {
		return backend.Template{}, err
	}
	if !sandbox.ImageResolved(sb) {
		ictx, cancel := context.WithTimeout(ctx, s.core.Limits().ImageTimeout)
		defer cancel()
		if sb.Image, err = s.core.On(sb).Images.Ensure(ictx, sb.Image, progress); err != nil {
			return backend.Template{}, err
		}
	}
	sp := sandbox.SpecOf(sb)
	sp.Name = "template"
	progress("waiting for a guest with the image " + sb.Image + " to boot")
	return t.WarmTemplate(ctx, sp)
}

// Templates returns the templates, the last used first.
func (s *Service) Templates(ctx context.Context) ([]backend.Template, error) {
	t, err := s.fleet.Default().NeedTemplates()
	if err != nil {
		return nil, err
	}
	return t.Templates(ctx)
}

// DeleteTemplate deletes the template whose key begins with prefix; with "" it
// deletes all. It returns the deleted ones. Codes: not_found, invalid if there is
// more than one.
func (s *Service) DeleteTemplate(ctx context.Context, prefix string) ([]backend.Template, error) {
	t, err := s.fleet.Default().NeedTemplates()
	if err != nil {
		return nil, err
	}
	all, err := t.Templates(ctx)
	if err != nil {
		return nil, err
	}
	var chosen []backend.Template
	for _, one := range all {
		if strings.HasPrefix(one.Key, prefix) {
			chosen = append(chosen, one)
		}
	}
	switch {
	case prefix != "" && len(chosen) == 0:
		return nil, agentlab.Errorf(agentlab.CodeNotFound, "there is no template %s", prefix).WithHint("list templates with 'agentlab template list'")
	case prefix != "" && len(chosen) > 1:
		return nil, agentlab.Errorf(agentlab.CodeInvalid, "%d templates have a key that begins with %s", len(chosen), prefix).WithHint("use more characters of the key")
	}
	for i, one := range chosen {
		if err := t.DeleteTemplate(ctx, one.Key); err != nil {
			return chosen[:i], err
		}
	}
	return chosen, nil
}
