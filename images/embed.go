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
