// Package images embeds the recipes of the shipped images, the files that go
// into every image, and the scripts that finish one. Package internal/image
// builds images from them; templates for other backends use the same files.
package images

import "embed"

// Recipes holds NAME.yaml for each shipped image.
//
//go:embed *.yaml
var Recipes embed.FS

// Files holds, below "files", what is copied over the root of an image.
//
//go:embed all:files
var Files embed.FS

// Scripts holds, below "build", the shell scripts that run while an image is
// built; each begins with what it does and its arguments.
//
//go:embed build/*.sh
var Scripts embed.FS

// Keys holds, below "keys", public keys of archives that not every host has:
//
//   - ubuntu.gpg: Ubuntu Archive Automatic Signing Key (2018),
//     F6EC B376 2474 EDA9 D21B  7022 8719 20D1 991B C93C
//
//go:embed keys/*.gpg
var Keys embed.FS

// Template holds, below "template", what makes a cloud image a template of
// sandboxes on backends with template VMs: files for the root of the disk, and
// the scripts that run inside it. scripts/create_template.sh uses them.
//
//go:embed all:template
var Template embed.FS
