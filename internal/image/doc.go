// Package image builds, stores and finds the images that sandboxes boot.
//
// An image is a directory with a raw root disk, the kernel to start it with,
// the modules that the kernel needs first, and a stamp that describes its build.
// It is made from a Recipe by mmdebstrap and mke2fs, without root if the machine
// allows user namespaces, and never changes afterwards. Templates of other
// backends are made from the same recipes and scripts; see Recipe.Stage.
//
// A Store is a directory of images:
//
//	<root>/<name>/current digest of the image with the bare name
//	<root>/<name>/<digest>/root.img     ext4, sparse, no partition table, read-only
//	<root>/<name>/<digest>/vmlinux      ELF (amd64) or Image (arm64) kernel
//	<root>/<name>/<digest>/modules.cpio newc; lib/agentlab/modules/NN-name.ko, in load order
//	<root>/<name>/<digest>/image.json   the Stamp
//	<root>/.build/<name>.lock         held while the name is built or removed
//	<root>/.build/<name>.log          output of the running or last build
//	<root>/.build/<name>.*/           directory of a build
//	<root>/.downloads/<sha256>        downloaded files of recipes
//
// An image appears by one rename: a killed build leaves only its directory below
// .build, which the next build removes. The digest covers
// the recipe, the builder and everything that was installed.
package image
