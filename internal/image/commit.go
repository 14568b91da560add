package image

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"syscall"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/durable"
)

// Commit makes an image with the disk of a sandbox that has the image base, and sets
// name to it. It has the kernel of base. disk writes the root disk, a raw image, to a
// path where no file exists. The host does not use its content: a guest wrote it.
func (s *Store) Commit(ctx context.Context, name string, base Image, disk func(ctx context.Context, path string) error, progress func(string)) (Image, error) {
	if err := agentlab.ValidateName(name); err != nil {
		return Image{}, err
	}
	if slices.Contains(ShippedNames(), name) {
		return Image{}, agentlab.Errorf(agentlab.CodeInvalid, "%s is the name of a shipped recipe", name).WithField("name").WithHint("choose another name for your image")
	}
	unlock, err := s.lockName(ctx, name, progress)
	if err != nil {
		return Image{}, err
	}
	defer unlock()
	work, remove, err := s.workDir(ctx, name)
	if err != nil {
		return Image{}, err
	}
	defer remove()
	stamp, err := s.commit(ctx, work, base, disk)
	if err != nil {
		return Image{}, classify("copying the disk", err, "")
	}
	stamp.Name = name
	if err := stamp.write(filepath.Join(work, fileStamp)); err != nil {
		return Image{}, classify("writing the image", err, "")
	}
	img, err := s.publish(stamp, work)
	return img, classify("publishing the image", err, "")
}

// commit fills the directory work with the files of the new image but the stamp.
func (s *Store) commit(ctx context.Context, work string, base Image, disk func(ctx context.Context, path string) error) (*Stamp, error) {
	root := filepath.Join(work, fileRoot)
	if err := disk(ctx, root); err != nil {
		return nil, err
	}
	st, err := os.Stat(root)
	if err == nil {
		err = os.Chmod(root, 0o444)
	}
	if err != nil {
		return nil, err
	}
	for _, name := range []string{fileKernel, fileModules} {
		from, to := filepath.Join(base.Dir, name), filepath.Join(work, name)
		err := os.Link(from, to)
		if errors.Is(err, syscall.EXDEV) { // the directory of base can be a link
			err = durable.Copy(from, to, 0o444, durable.None) // images are not secret
		}
		if err != nil {
			return nil, err
		}
	}
	stamp := base.Stamp
	// No recipe describes it, and it is never the same as another one.
	stamp.From, stamp.RecipeKey, stamp.SizeBytes, stamp.CreatedAt = base.Ref(), "", st.Size(), s.opts.Now().UTC()
	stamp.Digest = digestOf(stamp.From, agentlab.NewUID())
	return &stamp, nil
}
