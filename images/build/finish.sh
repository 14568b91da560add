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
#   packages        names, for mmdebstrap or apt.sh
#   apt.conf        settings of the host's apt for the time of the build
#   sources.list    direct: what mmdebstrap installs from
#   withheld        cloud: the privileges that apt.sh does not get, for setpriv
#   agent-runner    cloud: the program
#   npm.specs       npm packages, as name@1.2.3
#   npm.packages    names of those whose install scripts run
#   commands        names of commands that must answer to --version
#
# and what the steps before this one made:
#
#   npm/            what npm installed, for /usr/local
#
# and gets versions/NAME, with what each command answered.
#
# The tree becomes the root of everything that runs. setup.sh runs in it with
# few of root's privileges. The install scripts and the commands run as agent,
# without a privilege and without a network. seal.sh comes last.
set -eu
work=$1 tree=$2
kind=$(cat "$work/kind")

if [ "$kind" = direct ]; then # no device nodes, no kernel
    rm -rf "${tree:?}/dev" "${tree:?}/boot"
    mkdir -m 0755 "$tree/dev" "$tree/boot"
fi
mkdir -p "$work/versions"
# shellcheck source=images/build/enter.sh
. "$work/enter.sh"
share files npm agent-runner versions
# Copies: who owns WORK's files has no meaning in here.
for name in setup.sh seal.sh npm.packages commands; do
    [ ! -e "$work/$name" ] || cat "$work/$name" >"run/build/$name"
done
enter

# as_root runs a script with those of root's privileges that files and users
# take: none to mount, to make devices, to load modules, to open files by
# handle, or to leave. What npm brought is in /usr/local, which is not in its
# path.
as_root() {
    # shellcheck disable=SC2086 # they are a command and its arguments
    setpriv --no-new-privs --inh-caps=-all --bounding-set=-all,+chown,+dac_override,+fowner,+fsetid,+kill,+setuid,+setgid,+setfcap \
        $clean "PATH=$PATH" HOME=/run/build /bin/sh "$@"
}

# confined runs a program of the recipe's: as agent, without any privilege or
# a way to get one, without a terminal, and with all that it starts ended when
# it ends.
confined() {
    # shellcheck disable=SC2086
    unshare --pid --fork --kill-child --mount-proc setsid --wait \
        setpriv --reuid=agent --regid=agent --clear-groups --no-new-privs --inh-caps=-all --bounding-set=-all \
        $clean PATH="/usr/local/sbin:/usr/local/bin:$PATH" HOME=/tmp "$@" </dev/null
}

as_root /run/build/setup.sh "$kind"

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
fi

# There is no network: an agent that needs one to print its version would
# update itself.
: >>/run/build/commands
while read -r command; do
    echo "I: checking $command --version"
    answer=/run/build/versions/$command
    if ! confined timeout 120 "$command" --version >"$answer" 2>"$answer.err"; then
        sed 's/^/E: /' "$answer.err" >&2
        echo "E: $command --version fails in the image" >&2
        exit 1
    fi
done </run/build/commands

as_root /run/build/seal.sh
