package daemon

import (
	"context"
	"io"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/internal/artifact"
	"github.com/agentlab-vm/agentlab/internal/image"
	"github.com/agentlab-vm/agentlab/internal/profile"
	"github.com/agentlab-vm/agentlab/internal/store"
)

// eventView adapts the stored events and the bus to the control API.
type eventView struct {
	*store.Store
	bus *bus
}

func (v eventView) Subscribe() (<-chan agentlab.Event, func()) { return v.bus.subscribe() }

// profileView adapts the profile library to the control API.
type profileView struct{ lib *profile.Library }

func (v profileView) List(context.Context) ([]api.Profile, error) {
	entries, err := v.lib.List()
	if err != nil {
		return nil, err
	}
	out := make([]api.Profile, len(entries))
	for i, e := range entries {
		out[i] = toProfile(e)
		out[i].YAML = ""
	}
	return out, nil
}

func (v profileView) Get(_ context.Context, name string) (api.Profile, error) {
	e, err := v.lib.Find(name)
	return toProfile(e), err
}

func (v profileView) Put(_ context.Context, name, yaml string) (api.Profile, error) {
	e, err := v.lib.Put(name, yaml)
	return toProfile(e), err
}

// Validate returns an error for a text that does not parse and for settings
// that this backend does not support.
func (v profileView) Validate(_ context.Context, yaml string) (api.Profile, error) {
	e := v.lib.Check(yaml)
	return toProfile(e), e.Err
}

func toProfile(e profile.Entry) api.Profile {
	p := e.Profile
	out := api.Profile{
		Name: e.Name, Image: p.Image, Cores: p.Resources.Cores, MemoryMB: p.Resources.MemoryMB, RootSizeGB: p.Resources.RootSizeGB,
		Network: p.Network.Mode, Workspace: p.Workspace, Keepalive: p.Keepalive, TTLMinutes: int(p.TTL.Minutes()),
		Source: e.Source, YAML: e.YAML, Usable: e.Err == nil,
	}
	if e.Err != nil {
		out.Problem = e.Err.Error()
	}
	return out
}

// imageView adapts the image store to the control API.
type imageView struct {
	images *image.Store
	store  *store.Store
}

func (v imageView) List(ctx context.Context) ([]api.Image, error) {
	list, err := v.images.List(ctx)
	if err != nil {
		return nil, err
	}
	used, err := imagesInUse(ctx, v.store)
	if err != nil {
		return nil, err
	}
	out := make([]api.Image, len(list))
	for i, img := range list {
		out[i] = toImage(img, used)
	}
	return out, nil
}

func (v imageView) Get(ctx context.Context, name string) (api.Image, error) {
	img, err := v.images.Show(ctx, name)
	return v.shown(ctx, img, err)
}

func (v imageView) Build(ctx context.Context, b api.ImageBuild, progress func(string)) (api.Image, error) {
	img, err := v.images.Build(ctx, image.BuildRequest{Name: b.Name, Recipe: b.Recipe, Force: b.Force}, progress)
	return v.shown(ctx, img, err)
}

func (v imageView) Remove(ctx context.Context, name string) error { return v.images.Remove(ctx, name) }

func (v imageView) shown(ctx context.Context, img image.Image, err error) (api.Image, error) {
	if err != nil {
		return api.Image{}, err
	}
	used, err := imagesInUse(ctx, v.store)
	return toImage(img, used), err
}

// imagesInUse returns the references of all images that sandboxes use. A
// sandbox that still waits for its image has only the image's name.
func imagesInUse(ctx context.Context, st *store.Store) (map[string]bool, error) {
	list, err := st.Sandboxes(ctx, agentlab.SandboxFilter{})
	if err != nil {
		return nil, err
	}
	used := map[string]bool{}
	for _, sb := range list {
		used[sb.Image] = true
	}
	return used, nil
}

func toImage(i image.Image, used map[string]bool) api.Image {
	versions := map[string]string{"kernel": i.KernelRelease, "builder": i.Builder, "distribution": i.Distribution}
	for k, v := range i.Versions {
		versions[k] = v
	}
	return api.Image{
		Name: i.Name, Digest: i.Digest, Arch: i.Arch, Suite: i.Suite, Size: i.SizeBytes, DiskUsage: i.DiskUsage(),
		CreatedAt: i.CreatedAt.UTC(), Versions: versions, InUse: used[i.Ref()], Current: i.Current,
	}
}

// artifactView adapts the artifact service to the control API.
type artifactView struct{ *artifact.Service }

func (v artifactView) PutBundle(ctx context.Context, r io.Reader) (api.Bundle, error) {
	b, err := v.Service.PutBundle(ctx, r)
	return api.Bundle{ID: b.ID, Size: b.Size, SHA256: b.SHA256}, err
}
