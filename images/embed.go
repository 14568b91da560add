// Package images embeds the recipes of the shipped images, the files that go
// into images, and the scripts that build them. Package internal/image puts
// them together.
package images

import "embed"

// Recipes holds NAME.yaml for each shipped image.
//
//go:embed *.yaml
var Recipes embed.FS

// Files holds, below "files", the files that are copied to the root of an
// image that a hypervisor starts with its kernel.
//
//go:embed all:files
var Files embed.FS

// Scripts holds, below "build", the shell scripts that run while an image is
// built; each begins with a comment about its purpose and arguments.
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

// Cloud holds, below "cloud", the files that are copied to the root of a cloud
// image instead of most of Files.
//
//go:embed all:cloud
var Cloud embed.FS
