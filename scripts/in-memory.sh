#!/usr/bin/env bash
# Runs a command whose temporary files are in memory, if this machine has enough:
# tests create and delete many small files, which ext4 makes slow (it avoids the
# numbers of files that were deleted a moment ago). A TMPDIR of the user wins.
#
#   in-memory.sh COMMAND [ARGUMENT...]
set -euo pipefail

# Always the same: Go tests the same again if TMPDIR changes. Short: tests have
# sockets in it.
dir=/dev/shm/al$UID
least=$((4 << 20)) # KiB

# more reports whether a number is known and larger than another.
more() { [[ $1 =~ ^[0-9]+$ ]] && (($1 > $2)); }

usable() {
    [[ -z ${TMPDIR:-} && $(stat -fc %T /dev/shm) == tmpfs ]] || return
    more "$(df -k --output=avail /dev/shm | tail -1 | tr -d ' ')" "$least" || return
    more "$(awk '$1 == "MemAvailable:" { print $2 }' /proc/meminfo)" $((2 * least)) || return
    local limit=max # of a container
    [[ ! -r /sys/fs/cgroup/memory.max ]] || limit=$(</sys/fs/cgroup/memory.max)
    [[ $limit == max ]] || more "$limit" $((2 * least * 1024)) || return
    [[ -e $dir ]] || mkdir -m 700 "$dir" || true # another run can be faster
    [[ -d $dir && ! -L $dir && -O $dir ]] || return
    # What killed tests have left.
    find "$dir" -mindepth 1 -maxdepth 1 -mmin +1440 -exec rm -rf {} +
    # Programs of tests run in it.
    local probe
    probe=$(mktemp "$dir/probe.XXXXXX") && printf '#!/bin/sh\n' >"$probe" && chmod 700 "$probe" || return
    "$probe"
    local runs=$?
    rm -f "$probe"
    return $runs
}

if usable 2>/dev/null; then
    export TMPDIR=$dir
fi
exec "$@"
