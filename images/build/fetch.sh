#!/bin/sh
# Downloads what a recipe gets from npm and from the Python package index, with
# the programs of the tree. Runs as root in mount and process namespaces of its
# own, with the host's network; npm and pip run as an unprivileged user. They
# run no code that they download: npm runs no scripts and no git, wheels have no
# scripts, and nothing that npm installs is in the path. The only exception is a
# recipe that lists both Node.js and npm: these two, in the exact versions of the
# recipe, download the other npm packages.
#
#   fetch.sh WORK TREE
#
# Installs WORK/npm.specs below WORK/npm, where Node.js and npm may be already, and
# downloads WORK/pip.specs to WORK/wheels.
set -eu
umask 022
work=$1 tree=$2
uid=65532
prepare() {
    mkdir -p "$work/$1"
    chown -hR "$uid:$uid" "$work/$1"
}
prepare home
[ ! -s "$work/npm.specs" ] || prepare npm
[ ! -s "$work/pip.specs" ] || prepare wheels
# shellcheck source=images/build/enter.sh
. "$work/enter.sh"
share npm.specs pip.specs wheels home
[ ! -s "$work/npm.specs" ] || share npm
online
chmod 0755 run/build
enter
renumber nobody

# unprivileged runs a program without privileges and without a terminal.
# shellcheck disable=SC2086,SC2154 # they are words
unprivileged() {
    new_keyring setsid --wait setpriv --reuid="$uid" --regid="$uid" --clear-groups --no-new-privs --inh-caps=-all --bounding-set=-all \
        $clean "PATH=$PATH" HOME=/run/build/home TMPDIR=/run/build/home $online "$@" </dev/null
}
npm=/usr/bin/npm
# shellcheck disable=SC2086 # one word per package is meant, and for the program
npm_install() {
    echo "I: installing $* from npm"
    unprivileged $npm install --global --prefix /run/build/npm --ignore-scripts --git=/bin/false --no-audit --no-fund --no-update-notifier --no-progress --loglevel=error "$@"
}

if [ -s /run/build/pip.specs ]; then
    echo "I: downloading $(tr '\n' ' ' </run/build/pip.specs)from the Python package index"
    # shellcheck disable=SC2046 # one word per package is meant
    unprivileged /usr/bin/python3 -m pip download --quiet --only-binary :all: --no-cache-dir --disable-pip-version-check --progress-bar off \
        --dest /run/build/wheels $(cat /run/build/pip.specs)
fi
if [ -s /run/build/npm.specs ]; then
    # The distribution's npm is too old for Node.js and npm of recipes, by what
    # these demand; it installs them all the same, and they install the rest.
    own='^\(node-linux-[a-z0-9]*\|npm\)@'
    specs=$(sed -n "/$own/p" /run/build/npm.specs)
    new=/run/build/npm/lib/node_modules/npm/bin/npm-cli.js
    # shellcheck disable=SC2086
    [ -z "$specs" ] || [ -f "$new" ] || npm_install --force $specs
    if [ -f "$new" ] && [ -f /run/build/npm/bin/node ]; then
        npm="/run/build/npm/bin/node $new"
    fi
    specs=$(sed "/$own/d" /run/build/npm.specs)
    # shellcheck disable=SC2086
    [ -z "$specs" ] || npm_install $specs
fi
