#!/bin/sh
# Downloads and builds the Go programs of a recipe. Runs as root in mount and
# process namespaces of its own; go runs as an unprivileged user. It is the only
# program that runs with the network, in the version of the recipe, which the
# checksum database has verified, as it verifies the modules. It builds without
# a C compiler, so that no program that it downloads runs.
#
#   go.sh WORK TREE fetch|build [COMMAND]
#
# WORK/go is Go. Each line of WORK/go.list is COMMAND MODULE VERSION PACKAGE,
# and flags of the linker. COMMAND selects one of them.
#
# fetch: downloads the modules to WORK/gowork, with the network.
# build: writes the programs to WORK/gobin, without a network.
set -eu
umask 022
work=$1 tree=$2 what=$3 only=${4-}
uid=65532
prepare() {
    [ -d "$work/$1" ] || mkdir "$work/$1"
    chown "$uid:$uid" "$work/$1"
}
prepare gowork
prepare gobin
# shellcheck source=images/build/enter.sh
. "$work/enter.sh"
share go go.list gowork gobin
online=
[ "$what" = build ] || online
chmod 0755 run/build
enter
renumber nobody

# go runs the go command with the module as the present directory.
go() {
    dir=$1
    shift
    # shellcheck disable=SC2086,SC2154 # they are words
    new_keyring setsid --wait setpriv --reuid="$uid" --regid="$uid" --clear-groups --no-new-privs --inh-caps=-all --bounding-set=-all \
        $clean "PATH=$PATH" HOME=/run/build/gowork TMPDIR=/run/build/gowork CGO_ENABLED=0 GOTOOLCHAIN=local GOVCS=*:off GOWORK=off \
        GOFLAGS='-mod=mod -trimpath -buildvcs=false' GOMODCACHE=/run/build/gowork/mod GOCACHE=/run/build/gowork/cache GOTELEMETRY=off \
        $online env --chdir="$dir" /run/build/go/bin/go "$@" </dev/null
}

while read -r command module version package flags; do
    [ -z "$only" ] || [ "$only" = "$command" ] || continue
    src=/run/build/gowork/src-$command
    if [ "$what" = fetch ]; then
        echo "I: downloading $module $version with its modules"
        go / mod download -json "$module@$version" >/run/build/go.json || { # with the error
            sed -n 's/^\t"Error": "\(.*\)",*$/E: \1/p' /run/build/go.json
            exit 1
        }
        from=$(sed -n 's/^\t"Dir": "\(.*\)",*$/\1/p' /run/build/go.json)
        # A copy is the main module, so that what it replaces is replaced.
        cp -R "$from" "$src"
        chmod -R u+w "$src"
        chown -R "$uid:$uid" "$src"
        go "$src" list -deps "$package" >/run/build/go.deps
    else
        echo "I: building $command"
        GOPROXY=off go "$src" build -ldflags "-s -w $flags" -o "/run/build/gobin/$command" "$package"
    fi
done </run/build/go.list
