#!/usr/bin/env bash
# Installs the programs that AgentLab needs and that this machine lacks,
# through apt, and says what and why. Quick and silent when nothing is missing.
#
#   deps.sh [run] [agents] [test] [lint] [race]
#
# run: build images and run sandboxes (the default). agents: also build the
# image "agents". test, lint, race: also 'make test', 'make lint', 'make race'.
set -euo pipefail

case "$(uname -m)" in
x86_64) qemu=qemu-system-x86_64 qemu_pkg=qemu-system-x86 ;;
aarch64) qemu=qemu-system-aarch64 qemu_pkg=qemu-system-arm ;;
*)
    echo "AgentLab runs on x86_64 and aarch64, not on $(uname -m)." >&2
    exit 1
    ;;
esac

# Debian images on Ubuntu and the other way round need the other's keys.
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
        need qemu-img qemu-utils "makes their disks"
        need mmdebstrap mmdebstrap "builds images"
        need mke2fs e2fsprogs "makes an image's file system"
        need "$keyring" debian-archive-keyring "verifies what images are built from"
        need ssh openssh-client "'agentlab ssh'"
        [[ $EUID == 0 ]] || need newuidmap uidmap "builds images without root"
        ;;
    agents) need npm npm "fetches the coding agents for the image 'agents'" ;;
    test)
        need nft nftables "the firewall of a bridge host, which is tested in a real kernel"
        need ip iproute2 "the network namespaces of the tests"
        need bwrap bubblewrap "the agent's inner sandbox"
        need dbus-daemon dbus "a systemd for the installation's test"
        need systemd-analyze systemd "judges the service's unit"
        need sfdisk fdisk "the partitions of a template's disk"
        need newuidmap uidmap "an ordinary user's image build"
        need objcopy binutils "puts the probe's kernel together again"
        need /usr/include/linux/capability.h linux-libc-dev "tells the numbers of capabilities"
        ;;
    lint) need shellcheck shellcheck "checks shell scripts" ;;
    race)
        need gcc gcc "links Go's race detector"
        need /usr/include/stdlib.h libc6-dev "links Go's race detector"
        ;;
    *)
        echo "deps.sh: unknown set '$set' (run, agents, test, lint, race)" >&2
        exit 2
        ;;
    esac
done

if ! command -v go >/dev/null; then
    echo "Go is missing. AgentLab is built with the version that go.mod names or a later one: https://go.dev/dl/" >&2
    exit 1
fi
((${#packages[@]})) || exit 0

if ! command -v apt-get >/dev/null; then
    {
        echo "These are missing, and this machine has no apt to install them with:"
        printf '  %s\n' "${reasons[@]}"
        echo "Install what your distribution calls them, then try again."
    } >&2
    exit 1
fi

sudo=()
if [[ $EUID != 0 ]]; then
    if ! command -v sudo >/dev/null; then
        echo "Missing: ${packages[*]}. As root: apt-get install ${packages[*]}" >&2
        exit 1
    fi
    sudo=(sudo)
fi
echo "Installing with apt-get${sudo:+ (through sudo)}:"
printf '  %s\n' "${reasons[@]}"
apt() { "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq -o Dpkg::Use-Pty=0 "$@" >/dev/null; }
# The lists of a fresh machine are often old or missing.
apt update
apt install --yes --no-install-recommends "${packages[@]}" || {
    echo "apt-get install ${packages[*]} failed; its messages are above." >&2
    exit 1
}
