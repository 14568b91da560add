#!/usr/bin/env bash
# Puts the firewall of the agent bridge in force: for hosts whose sandboxes are
# on a bridge, such as Proxmox. At boot agentlab-network.service does it.
#
#   apply.sh             tell what is missing; as root, ask the kernel whether it
#                        takes the rules. Nothing is changed
#   apply.sh --apply     what config.yaml says, through agentlabd
#   apply.sh --static    agent_nat.nft from beside this script instead: the rules
#                        of the default configuration, for a host without
#                        agentlabd. Nobody answers DNS then, and no sandbox is
#                        let in. With --apply: really
#   apply.sh --remove    take the rules away; the bridge goes down first, so that
#                        nothing is open. With --apply: really
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=scripts/lib.sh
. "$here/../lib.sh"

static=
while (($#)); do
	case $1 in
	--static) static=yes ;;
	*) common "$1" || badusage "unknown argument $1" ;;
	esac
	shift
done
begin
command -v nft >/dev/null || die "nft is not installed" "apt-get install nftables"

# there reports whether the kernel has tables of AgentLab.
there() { nft list tables 2>/dev/null | grep -E '^table (inet|bridge|arp) agentlab$' >/dev/null; }

through_agentlabd() {
	local agentlabd
	agentlabd=$(program agentlabd) || die "agentlabd is not installed" "install_host.sh installs it; --static loads the default rules without it"
	if [[ $EUID != 0 ]]; then
		note "whether the rules are in force is for root to see"
		if [[ -n $remove ]]; then
			show "$agentlabd" network remove --system
		else
			show "$agentlabd" network apply --system
		fi
		return
	fi
	if [[ -n $remove ]]; then
		! there || run "$agentlabd" network remove --system
		return
	fi
	if [[ -z $apply ]]; then
		"$agentlabd" network apply --system --dry-run >&2 || die "the rules cannot be put in force; the reason is above"
	fi
	# Rules that are in force are left alone: to load them anew shuts sandboxes
	# out for a moment.
	"$agentlabd" network status --system >/dev/null 2>&1 || run "$agentlabd" network apply --system
}

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
	ports_of vmbr1 | sed 's/.*/add element bridge agentlab ports { "&" }/'
	note "this kernel cannot tell bridges apart; run this again whenever a sandbox was plugged in"
}

# knob FILE VALUE sets a knob of the kernel that has another value.
knob() {
	[[ $(<"/proc/sys/$1") == "$2" ]] || run sysctl -q -w "${1}=$2"
}

mac=02:a9:1a:4d:00:01 # of the bridge if nothing else set one (3 is NET_ADDR_SET), as the daemon does

# host gives the bridge its addresses and lets the host route.
host() {
	local name conf
	if ! exists vmbr1; then
		run ip link add vmbr1 type bridge
		run ip link set vmbr1 alias agentlab
		[[ -n $apply ]] || return 0
	fi
	for name in accept_ra autoconf accept_redirects; do
		knob "net/ipv6/conf/vmbr1/$name" 0
	done
	# Else it has the lowest address of its ports, and changes it with them.
	[[ $(</sys/class/net/vmbr1/addr_assign_type) == 3 ]] || run ip link set vmbr1 address "$mac"
	run ip link set vmbr1 up
	run ip addr replace 10.77.0.1/16 dev vmbr1
	run ip addr replace fd77:a91a:4d00::1/64 dev vmbr1 nodad
	knob net/ipv4/ip_forward 1
	# A host that takes its own IPv6 routes from advertisements goes on doing so.
	for conf in /proc/sys/net/ipv6/conf/*/accept_ra; do
		case $conf in */all/* | */default/* | */vmbr1/*) continue ;; esac
		[[ $(<"$conf") != 1 ]] || run sysctl -q -w "${conf#/proc/sys/}=2"
	done
	knob net/ipv6/conf/all/forwarding 1
}

without_agentlabd() {
	local table
	if [[ -n $remove ]]; then
		! there || ! exists vmbr1 || run ip link set vmbr1 down
		for table in inet bridge arp; do
			! nft list table "$table" agentlab >/dev/null 2>&1 || run nft delete table "$table" agentlab
		done
		return
	fi
	if [[ $EUID == 0 ]]; then
		rules | nft -c -f - || die "the kernel does not take the rules; the reason is above"
	fi
	# What is in force is not compared: loading it again, in one transaction,
	# changes nothing. The rules come before anything that could carry a packet.
	show nft -f "$here/agent_nat.nft"
	if [[ -n $apply ]]; then
		rules | nft -f - >&2 || die "the rules were not loaded; the reason is above"
	fi
	host
}

if [[ -n $static ]]; then
	without_agentlabd
else
	through_agentlabd
fi
finish "firewall"
