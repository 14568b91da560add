#!/bin/sh
# Downloads what a recipe gets from npm and from the Python package index, with
# the programs of the tree. It runs no code that it downloads: npm runs no
# scripts, and wheels have none. Runs as root in mount and process namespaces of
# its own, with the host's network; npm and pip run as an unprivileged user.
#
#   fetch.sh WORK TREE
#
# Installs WORK/npm.specs below WORK/npm, and downloads WORK/pip.specs to
# WORK/wheels.
set -eu
work=$1 tree=$2
prepare() {
    mkdir "$work/$1"
    chown 65534:65534 "$work/$1"
}
prepare home
[ ! -s "$work/npm.specs" ] || prepare npm
[ ! -s "$work/pip.specs" ] || prepare wheels
# shellcheck source=images/build/enter.sh
. "$work/enter.sh"
share npm.specs pip.specs npm wheels home
online
chmod 0755 run/build
enter

# shellcheck disable=SC2086,SC2154 # they are words
unprivileged() {
    setpriv --reuid=65534 --regid=65534 --clear-groups --no-new-privs --inh-caps=-all --bounding-set=-all \
        $clean $proxies "PATH=/run/build/npm/bin:$PATH" HOME=/run/build/home TMPDIR=/run/build/home "$@" </dev/null
}
# shellcheck disable=SC2086 # one word per package is meant
npm_install() {
    echo "I: installing $* from npm"
    unprivileged npm install --global --prefix /run/build/npm --ignore-scripts --no-audit --no-fund --no-update-notifier --no-progress --loglevel=error "$@"
}

if [ -s /run/build/npm.specs ]; then
    # The distribution's npm is too old for Node.js and npm of recipes, by what
    # these demand; it installs them all the same, and they install the rest.
    own='^\(node-linux-[a-z0-9]*\|npm\)@'
    specs=$(sed -n "/$own/p" /run/build/npm.specs)
    # shellcheck disable=SC2086
    [ -z "$specs" ] || npm_install --force $specs
    specs=$(sed "/$own/d" /run/build/npm.specs)
    # shellcheck disable=SC2086
    [ -z "$specs" ] || npm_install $specs
fi
if [ -s /run/build/pip.specs ]; then
    echo "I: downloading $(tr '\n' ' ' </run/build/pip.specs)from the Python package index"
    # shellcheck disable=SC2046 # one word per package is meant
    unprivileged python3 -m pip download --quiet --only-binary :all: --no-cache-dir --disable-pip-version-check --progress-bar off \
        --dest /run/build/wheels $(cat /run/build/pip.specs)
fi
