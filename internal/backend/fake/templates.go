package fake

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"path/filepath"
	"slices"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/durable"
)

// templateBytes is the size of each template.
const templateBytes = 100 << 20

// templateKey identifies the sandboxes that share a template.
func templateKey(s backend.Spec) string {
	sum := sha256.Sum256(fmt.Appendf(nil, "%s %d %d %t %s", s.Image, s.Resources.Cores, s.Resources.MemoryMB, s.Resources.Nested.Wanted(), s.Options))
	return hex.EncodeToString(sum[:16])
}

// fileTemplates is the file of the templates in a host's directory.
const fileTemplates = "templates"

// warm makes the template of spec unless there is one, and records its use.
func (h *Host) warm(s backend.Spec) (backend.Template, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	now, key := h.cfg.Clock().UTC(), templateKey(s)
	t, ok := h.templates[key]
	if !ok {
		t = backend.Template{Key: key, Image: s.Image, Bytes: templateBytes, Made: now}
		t.Resources = agentlab.Resources{Cores: s.Resources.Cores, MemoryMB: s.Resources.MemoryMB}
	}
	t.Used = now
	h.templates[key] = t
	return t, h.saveTemplates()
}

// saveTemplates writes the templates to the host's directory. The caller holds
// h.mu.
func (h *Host) saveTemplates() error {
	if h.cfg.Dir == "" {
		return nil
	}
	return durable.ReplaceJSON(filepath.Join(h.cfg.Dir, fileTemplates), h.templates, durable.None)
}

// WarmTemplate makes a template.
func (d *Driver) WarmTemplate(ctx context.Context, spec backend.Spec) (backend.Template, error) {
	if err := d.pointOf(ctx, OpWarmTemplate, Before, spec); err != nil {
		return backend.Template{}, err
	}
	if err := d.Validate(spec); err != nil {
		return backend.Template{}, err
	}
	t, err := d.h.warm(spec)
	if err != nil {
		return backend.Template{}, err
	}
	return t, d.pointOf(ctx, OpWarmTemplate, After, spec)
}

// Templates returns the templates.
func (d *Driver) Templates(ctx context.Context) ([]backend.Template, error) {
	if err := d.point(ctx, OpTemplates, Before, backend.Ref{}); err != nil {
		return nil, err
	}
	d.h.mu.Lock()
	defer d.h.mu.Unlock()
	var list []backend.Template
	for _, t := range d.h.templates {
		list = append(list, t)
	}
	slices.SortFunc(list, func(a, b backend.Template) int {
		return cmp.Or(b.Used.Compare(a.Used), cmp.Compare(a.Key, b.Key))
	})
	return list, nil
}

// DeleteTemplate deletes a template.
func (d *Driver) DeleteTemplate(ctx context.Context, key string) error {
	if err := d.point(ctx, OpDeleteTemplate, Before, backend.Ref{}); err != nil {
		return err
	}
	d.h.mu.Lock()
	delete(d.h.templates, key)
	err := d.h.saveTemplates()
	d.h.mu.Unlock()
	if err != nil {
		return err
	}
	return d.point(ctx, OpDeleteTemplate, After, backend.Ref{})
}

// Room returns an error only for more memory than 1 PiB.
func (d *Driver) Room(ctx context.Context, r agentlab.Resources) error {
	if err := d.point(ctx, OpRoom, Before, backend.Ref{}); err != nil {
		return err
	}
	if r.MemoryMB > 1<<30 {
		return agentlab.Errorf(agentlab.CodeNoSpace, "the fake host has 1 PiB of memory")
	}
	return nil
}

// Memory returns the same memory for every VM.
func (d *Driver) Memory(ctx context.Context, ref backend.Ref) (backend.Memory, error) {
	if err := d.point(ctx, OpMemory, Before, ref); err != nil {
		return backend.Memory{}, err
	}
	in, err := d.h.find(ref)
	if err != nil {
		return backend.Memory{}, err
	}
	if p := in.view().Power; p != backend.PowerRunning && p != backend.PowerSuspended {
		return backend.Memory{}, agentlab.Errorf(agentlab.CodeConflict, "the VM is %s", p)
	}
	return backend.Memory{Unique: 40 << 20, Shared: 60 << 20, Proportional: 50 << 20}, nil
}
