#!/bin/sh
# Turns the tree that mmdebstrap made into an AgentLab image. Runs as root (of
# a user namespace where the host user is not root), in mount and process
# namespaces of its own, so nothing that it mounts outlives it.
#
#   finish.sh WORK TREE [COMMAND...]
#
# Copies WORK/files and, when it is there, WORK/npm into TREE, runs setup.sh in
# it (with WORK/npm.packages, the names of the agents), and notes what each COMMAND answers to --version in WORK/versions.
set -eu
work=$1 tree=$2
shift 2

# What only the build needed; nothing of the host's configuration stays.
rm -f "$tree/etc/apt/apt.conf.d/99mmdebstrap" "$tree/etc/dpkg/dpkg.cfg.d/99mmdebstrap"
rm -rf "${tree:?}/etc/apt/sources.list" "${tree:?}/etc/apt/sources.list.d" "${tree:?}/dev" "${tree:?}/tmp" "${tree:?}/boot"
mkdir -m 0755 "$tree/dev" "$tree/boot" "$tree/etc/apt/sources.list.d"
mkdir -m 1777 "$tree/tmp"

# A file that is a symlink in the tree (resolv.conf) is replaced, not followed.
cp -R --preserve=mode --no-preserve=ownership --remove-destination "$work/files/." "$tree/"
if [ -d "$work/npm" ]; then
    cp -R --preserve=mode,links --no-preserve=ownership "$work/npm/." "$tree/usr/local/"
fi

mount --rbind /dev "$tree/dev"
mount -t proc proc "$tree/proc"
mount -t tmpfs -o mode=1777 tmpfs "$tree/tmp"
mount -t tmpfs -o mode=0755 tmpfs "$tree/run"

clean="env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 HOME=/tmp TMPDIR=/tmp"

cp "$work/setup.sh" "$tree/tmp/setup.sh"
[ ! -f "$work/npm.packages" ] || cp "$work/npm.packages" "$tree/tmp/npm.packages"
# shellcheck disable=SC2086 # $clean is a command and its arguments
unshare --net chroot "$tree" $clean /bin/sh /tmp/setup.sh

mkdir -p "$work/versions"
for command in "$@"; do
    echo "I: checking $command --version"
    # As agent, without a network: an agent that needs one to tell its version
    # would update itself.
    # shellcheck disable=SC2086
    if ! unshare --net chroot --userspec=agent:agent "$tree" $clean timeout 120 "$command" --version >"$work/versions/$command" 2>"$work/versions/$command.err"; then
        sed 's/^/E: /' "$work/versions/$command.err" >&2
        echo "E: $command --version fails in the image" >&2
        exit 1
    fi
done
