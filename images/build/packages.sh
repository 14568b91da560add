#!/bin/sh
# Checks that the packages of an image exist, and fetches its kernel. Runs as an
# extract hook of mmdebstrap, early, so that a wrong name fails soon, with the
# host's tools and mmdebstrap's apt configuration.
#
#   packages.sh WORK KERNEL TREE PACKAGE...
#
# Unpacks the packages of KERNEL (a real package or a metapackage) into
# WORK/kernel and moves the modules into TREE. The kernel is not installed as a
# package: the image cannot boot it, and it depends on an initrd tool, udev and
# their hooks.
set -eu
work=$1 kernel=$2 tree=$3
shift 3
export APT_CONFIG="$MMDEBSTRAP_APT_CONFIG"

apt-get -q --simulate --no-install-recommends install "$@" >"$work/packages.plan"

mkdir -p "$work/debs" "$work/kernel"
apt-get -q --simulate --no-install-recommends install "$kernel" >"$work/kernel.plan"
packages=$(sed -n 's/^Inst \(linux-\(image\|modules\)[^ ]*\) (\([^ ]*\) .*/\1=\3/p' "$work/kernel.plan")
[ -n "$packages" ] || { echo "E: $kernel depends on no linux-image package" >&2; exit 1; }
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
