#!/bin/sh
# Makes the root file system of a cloud image that of a template, without
# starting it. Runs as root in mount and process namespaces of its own.
#
#   cloud.sh ROOT WORK
#
# ROOT is a file with the file system (ext4). finish.sh documents WORK.
set -eu
root=$1 work=$2
tree=$work/tree
mkdir -p "$tree"
mount -t ext4 -o loop "$root" "$tree"

# Each step has mounts and processes of its own, which end with it.
step() { unshare --mount --propagation private --pid --fork --kill-child=SIGKILL --ipc --uts "$@"; }
withheld=$(cat "$work/withheld")
step setpriv --bounding-set="$withheld" sh "$work/apt.sh" "$work" "$tree" install
if [ -s "$work/npm.specs" ] || [ -s "$work/pip.specs" ]; then
    step sh "$work/fetch.sh" "$work" "$tree"
fi
if [ -s "$work/npm.specs" ]; then
    step setpriv --bounding-set="$withheld" sh "$work/apt.sh" "$work" "$tree" purge
fi
if [ -s "$work/go.list" ]; then
    step sh "$work/go.sh" "$work" "$tree" fetch
    step --net sh "$work/go.sh" "$work" "$tree" build
fi
step --net sh "$work/finish.sh" "$work" "$tree"

fstrim "$tree" || true
umount "$tree"
