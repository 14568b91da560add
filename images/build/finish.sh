#!/bin/sh
# Turns a tree with the packages of a distribution into the root file system of
# an AgentLab image. Runs as root (of a user namespace where the host's user is
# not root), in mount, process, network and IPC namespaces of its own.
#
#   finish.sh WORK TREE
#
# WORK has the files that Recipe.Stage of internal/image writes:
#
#   kind            direct (a hypervisor brings kernel and initrd) or cloud
#                   (the disk boots by itself, with cloud-init)
#   files/          copied over the tree; all of it becomes root's
#   extra/          files of the recipe, and
#   extra.list      their places: NAME MODE OWNER PATH
#   packages        names, for mmdebstrap or apt.sh
#   apt.conf        settings of the host's apt for the time of the build
#   sources.list    direct: what mmdebstrap installs from
#   withheld        cloud: the privileges that apt.sh does not get, for setpriv
#   agent-runner    cloud: the program
#   npm.specs       cloud: npm packages, as name@1.2.3
#   npm.packages    names of those whose install scripts run
#   pip.specs       Python packages, as name==1.2.3
#   go.list         Go programs, see go.sh
#   shell           login shell of agent
#   run/01...       shell commands of the recipe
#   commands        names of commands that must exit 0 with --version
#
# and what npm, fetch.sh or go.sh made:
#
#   npm/            installed packages, for /usr/local
#   wheels/         of the Python packages
#   go/             Go, and
#   gobin/          programs that it has built
#
# It gets versions/NAME, with the output of each command, and pip.list.
#
# The tree becomes the root of everything that runs. setup.sh runs in it with
# few of root's privileges. Then the code runs that has no distribution's
# signature: the install scripts of npm.packages, the recipe's commands, and the
# programs that print their version. It runs as agent, without privileges and
# without a network. seal.sh comes last.
set -eu
umask 022
work=$1 tree=$2
uid=65533
kind=$(cat "$work/kind")

if [ "$kind" = direct ]; then # no device nodes, no kernel
    rm -rf "${tree:?}/dev" "${tree:?}/boot"
    mkdir -m 0755 "$tree/dev" "$tree/boot"
fi
mkdir -p "$work/versions"
: >"$work/pip.list"
# shellcheck source=images/build/enter.sh
. "$work/enter.sh"
share files extra npm wheels go gobin agent-runner versions pip.list
# Copies: who owns WORK's files has no meaning in here.
for name in setup.sh seal.sh extra.list npm.packages pip.specs commands shell; do
    : >"run/build/$name"
    [ ! -e "$work/$name" ] || cat "$work/$name" >"run/build/$name"
done
[ ! -d "$work/run" ] || cp -R "$work/run" run/build/
enter

# as_root runs a script with those of root's privileges that files and users
# take: none to mount, to make devices, to load modules, to open files by
# handle, or to leave. /usr/local is not in its path.
as_root() {
    # shellcheck disable=SC2086 # they are a command and its arguments
    setpriv --no-new-privs --inh-caps=-all --bounding-set=-all,+chown,+dac_override,+fowner,+fsetid,+kill,+setuid,+setgid,+setfcap \
        $clean "PATH=$PATH" HOME=/run/build /bin/sh "$@"
}

# A limit that cannot be set is lower already.
limits=
for limit in core=0 nproc=8192 fsize=4294967296; do
    ! prlimit "--$limit" true 2>/dev/null || limits="$limits --$limit"
done

# confined runs a program as agent, without any privilege or a way to get one,
# without a terminal or keys of the host, and with all that it starts ended when
# it ends.
confined() {
    # shellcheck disable=SC2086
    new_keyring unshare --pid --fork --kill-child --mount-proc setsid --wait prlimit $limits \
        setpriv --reuid=agent --regid=agent --clear-groups --no-new-privs --inh-caps=-all --bounding-set=-all \
        $clean PATH="/usr/local/sbin:/usr/local/bin:$PATH" HOME=/tmp "$@" </dev/null
}

# bounded OUT ERR COMMAND... is confined with the first 64 KiB of each output in
# a file.
bounded() {
    out=$1 err=$2
    shift 2
    status=$({ {
        { confined "$@" 4>&- && echo 0 >&4 || echo $? >&4; } 2>&1 >&3 3>&- | first "$err"
    } 3>&1 | first "$out"; } 4>&1)
    return "$status"
}
first() {
    head -c 65536 >"$1"
    cat >/dev/null
}

fail() {
    echo "E: $1" >&2
    exit 1
}

as_root /run/build/setup.sh "$kind"

# Until the last confined program has ended, agent has a number that no user of
# the host has.
find /home/agent /work -xdev -user agent -exec chown -h "$uid:$uid" {} +
renumber agent

# Until they are root's again, the files in /usr/local are agent's. They are a
# mount of their own, so that no file from elsewhere can be linked into it and
# change its owner with them. chown also clears setuid and setgid of files. Root
# runs nothing of /usr/local.
mount --bind /usr/local /usr/local
chown -hR agent:agent /usr/local

# Some agents choose a binary for the machine in an install script, from the
# packages that npm has already fetched. Only the agents' own scripts run: their
# dependencies are prebuilt, or optional and would need a compiler.
if [ -s /run/build/npm.packages ]; then
    # shellcheck disable=SC2046 # one word per package is meant
    confined timeout --kill-after=10 1800 npm rebuild --global --offline --foreground-scripts --no-bin-links --no-audit --no-fund --no-update-notifier $(cat /run/build/npm.packages)
fi

if [ -s /run/build/pip.specs ]; then
    venv=/usr/local/lib/agentlab-python
    mkdir -m 0755 /run/wheels
    mount --bind /run/build/wheels /run/wheels
    confined timeout --kill-after=10 600 /usr/bin/python3 -m venv "$venv"
    # shellcheck disable=SC2046
    confined timeout --kill-after=10 1800 "$venv/bin/pip" install --quiet --no-index --find-links /run/wheels --no-cache-dir --disable-pip-version-check $(cat /run/build/pip.specs)
    bounded /run/build/pip.list /run/pip.err timeout --kill-after=10 600 "$venv/bin/pip" list --format=freeze --disable-pip-version-check || fail "the Python packages cannot be listed"
    while read -r command; do
        [ ! -e "$venv/bin/$command" ] || confined ln -s "$venv/bin/$command" "/usr/local/bin/$command"
    done </run/build/commands
fi

for step in /run/build/run/*; do
    [ -f "$step" ] || continue
    name=${step##*/}
    echo "I: running step ${name#0}"
    status=0
    confined env --chdir=/home/agent HOME=/home/agent timeout --kill-after=10 600 sh -euc "$(cat "$step")" || status=$?
    case $status in
    0) ;;
    124 | 137) fail "step ${name#0} of the recipe's run took more than 10 minutes" ;;
    *) fail "step ${name#0} of the recipe's run failed with exit status $status" ;;
    esac
done

chown -hR root:root /usr/local
chmod -R go-w,u-s,g-s,-t /usr/local
umount /usr/local

# There is no network: an agent that needs one to print its version would
# update itself.
: >>/run/build/commands
while read -r command; do
    echo "I: checking $command --version"
    answer=/run/build/versions/$command
    if ! bounded "$answer" "$answer.err" timeout --kill-after=10 120 "$command" --version; then
        sed 's/^/E: /' "$answer.err" >&2
        fail "$command --version fails in the image"
    fi
done </run/build/commands

umount /etc/passwd /etc/group
find / -xdev -user "$uid" -exec chown -h agent:agent {} +
as_root /run/build/seal.sh "$kind"
