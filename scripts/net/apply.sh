#!/usr/bin/env bash
# Loads the firewall of the agent bridge, for hosts whose sandboxes are
# on a bridge, such as Proxmox VE. At boot, agentlab-network.service does this.
#
#   apply.sh             print the missing steps; as root, check that the kernel
#                        accepts the rules. Change nothing
#   apply.sh --apply     load the rules of config.yaml, with agentlabd
#   apply.sh --static    use agent_nat.nft from this directory instead: the rules
#                        of the default configuration, for a host without
#                        agentlabd. DNS is then not answered, and no sandbox
#                        has network access. With --apply, load them
#   apply.sh --remove    remove the rules; the bridge is shut down first, so that
#                        nothing is open. With --apply, do it
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
	agentlabd=$(program agentlabd) || die "agentlabd is not installed" "install it with install_host.sh, or use --static to load the default rules"
	if [[ $EUID != 0 ]]; then
		note "only root can check whether the rules are active"
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
		"$agentlabd" network apply --system --dry-run >&2 || die "cannot load the rules; see the error above"
	fi
	# Active rules are not loaded again, because that would interrupt the network of sandboxes
	# for a moment.
	"$agentlabd" network status --system >/dev/null 2>&1 || run "$agentlabd" network apply --system
}

# Some kernels cannot match the bridge of a frame (CONFIG_NFT_BRIDGE_META).
# There, the rules match the names of the current ports of the bridge.
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
	note "this kernel cannot match the bridge of a frame; run this again after each sandbox has been connected to the bridge"
}

# knob FILE VALUE sets a kernel parameter if it has another value.
knob() {
	[[ $(<"/proc/sys/$1") == "$2" ]] || run sysctl -q -w "${1}=$2"
}

mac=02:a9:1a:4d:00:01 # of the bridge if nothing else set one (3 is NET_ADDR_SET), as the daemon does

# host sets the bridge's addresses and enables forwarding.
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
	# Otherwise the bridge has the lowest MAC address of its ports, which changes with them.
	[[ $(</sys/class/net/vmbr1/addr_assign_type) == 3 ]] || run ip link set vmbr1 address "$mac"
	run ip link set vmbr1 up
	run ip addr replace 10.77.0.1/16 dev vmbr1
	run ip addr replace fd77:a91a:4d00::1/64 dev vmbr1 nodad
	knob net/ipv4/ip_forward 1
	# A host that gets its own IPv6 routes from router advertisements keeps doing so.
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
		rules | nft -c -f - || die "the kernel rejects the rules; see the error above"
	fi
	# Active rules are not compared: loading them again, in one transaction,
	# changes nothing. The rules come before anything that could carry a packet.
	show nft -f "$here/agent_nat.nft"
	if [[ -n $apply ]]; then
		rules | nft -f - >&2 || die "the rules were not loaded; see the error above"
	fi
	host
}

if [[ -n $static ]]; then
	without_agentlabd
else
	through_agentlabd
fi
finish "firewall"
