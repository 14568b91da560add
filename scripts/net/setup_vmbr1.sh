#!/usr/bin/env bash
# Creates the bridge for sandboxes: without a physical port, with
# the host's address, again at each boot; and enables forwarding permanently.
# No other interface is changed. apply.sh loads the firewall.
#
#   setup_vmbr1.sh             print the missing steps, change nothing
#   setup_vmbr1.sh --apply     run these steps
#   setup_vmbr1.sh --remove    undo them (with --apply: run the steps). Forwarding
#                              stays enabled until the next boot
#
# The name and the networks are set in /etc/agentlab/config.yaml, key host_network.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=scripts/lib.sh
. "$here/../lib.sh"

while (($#)); do
	common "$1" || badusage "unknown argument $1"
	shift
done
begin
settings

main=/etc/network/interfaces
stanza=/etc/network/interfaces.d/agentlab
kernel=/etc/sysctl.d/80-agentlab.conf

# ports prints the ports of the bridge that are not network devices of VMs.
ports() {
	local port
	ports_of "$bridge" | while read -r port; do
		[[ $port =~ ^(tap[0-9]+i[0-9]+|fwpr[0-9]+p[0-9]+|veth[0-9]+i[0-9]+)$ ]] || printf '%s\n' "$port"
	done
}

# elsewhere prints another file that configures the bridge.
elsewhere() {
	local file
	for file in "$main" /etc/network/interfaces.d/*; do
		if [[ -f $file && $file != "$stanza" ]] && grep -Eq "^[[:space:]]*iface[[:space:]]+$bridge([[:space:]]|\$)" "$file"; then
			printf '%s\n' "$file"
			return
		fi
	done
}

forwarding() {
	local conf name old=
	printf '# Written by setup_vmbr1.sh of AgentLab: the host routes for its sandboxes.\n'
	printf 'net.ipv4.ip_forward = 1\n'
	[[ -n $gateway6 ]] || return 0
	printf 'net.ipv6.conf.all.forwarding = 1\n'
	# A host that gets its own IPv6 routes from router advertisements keeps doing so.
	[[ ! -f $kernel ]] || old=$(<"$kernel")
	for conf in /proc/sys/net/ipv6/conf/*/accept_ra; do
		name=${conf%/accept_ra}
		name=${name##*/}
		case $name in all | default | "$bridge") continue ;; esac
		if [[ -n $(ip -6 route show proto ra dev "$name") || $(<"$conf") == 2 && $old == *"net/ipv6/conf/$name/accept_ra = 2"* ]]; then
			printf 'net/ipv6/conf/%s/accept_ra = 2\n' "$name"
		fi
	done
}

stanzas() {
	cat <<-TEXT
		# Written by setup_vmbr1.sh of AgentLab. Only sandboxes are on this bridge;
		# /etc/agentlab/config.yaml, key host_network, is the place for changes.
		auto $bridge
		iface $bridge inet static
		    address $gateway
		    bridge-ports none
		    bridge-stp off
		    bridge-fd 0
	TEXT
	if [[ -n $gateway6 ]]; then
		cat <<-TEXT

			iface $bridge inet6 static
			    address $gateway6
		TEXT
	fi
}

# right succeeds if the bridge is up and has its addresses.
right() {
	is_bridge "$bridge" && [[ -n $(ip -o link show up dev "$bridge") ]] &&
		ip -o -4 addr show dev "$bridge" | grep -F " $gateway " >/dev/null &&
		{ [[ -z $gateway6 ]] || ip -o -6 addr show dev "$bridge" | grep -F " $gateway6 " >/dev/null; }
}

# conflicts ends the script if the bridge would conflict with existing configuration.
conflicts() {
	local other route
	if exists "$bridge" && ! is_bridge "$bridge"; then
		die "$bridge is a network interface, but not a bridge" "set another name in config.yaml: host_network.bridge"
	fi
	other=$(ports | tr '\n' ' ')
	if [[ -n $other ]]; then
		die "$bridge has ports that do not belong to VMs: $other" "a bridge for sandboxes must not have such ports: set another name in config.yaml: host_network.bridge"
	fi
	route=$({ ip -4 route show table all root "$subnet" && { [[ -z $subnet6 ]] || ip -6 route show table all root "$subnet6"; }; } 2>/dev/null | grep -v " dev $bridge\( \|\$\)" | sed -n 1p || true)
	if [[ -n $route ]]; then
		die "$subnet or $subnet6 overlaps with an existing route: $route" "set other networks in config.yaml: host_network.subnet, host_network.subnet6"
	fi
}

install_bridge() {
	local other
	conflicts
	other=$(elsewhere)
	if [[ -n $other ]]; then
		right || die "$bridge is configured in $other, but is not up with the address $gateway" "fix it there (address $gateway, bridge-ports none), or remove it there and run this script again"
		note "$bridge is configured in $other, which is not changed"
	else
		[[ -f $main ]] || die "$main does not exist: this host's network is not configured with ifupdown" "create the bridge $bridge with the address $gateway with the host's network configuration"
		grep -Eq '^[[:space:]]*source(-directory)?[[:space:]]+(/etc/network/)?interfaces\.d' "$main" ||
			die "$main does not include /etc/network/interfaces.d" "add this line to it: source /etc/network/interfaces.d/*"
		put "$stanza" 0644 < <(stanzas)
		# ifup, not ifreload: other interfaces must not be reloaded.
		right || run ifup "$bridge"
	fi
	put "$kernel" 0644 < <(forwarding)
	if nft list table inet agentlab >/dev/null 2>&1; then
		[[ $(</proc/sys/net/ipv4/ip_forward) == 1 ]] || run sysctl -q -w net.ipv4.ip_forward=1
		[[ -z $gateway6 || $(</proc/sys/net/ipv6/conf/all/forwarding) == 1 ]] || run sysctl -q -p "$kernel"
	else
		note "forwarding begins when the firewall is in force: net/apply.sh --apply"
	fi
}

remove_bridge() {
	local there
	there=$(ports_of "$bridge" | tr '\n' ' ')
	[[ -z $there ]] || die "VMs are connected to $bridge: $there" "stop them first; list sandboxes with: agentlab sandbox list"
	if [[ -f $stanza ]]; then
		! exists "$bridge" || run ifdown "$bridge"
		drop "$stanza"
	fi
	if [[ -n $(elsewhere) ]]; then
		note "$bridge is configured in $(elsewhere), which is not changed"
	elif is_bridge "$bridge" && ip link show dev "$bridge" | grep '^ *alias agentlab$' >/dev/null; then
		run ip link delete "$bridge" # agentlabd created it
	fi
	drop "$kernel"
}

if [[ -n $remove ]]; then
	remove_bridge
else
	install_bridge
fi
finish "bridge $bridge"
