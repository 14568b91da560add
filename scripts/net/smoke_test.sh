#!/usr/bin/env bash
# Checks that sandboxes have the expected network access: a report with
# one line for each check, from inside a sandbox that is created for it and
# destroyed. The exit code is 1 if a check fails.
#
#   smoke_test.sh                     the whole report
#   smoke_test.sh --sandbox NAME      use a running sandbox
#   smoke_test.sh --profile NAME      use a sandbox with this profile
#   smoke_test.sh --site HOST         public host that must be reachable
#                                     (default: example.com)
#   smoke_test.sh --tabs              print lines of RESULT, CHECK and DETAIL, separated by tabs
#   smoke_test.sh --inbound ADDRESS   on another device of the tailnet: check that
#                                     it can reach the sandbox with this address
#   smoke_test.sh --dry-run           print the checks, create nothing
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=scripts/lib.sh
. "$here/../lib.sh"

sandbox='' profile='' site=example.com tabs='' inbound='' dry='' made=''
while (($#)); do
	case $1 in
	--sandbox | --profile | --site | --inbound)
		value "$1" $#
		case $1 in
		--sandbox) sandbox=$2 ;;
		--profile) profile=$2 ;;
		--site) site=$2 ;;
		--inbound) inbound=$2 ;;
		esac
		shift
		;;
	--tabs) tabs=yes ;;
	--dry-run) dry=yes ;;
	--help | -h)
		usage
		exit 0
		;;
	*) badusage "unknown argument $1" ;;
	esac
	shift
done
[[ $site =~ ^[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?$ ]] || badusage "'$site' is not a host name"

failed=0 passed=0 skipped=0
report() { # pass|fail|skip CHECK DETAIL
	case $1 in
	pass) passed=$((passed + 1)) ;;
	fail) failed=$((failed + 1)) ;;
	skip) skipped=$((skipped + 1)) ;;
	esac
	if [[ -n $tabs ]]; then
		printf '%s\t%s\t%s\n' "$@"
	else
		printf '%-4s  %-16s %s\n' "$@"
	fi
}

# reaches HOST PORT opens a TCP connection from here.
# shellcheck disable=SC2016 # for the other shell
reaches() { timeout 10 bash -c 'exec 3<>"/dev/tcp/$0/$1"' "$1" "$2" 2>/dev/null; }

if [[ -n $inbound ]]; then
	[[ $inbound =~ ^[0-9a-fA-F.:]+$ ]] || badusage "'$inbound' is not an address"
	if reaches "$inbound" 22; then
		report pass tailnet-inbound "port 22 of $inbound is reached from here"
	else
		report fail tailnet-inbound "port 22 of $inbound is not reachable from here; check that the route is approved and accepted (tailscale set --accept-routes)"
	fi
	exit $((failed > 0))
fi

if [[ -n $dry ]]; then
	printf '%s\n' \
		'daemon           agentlabd answers' \
		'firewall         the rules of the bridge are active (hosts with a bridge)' \
		'sandbox          a sandbox becomes ready' \
		'exec             a command runs in it' \
		"dns              it resolves $site" \
		"internet         it reaches $site with TLS" \
		'lan              it reaches neither the router nor this host' \
		'tailnet          it reaches neither this host nor others in the tailnet' \
		'policy           agentlab verify: the whole table of probes' \
		'host-ssh         this host reaches its SSH server' \
		'tailnet-inbound  the tailnet has the route to it'
	exit
fi

agentlab=$(program agentlab) || die "agentlab is not installed" "install it with install_host.sh"
read -ra options <<<"${AGENTLAB_OPTIONS-}" # of agentlab init: --socket PATH
lab() { "$agentlab" --no-input ${options[@]+"${options[@]}"} "$@"; }
# inside runs a script in the sandbox.
inside() { lab exec "$sandbox" -- timeout 30 bash -c "$@"; }
# tried HOST PORT... prints the first of the ports of a host that a sandbox can reach.
tried() {
	local host=$1
	shift
	# shellcheck disable=SC2016 # for the shell in the sandbox
	inside 'host=$0; for port; do if timeout 3 bash -c "exec 3<>/dev/tcp/\$0/\$1" "$host" "$port" 2>/dev/null; then echo "$port"; exit; fi; done; echo none' "$host" "$@" 2>/dev/null
}
forbidden() { # CHECK WHAT HOST PORT...
	local check=$1 what=$2 port
	shift 2
	port=$(tried "$@") || port='?'
	case $port in
	none) report pass "$check" "$what ($1) is not reached" ;;
	'?') report fail "$check" "cannot test whether $what ($1) is reachable" ;;
	*) report fail "$check" "$what is reachable: $1 port $port" ;;
	esac
}

# shellcheck disable=SC2317 # called by the trap
cleanup() {
	if [[ -n $made ]]; then
		lab sandbox destroy --force "$made" >/dev/null 2>&1 || note "sandbox $made may be left: agentlab sandbox destroy $made"
	fi
}
trap cleanup EXIT
trap 'exit 130' INT TERM

finish_report() {
	[[ -n $tabs ]] || printf '%d passed, %d failed, %d skipped\n' "$passed" "$failed" "$skipped"
	exit $((failed > 0))
}

