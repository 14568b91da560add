#!/bin/sh
# Put the firewall of the agent bridge in force: for hosts whose sandboxes are
# on a bridge, such as Proxmox. May be run again at any time; needs root.
#
#   scripts/net/apply.sh             what config.yaml says, through agentlabd
#   scripts/net/apply.sh --dry-run   ask the kernel whether it takes the rules
#   scripts/net/apply.sh --static    agent_nat.nft from beside this script: the
#                                    rules of the default configuration, for a
#                                    host without agentlabd. Nobody answers DNS
#                                    then, and no sandbox is let in.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
dry=
static=
for arg in "$@"; do
	case $arg in
	--dry-run) dry=yes ;;
	--static) static=yes ;;
	*)
		sed -n '2,/^set /s/^# \{0,1\}//p' "$0" >&2
		exit 2
		;;
	esac
done

if [ "$(id -u)" -ne 0 ]; then
	echo "apply.sh: the firewall is root's: run it with sudo" >&2
	exit 1
fi
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
if ! command -v nft >/dev/null; then
	echo "apply.sh: nft is not installed: apt-get install nftables" >&2
	exit 1
fi

if [ -z "$static" ]; then
	agentlabd=$(command -v agentlabd || true)
	if [ -x "$here/../../bin/agentlabd" ]; then
		agentlabd=$here/../../bin/agentlabd
	fi
	if [ -z "$agentlabd" ]; then
		echo "apply.sh: agentlabd is not installed; --static loads the default rules without it" >&2
		exit 1
	fi
	exec "$agentlabd" network apply --system ${dry:+--dry-run}
fi

# Some kernels cannot say which bridge a frame is on (CONFIG_NFT_BRIDGE_META).
# There, frames are told by the names of the ports that are plugged in now.
rules() {
	if printf 'table bridge agentlab_question {\n chain c {\n type filter hook forward priority 0\n meta ibrname "x" drop\n }\n}\n' | nft -c -f - 2>/dev/null; then
		cat "$here/agent_nat.nft"
		return
	fi
	sed 's/meta ibrname "vmbr1" drop comment "always.sandbox"/iifname @ports drop comment "always.sandbox"\
		oifname @ports drop comment "always.sandbox"/
		s/meta ibrname "vmbr1"/iifname @ports/
		s/meta obrname "vmbr1"/oifname @ports/' "$here/agent_nat.nft"
	ip -o link show master vmbr1 2>/dev/null | sed 's/^[0-9]*: \([^:@]*\).*/add element bridge agentlab ports { "\1" }/'
	echo "apply.sh: this kernel cannot tell bridges apart; run this again whenever a sandbox was plugged in" >&2
}

if [ -n "$dry" ]; then
	rules | nft -c -f -
	echo "the kernel takes the rules; nothing was changed"
	exit 0
fi
# The rules come before anything that could carry a packet.
rules | nft -f -
if ! ip link show vmbr1 >/dev/null 2>&1; then
	ip link add vmbr1 type bridge
	ip link set vmbr1 alias agentlab
fi
for knob in accept_ra autoconf accept_redirects; do
	echo 0 >/proc/sys/net/ipv6/conf/vmbr1/$knob
done
ip link set vmbr1 up
ip addr replace 10.77.0.1/16 dev vmbr1
ip addr replace fd77:a91a:4d00::1/64 dev vmbr1 nodad
echo 1 >/proc/sys/net/ipv4/ip_forward
# A host that takes its own IPv6 routes from advertisements goes on doing so.
for f in /proc/sys/net/ipv6/conf/*/accept_ra; do
	case $f in */all/* | */default/* | */vmbr1/*) continue ;; esac
	if [ "$(cat "$f")" = 1 ]; then
		echo 2 >"$f"
	fi
done
echo 1 >/proc/sys/net/ipv6/conf/all/forwarding
echo "the rules are in force"
