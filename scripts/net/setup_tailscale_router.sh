#!/usr/bin/env bash
# Makes this host the way from the tailnet to its sandboxes: it advertises
# their networks. Hosts of the tailnet can open connections to sandboxes then;
# sandboxes can open none there, which the firewall sees to (net/apply.sh).
# Routes that the host advertises already stay.
#
#   setup_tailscale_router.sh             print what is missing
#   setup_tailscale_router.sh --apply     do it
#   setup_tailscale_router.sh --remove    advertise them no more (with --apply:
#                                         really)
#
# The networks are those of /etc/agentlab/config.yaml, key host_network.
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
[[ -n $tailscale ]] || die "host_network.tailscale of config.yaml is empty: the firewall lets nobody of the tailnet in" "write tailscale: tailscale0 there, then: net/apply.sh --apply"
exists "$tailscale" || die "there is no interface $tailscale" "name tailscale's own in config.yaml: host_network.tailscale"

prefs=$(tailscale debug prefs) || die "tailscale does not tell its settings" "see: tailscale debug prefs"
[[ $(tr -d ' \n\t\r' <<<"$prefs") =~ \"AdvertiseRoutes\":(null|\[[^]]*\]) ]] || die "tailscale debug prefs names no AdvertiseRoutes" "this version of tailscale is not known: set the routes by hand"
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
