#!/bin/sh
# Downloads what a recipe wants from npm, with the tree's own npm, which apt.sh
# installed. No code of what it downloads runs. Runs as root in mount and
# process namespaces of its own, with the host's network.
#
#   fetch.sh WORK TREE
#
# Installs WORK/npm.specs below WORK/npm, from which setup.sh copies.
set -eu
work=$1 tree=$2
for dir in npm home; do
    mkdir -p "$work/$dir"
    chown 65534:65534 "$work/$dir"
done
# shellcheck source=images/build/enter.sh
. "$work/enter.sh"
share npm.specs npm home
online
chmod 0755 run/build
enter

# shellcheck disable=SC2046,SC2086,SC2154 # they are words
unprivileged() {
    setpriv --reuid=65534 --regid=65534 --clear-groups --no-new-privs --inh-caps=-all --bounding-set=-all \
        $clean $proxies "PATH=$PATH" HOME=/run/build/home TMPDIR=/run/build/home "$@" </dev/null
}

if [ -s /run/build/npm.specs ]; then
    echo "I: installing $(tr '\n' ' ' </run/build/npm.specs)from npm"
    # shellcheck disable=SC2046 # one word per package is meant
    unprivileged npm install --global --prefix /run/build/npm --ignore-scripts --no-audit --no-fund --no-update-notifier --no-progress --loglevel=error \
        $(cat /run/build/npm.specs)
fi