if version=$(lab status --json 2>/dev/null | sed -n 's/^ *"version": "\(.*\)",*$/\1/p') && [[ -n $version ]]; then
	report pass daemon "agentlabd $version answers"
else
	report fail daemon "agentlabd does not answer: systemctl status agentlabd"
	finish_report
fi

if [[ -n $sandbox ]]; then
	report skip sandbox "$sandbox runs already"
else
	# The name is chosen here, so that the sandbox is also found if this script is interrupted while
	# creating it. If the script is killed, the lease ends the sandbox.
	made=smoke-$$-$RANDOM
	if lab sandbox new --name "$made" --ttl 30m ${profile:+--profile "$profile"} --json >/dev/null 2>&1; then
		sandbox=$made
		report pass sandbox "sandbox $made is ready"
	else
		report fail sandbox "cannot create a sandbox: agentlab sandbox new prints the reason"
		finish_report
	fi
fi
shown=$(lab sandbox show "$sandbox" --json) || shown=
address=$(sed -n 's/^  *"\(ipv4\|ip\)": "\([0-9.]*\).*"\,*$/\2/p' <<<"$shown" | sed -n 1p)

if said=$(inside 'echo works' 2>/dev/null) && [[ $said == works ]]; then
	report pass exec "a command runs in it"
else
	report fail exec "cannot run a command in the sandbox: agentlab exec $sandbox -- true"
	finish_report
fi

bridge='' subnet='' onbridge=
if (settings) >/dev/null 2>&1; then settings; fi
if [[ -n $address ]] && ip -o addr show dev "$bridge" 2>/dev/null | grep . >/dev/null && ip -4 route get "$address" 2>/dev/null | grep -F " dev $bridge " >/dev/null; then
	onbridge=yes
fi
if [[ -n $onbridge ]]; then
	if lab host network status --json 2>/dev/null | tr -d ' \n' | grep '"applied":true.*"drift":\[\]' >/dev/null; then
		report pass firewall "the rules of $bridge are active"
	else
		report fail firewall "the rules of $bridge differ from the expected rules: agentlab host network status"
	fi
else
	report skip firewall "this sandbox is not on a bridge of this host"
fi

# shellcheck disable=SC2016 # for the shell in the sandbox
if inside 'getent ahosts "$0" >/dev/null' "$site" 2>/dev/null; then
	report pass dns "$site resolves in it"
elif ! timeout 30 getent ahosts "$site" >/dev/null; then
	report skip dns "this host does not resolve $site itself"
else
	report fail dns "$site does not resolve in the sandbox: agentlab policy check $site:443 --sandbox $sandbox"
fi
# shellcheck disable=SC2016 # for the shell in the sandbox
if inside 'curl -sS -o /dev/null --max-time 25 "https://$0/"' "$site" 2>/dev/null; then
	report pass internet "https://$site/ is reached from it"
elif reaches "$site" 443; then
	report fail internet "https://$site/ is reachable from this host, but not from the sandbox: agentlab egress log $sandbox --denied"
else
	report skip internet "this host does not reach $site itself"
fi

router=$(ip -4 route show default 2>/dev/null | sed -n 's/^default via \([0-9.]*\) .*/\1/p' | sed -n 1p)
if [[ -n $router ]]; then
	forbidden lan-router "the router of the LAN" "$router" 53 80 443 22
	self=$(ip -4 route get "$router" 2>/dev/null | sed -n 's/.* src \([0-9.]*\).*/\1/p' | sed -n 1p)
	[[ -z $self ]] || forbidden lan-host "this host in the LAN" "$self" 22 8006 80 443 111
else
	report skip lan-router "this host has no default route"
fi
tailnet=$(tailscale ip -4 2>/dev/null | sed -n 1p || true)
if [[ -n $tailnet ]]; then
	forbidden tailnet-host "this host in the tailnet" "$tailnet" 22 80 443 8006
	forbidden tailnet-dns "the DNS server of the tailnet" 100.100.100.100 53 80
else
	report skip tailnet "this host is not in a tailnet"
fi

if lab verify --sandbox "$sandbox" >/dev/null 2>&1; then
	report pass policy "agentlab verify: the sandbox's network access matches its policy"
else
	report fail policy "the network access differs from the policy: agentlab verify --sandbox $sandbox"
fi

if [[ -n $onbridge ]]; then
	if reaches "$address" 22; then
		report pass host-ssh "this host reaches port 22 of $address"
	else
		report fail host-ssh "port 22 of $address is not reachable from this host"
	fi
	if [[ -z $tailnet ]]; then
		report skip tailnet-inbound "this host is not in a tailnet"
	elif tailscale status --json 2>/dev/null | tr -d ' \n\t' | sed 's/"Peer":.*//' | grep -F "\"$subnet\"" >/dev/null; then
		report pass tailnet-inbound "the tailnet has the route $subnet to this host; from another device: smoke_test.sh --inbound $address"
	else
		report fail tailnet-inbound "the tailnet has no route $subnet to this host: net/setup_tailscale_router.sh"
	fi
else
	report skip tailnet-inbound "this sandbox is not on a bridge of this host"
fi
finish_report
