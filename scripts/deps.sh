#!/usr/bin/env bash
# Installs the programs that AgentLab requires and that are missing here,
# with apt, and prints the reason for each. Prints nothing if all are installed.
#
#   deps.sh [run] [agents] [test] [browser] [lint] [race]
#
# run: build images and run sandboxes (the default). agents: npm, which builds the
# image "agents" with the user's own configuration; without it, the build fetches
# its own. test: tests without virtual machines ('make check'). browser: tests with
# a browser. lint, race: 'make lint', the race detector.
set -euo pipefail

case "$(uname -m)" in
x86_64) qemu=qemu-system-x86_64 qemu_pkg=qemu-system-x86 ;;
aarch64) qemu=qemu-system-aarch64 qemu_pkg=qemu-system-arm ;;
*)
    echo "AgentLab runs on x86_64 and aarch64, not on $(uname -m)." >&2
    exit 1
    ;;
esac

# Building Debian images on Ubuntu requires Debian's keys, and vice versa.
keyring=/usr/share/keyrings/debian-archive-keyring.gpg

packages=() reasons=()
need() { # program-or-file package reason
    if [[ $1 == /* ]]; then
        [[ -e $1 ]] && return
    elif PATH="$PATH:/usr/sbin:/sbin" command -v "$1" >/dev/null; then
        return
    fi
    packages+=("$2")
    reasons+=("$(printf '%-24s %s' "$2" "$3")")
}

for set in "${@:-run}"; do
    case "$set" in
    run)
        need git git "repositories of jobs"
        need "$qemu" "$qemu_pkg" "runs the virtual machines"
        need qemu-img qemu-utils "creates their disks"
        need mmdebstrap mmdebstrap "builds images"
        need mke2fs e2fsprogs "creates an image's file system"
        need "$keyring" debian-archive-keyring "verifies what images are built from"
        need ssh openssh-client "'agentlab ssh'"
        [[ $EUID == 0 ]] || need newuidmap uidmap "builds images without root"
        ;;
    agents) need npm npm "fetches the coding agents for the image 'agents', with your configuration" ;;
    test)
        need nft nftables "the firewall of a bridge host, which is tested in a real kernel"
        need ip iproute2 "the network namespaces of the tests"
        need bwrap bubblewrap "the agent's inner sandbox"
        need dbus-daemon dbus "runs systemd in the installation test"
        need systemd-analyze systemd "checks the systemd unit"
        need sfdisk fdisk "the partitions of a template's disk"
        need newuidmap uidmap "image builds without root"
        need objcopy binutils "builds the probe's kernel"
        need rsync rsync "copies files of a sandbox through OpenSSH"
        need tmux tmux "the windows of 'agentlab sessionizer'"
        need fzf fzf "the selection of 'agentlab sessionizer'"
        need /usr/include/linux/capability.h linux-libc-dev "defines the numbers of capabilities"
        ;;
    browser)
        if grep -qs '^ID=debian' /etc/os-release; then # the packages of Ubuntu have no browser
            need chromium-headless-shell chromium-headless-shell "a browser for development servers in sandboxes"
        fi
        ;;
    lint) need shellcheck shellcheck "checks shell scripts" ;;
    race)
        need gcc gcc "links Go's race detector"
        need /usr/include/stdlib.h libc6-dev "links Go's race detector"
        ;;
    *)
        echo "deps.sh: unknown set '$set' (run, agents, test, browser, lint, race)" >&2
        exit 2
        ;;
    esac
done

if ! command -v go >/dev/null; then
    echo "Go is not installed. Install the version in go.mod or a later one: https://go.dev/dl/" >&2
    exit 1
fi
((${#packages[@]})) || exit 0

if ! command -v apt-get >/dev/null; then
    {
        echo "Missing packages; this machine has no apt-get to install them:"
        printf '  %s\n' "${reasons[@]}"
        echo "Install the equivalent packages of your distribution, then try again."
    } >&2
    exit 1
fi

sudo=()
if [[ $EUID != 0 ]]; then
    if ! command -v sudo >/dev/null; then
        echo "Missing: ${packages[*]}. Run as root: apt-get install ${packages[*]}" >&2
        exit 1
    fi
    sudo=(sudo)
fi
echo "Installing with apt-get${sudo:+ (through sudo)}:"
printf '  %s\n' "${reasons[@]}"
apt() { "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq -o Dpkg::Use-Pty=0 "$@" >/dev/null; }
# The package lists of a new machine are often outdated or missing.
apt update
apt install --yes --no-install-recommends "${packages[@]}" || {
    echo "apt-get install ${packages[*]} failed; see the error above." >&2
    exit 1
}
