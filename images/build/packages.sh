#!/bin/sh
# Makes sure that the packages of an image exist, and fetches its kernel. Runs
# as an extract hook of mmdebstrap, so early that a wrong name fails soon, with
# the host's tools and mmdebstrap's apt configuration.
#
#   packages.sh WORK KERNEL TREE PACKAGE...
#
# Unpacks the packages that KERNEL (a metapackage or a real one) stands for
# into WORK/kernel and moves the modules into TREE. The kernel is not installed
# as a package: inside the image nothing could boot another one, and an initrd
# tool, udev and their hooks would come with it.
set -eu
work=$1 kernel=$2 tree=$3
shift 3
export APT_CONFIG="$MMDEBSTRAP_APT_CONFIG"

apt-get -q --simulate --no-install-recommends install "$@" >"$work/packages.plan"

mkdir -p "$work/debs" "$work/kernel"
apt-get -q --simulate --no-install-recommends install "$kernel" >"$work/kernel.plan"
packages=$(sed -n 's/^Inst \(linux-\(image\|modules\)[^ ]*\) (\([^ ]*\) .*/\1=\3/p' "$work/kernel.plan")
[ -n "$packages" ] || { echo "E: $kernel brings no linux-image package" >&2; exit 1; }
printf '%s\n' "$packages" >"$work/kernel.packages"

cd "$work/debs"
# shellcheck disable=SC2086 # one word per package is meant
apt-get -q download $packages
for deb in *.deb; do
    dpkg-deb --extract "$deb" "$work/kernel"
done
cd "$work/kernel"
modules=lib/modules
[ -d "$modules" ] || modules=usr/lib/modules
mkdir -p "$tree/usr/lib/modules"
for dir in "$modules"/*; do
    cp -R "$dir" "$tree/usr/lib/modules/"
done
rm -rf "$modules" "$work/debs"
