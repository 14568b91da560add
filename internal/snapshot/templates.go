package snapshot

import (
	"context"
	"slices"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/fleet"
	"github.com/agentlab-vm/agentlab/internal/sandbox"
)

// Warm makes the template of sandboxes with the image and resources that a request would
// get, on its backend, unless there is one. It builds the image if it is missing, and calls
// progress with lines about both.
func (s *Service) Warm(ctx context.Context, r agentlab.SandboxRequest, progress func(line string)) (fleet.Template, error) {
	none := fleet.Template{}
	sb, prof, err := s.core.PlanImage(r)
	if err == nil {
		err = s.core.CheckPlan(ctx, r, sb, prof)
	}
	if err != nil {
		return none, err
	}
	t, err := s.core.On(sb).NeedTemplates()
	if err != nil {
		return none, err
	}
	if !sandbox.ImageResolved(sb) {
		ictx, cancel := context.WithTimeout(ctx, s.core.Limits().ImageTimeout)
		defer cancel()
		if sb.Image, err = s.core.On(sb).Images.Ensure(ictx, sb.Image, progress); err != nil {
			return none, err
		}
	}
	sp := sandbox.SpecOf(sb)
	sp.Name = "template"
	progress("waiting for a guest with the image " + sb.Image + " to boot")
	made, err := t.WarmTemplate(ctx, sp)
	return fleet.Template{Template: made, Backend: sb.Backend}, err
}

// Templates returns the templates of all backends, the last used of each first. The error
// has code unsupported if no backend has templates. missing is as of fleet.Gather.
func (s *Service) Templates(ctx context.Context) (all []fleet.Template, missing []error, err error) {
	with := slices.DeleteFunc(s.fleet.All(), func(b *fleet.Backend) bool { return b.Templates == nil })
	if len(with) == 0 {
		_, err := s.fleet.Default().NeedTemplates()
		return nil, nil, err
	}
	return fleet.Gather(ctx, with, func(ctx context.Context, b *fleet.Backend) (out []fleet.Template, err error) {
		list, err := b.Templates.Templates(ctx)
		for _, t := range list {
			out = append(out, fleet.Template{Template: t, Backend: b.Name()})
		}
		return out, err
	})
}

// DeleteTemplate deletes the template whose key begins with prefix; with "" it
// deletes all. It returns the deleted ones. Codes: not_found, invalid if there is
// more than one.
func (s *Service) DeleteTemplate(ctx context.Context, prefix string) ([]fleet.Template, error) {
	chosen, missing, err := s.Templates(ctx)
	if err == nil && len(missing) > 0 { // others can have keys that begin so
		err = missing[0]
	}
	if err != nil {
		return nil, err
	}
	chosen = slices.DeleteFunc(chosen, func(t fleet.Template) bool { return !strings.HasPrefix(t.Key, prefix) })
	switch {
	case prefix != "" && len(chosen) == 0:
		return nil, agentlab.Errorf(agentlab.CodeNotFound, "there is no template %s", prefix).WithHint("list templates with 'agentlab template list'")
	case prefix != "" && len(chosen) > 1:
		return nil, agentlab.Errorf(agentlab.CodeInvalid, "%d templates have a key that begins with %s", len(chosen), prefix).WithHint("use more characters of the key")
	}
	for i, t := range chosen {
		if err := s.fleet.Of(t.Backend).Templates.DeleteTemplate(ctx, t.Key); err != nil {
			return chosen[:i], err
		}
	}
	return chosen, nil
}
