package fake

import (
	"context"
	"slices"

	"github.com/agentlab-vm/agentlab"
)

// Images are the images of a fake backend: names without files. The zero value
// has "base" and "agents".
type Images struct{ Names []string }

// Check returns nil if there is an image of that name.
func (i Images) Check(name string) error {
	names := i.Names
	if names == nil {
		names = []string{"base", "agents"}
	}
	if !slices.Contains(names, name) {
		return agentlab.Errorf(agentlab.CodeNotFound, "there is no image %q", name).WithField("image").
			WithHint("the images of the fake backend are %v", names)
	}
	return nil
}

// Current is Ensure.
func (i Images) Current(ctx context.Context, name string) (string, error) {
	return i.Ensure(ctx, name, nil)
}

// Ensure returns the reference of an image.
func (i Images) Ensure(_ context.Context, name string, _ func(string)) (string, error) {
	if err := i.Check(name); err != nil {
		return "", err
	}
	return name + "@fake", nil
}
