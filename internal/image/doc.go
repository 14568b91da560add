// Package image builds, keeps and finds the images that sandboxes boot.
//
// An image is a directory with a raw root disk, the kernel to start it with,
// the modules that kernel needs first, and a stamp of what it was made from.
// It is made from a Recipe by mmdebstrap and mke2fs, without root where the
// machine allows user namespaces, and is never changed afterwards.
//
// A Store is a directory of images:
//
//	<root>/<name>/current             the digest that the bare name means
//	<root>/<name>/<digest>/root.img     ext4, sparse, no partition table, read-only
//	<root>/<name>/<digest>/vmlinux      ELF (amd64) or Image (arm64) kernel
//	<root>/<name>/<digest>/modules.cpio newc; lib/agentlab/modules/NN-name.ko, in load order
//	<root>/<name>/<digest>/image.json   the Stamp
//	<root>/.build/<name>.lock         held while the name is built or removed
//	<root>/.build/<name>.log          what the running or last build said
//	<root>/.build/<name>.*/           a build's own directory
//
// An image appears by one rename, so that a killed build leaves nothing but
// its directory below .build, which the next one removes. The digest covers
// the recipe, the builder and everything that was installed.
package image
