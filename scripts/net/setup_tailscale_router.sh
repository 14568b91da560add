#!/usr/bin/env bash
# Makes this host the router from the tailnet to its sandboxes: it advertises
# their networks. Hosts of the tailnet can then open connections to sandboxes;
# the firewall (net/apply.sh) blocks connections from sandboxes to the tailnet.
# Routes that the host already advertises are kept.
#
#   setup_tailscale_router.sh             print the missing steps
#   setup_tailscale_router.sh --apply     run these steps
#   setup_tailscale_router.sh --remove    stop advertising the networks (with
#                                         --apply: run the steps)
#
# The networks are set in /etc/agentlab/config.yaml, key host_network.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=scripts/lib.sh
. "$here/../lib.sh"

while (($#)); do
	common "$1" || badusage "unknown argument $1"
	shift
done
begin
settings

command -v tailscale >/dev/null || die "tailscale is not installed" "install it on this host (https://tailscale.com/download), then: tailscale up"
state=$(tailscale status --json 2>/dev/null || true)
field() { tr -d ' \n\t\r' <<<"$1" | sed -n "s/.*\"$2\":$3.*/\1/p"; }
if [[ $(field "$state" BackendState '"\([A-Za-z]*\)"') != Running ]]; then
	die "this host is not in a tailnet" "join it: tailscale up"
fi
[[ -n $tailscale ]] || die "host_network.tailscale of config.yaml is empty, so the firewall blocks all connections from the tailnet" "set it to tailscale0, then run: net/apply.sh --apply"
exists "$tailscale" || die "interface $tailscale does not exist" "set host_network.tailscale in config.yaml to the interface of tailscale"

prefs=$(tailscale debug prefs) || die "cannot read the settings of tailscale" "see: tailscale debug prefs"
[[ $(tr -d ' \n\t\r' <<<"$prefs") =~ \"AdvertiseRoutes\":(null|\[[^]]*\]) ]] || die "the output of tailscale debug prefs has no AdvertiseRoutes" "this version of tailscale is not supported: set the routes manually"
old=$(field "$prefs" AdvertiseRoutes '\[\([^]]*\)\]' | tr -d '"')

ours=("$subnet" ${subnet6:+"$subnet6"})
new=()
IFS=, read -ra have <<<"$old"
for route in ${have[@]+"${have[@]}"}; do
	[[ -n $remove && " ${ours[*]} " == *" $route "* ]] || new+=("$route")
done
if [[ -z $remove ]]; then
	for route in "${ours[@]}"; do
		[[ " ${new[*]-} " == *" $route "* ]] || new+=("$route")
	done
fi
list=$(IFS=, && printf '%s' "${new[*]-}")
[[ $list == "$old" ]] || run tailscale set "--advertise-routes=$list"

if [[ -z $remove ]]; then
	self=$(field "$state" Self '\({.*\)')
	self=${self%%'"Peer":'*}
	for route in "${ours[@]}"; do
		if [[ $self != *"\"$route\""* ]]; then
			note "$route is not approved in the tailnet yet: an admin does that once, under Machines, Edit route settings, or by autoApprovers in the policy file"
		fi
	done
	note "devices that run Linux take the route after: tailscale set --accept-routes"
fi
finish "tailscale routes"
