#!/bin/sh
# Turns the tree that mmdebstrap made into an AgentLab image. Runs as root (of
# a user namespace where the host user is not root), in mount, process, network
# and IPC namespaces of its own, so nothing that it mounts outlives it.
#
#   finish.sh WORK TREE [COMMAND...]
#
# Copies WORK/files and, when it is there, WORK/npm into TREE, makes TREE the
# root of everything that runs from then on, runs setup.sh in it and the install
# scripts of WORK/npm.packages (the agents), and notes what each COMMAND answers
# to --version in WORK/versions.
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

mount --bind "$tree" "$tree"
cd "$tree"
mount -t proc -o nosuid,nodev,noexec proc proc
# Only the mount is read-only, for root's sake: a user namespace may then mount
# another proc, as confined does.
mount -o remount,bind,ro,nosuid,nodev,noexec proc
mount -t tmpfs -o mode=1777,nosuid,nodev tmpfs tmp
mount -t tmpfs -o mode=0755,nosuid,nodev tmpfs run
# No device of the host but these, which hold nothing.
mount -t tmpfs -o mode=0755,nosuid,noexec tmpfs dev
for device in null zero full random urandom tty; do
    : >"dev/$device"
    mount --bind "/dev/$device" "dev/$device"
done
ln -s /proc/self/fd dev/fd
ln -s /proc/self/fd/0 dev/stdin
ln -s /proc/self/fd/1 dev/stdout
ln -s /proc/self/fd/2 dev/stderr
mkdir -m 1777 dev/shm

# What comes from WORK and goes there; nobody but root may look.
mkdir -p "$work/versions"
mkdir -m 0700 run/build
mkdir run/build/versions
mount --bind "$work/versions" run/build/versions
cp "$work/setup.sh" run/build/
: >run/build/npm.packages
[ ! -f "$work/npm.packages" ] || cp "$work/npm.packages" run/build/

# A chroot can be left by whoever is root in it. From here on there is no other
# root: the host's is unmounted, by the image's own program.
pivot_root . .
/bin/umount -l .
cd /

# Of the privileges of root, setup gets those that files and users take: none
# to mount, to make devices, to load modules, to open files by handle, or to
# leave. Programs that npm brought are in /usr/local and are not in its path.
setup="setpriv --no-new-privs --inh-caps=-all --bounding-set=-all,+chown,+dac_override,+fowner,+fsetid,+kill,+setuid,+setgid,+setfcap"
clean="env -i LANG=C.UTF-8 TMPDIR=/tmp SYSTEMD_OFFLINE=1"
PATH=/usr/sbin:/usr/bin:/sbin:/bin

# shellcheck disable=SC2086 # they are commands and their arguments
$setup $clean "PATH=$PATH" HOME=/run/build /bin/sh /run/build/setup.sh

# confined runs a program that npm brought: as agent, without any privilege or
# a way to get one, without a terminal, and with all that it starts ended when
# it ends.
confined() {
    # shellcheck disable=SC2086
    unshare --pid --fork --kill-child --mount-proc setsid --wait \
        setpriv --reuid=agent --regid=agent --clear-groups --no-new-privs --inh-caps=-all --bounding-set=-all \
        $clean PATH="/usr/local/sbin:/usr/local/bin:$PATH" HOME=/tmp "$@" </dev/null
}

# Agents that choose a binary for the machine in an install script do it here,
# with what npm has fetched already. Only the agents' own scripts run: what
# they depend on is prebuilt, or optional and would need a compiler. They may
# write to npm's packages and to what is the agent's, which root runs nothing of.
if [ -s /run/build/npm.packages ]; then
    modules=/usr/local/lib/node_modules
    chown -hR agent:agent "$modules"
    # shellcheck disable=SC2046 # one word per package is meant
    confined npm rebuild --global --offline --foreground-scripts --no-bin-links --no-audit --no-fund --no-update-notifier $(cat /run/build/npm.packages)
    chown -hR root:root "$modules"
    rm -rf /home/agent/.cache /home/agent/.npm
fi

for command in "$@"; do
    echo "I: checking $command --version"
    # There is no network: an agent that needs one to tell its version would
    # update itself.
    versions=/run/build/versions
    if ! confined timeout 120 "$command" --version >"$versions/$command" 2>"$versions/$command.err"; then
        sed 's/^/E: /' "$versions/$command.err" >&2
        echo "E: $command --version fails in the image" >&2
        exit 1
    fi
done
