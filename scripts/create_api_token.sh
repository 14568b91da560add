#!/usr/bin/env bash
# Creates the API token with which agentlabd uses the REST API of Proxmox VE, with
# the minimal privileges for this version (8 or 9). Run it as root
# on a node. agentlabd on the node itself (transport: shell) needs no token.
#
#   create_api_token.sh            print the missing steps, change nothing
#   create_api_token.sh --apply    run these steps
#   create_api_token.sh --remove   print the steps of the removal; with --apply, run them
#
#   --template VMID   template that sandboxes are cloned from (default: 9000 and
#                     9001)
#   --storage NAME    storage of the disks of sandboxes (default: storage of
#                     the first template)
#   --pool NAME       pool that contains only sandboxes (default: agentlab)
#   --bridge NAME     bridge of sandboxes and templates (default: the one
#                     in config.yaml)
#   --node NAME       node whose load agentlabd reads to place sandboxes on several nodes
#   --user USER@pve   (default: agentlab@pve)    --token NAME   (default: ctl)
#   --out FILE        file for the token's secret, readable only by root
#                     (default: /etc/agentlab/proxmox.token)
#   --rotate          create a new secret if the token already exists
#   --show            also print the secret
#
# --template, --storage, --bridge and --node may be given several times.
# The token is privilege separated: both the token and its user get each privilege.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=scripts/lib.sh
. "$here/lib.sh"

templates=() storages=() bridges=() nodes=()
pool=agentlab user=agentlab@pve token=ctl out=/etc/agentlab/proxmox.token rotate='' reveal=''
while (($#)); do
	case $1 in
	--rotate) rotate=yes ;;
	--show) reveal=yes ;;
	--template | --storage | --pool | --bridge | --node | --user | --token | --out)
		value "$1" $#
		case $1 in
		--template) templates+=("$2") ;;
		--storage) storages+=("$2") ;;
		--bridge) bridges+=("$2") ;;
		--node) nodes+=("$2") ;;
		--pool) pool=$2 ;;
		--user) user=$2 ;;
		--token) token=$2 ;;
		--out) out=$2 ;;
		esac
		shift
		;;
	*) common "$1" || badusage "unknown argument $1" ;;
	esac
	shift
done

# These names become parts of ACL paths.
for name in "$pool" "$token" ${storages[@]+"${storages[@]}"} ${bridges[@]+"${bridges[@]}"} ${nodes[@]+"${nodes[@]}"}; do
	[[ $name =~ ^[A-Za-z][A-Za-z0-9._-]*$ ]] || badusage "'$name' is not a valid name in Proxmox VE"
done
for name in ${templates[@]+"${templates[@]}"}; do
	[[ $name =~ ^[1-9][0-9]{2,8}$ ]] || badusage "'$name' is not a VMID"
done
[[ $user =~ ^[A-Za-z0-9._-]+@pve$ ]] || badusage "'$user' is not a user of the realm pve (a token of root@pam would have all privileges)"
[[ $out == /* ]] || badusage "--out needs an absolute path"
begin
settings
((${#templates[@]})) || templates=(9000 9001)
((${#bridges[@]})) || bridges=("$bridge")

command -v pveum >/dev/null || die "pveum not found: this machine is not a node of Proxmox VE" "run it as root on a node"
[[ $EUID == 0 ]] || die "only root can read users and permissions of Proxmox VE" "run the script with sudo; without --apply it changes nothing"

version=$(pvesh get /version --output-format json) || die "Proxmox VE does not answer" "see: systemctl status pve-cluster pvedaemon"
version=$(sed -n 's/.*"release" *: *"\([0-9]*\)\..*/\1/p' <<<"$version")
case $version in
8) agent=VM.Monitor ;;
# 9 split that privilege; only one file is written, and nothing is executed.
9) agent=VM.GuestAgent.Audit,VM.GuestAgent.FileWrite ;;
*) die "version '$version' of Proxmox VE is not supported" "supported versions are 8 and 9" ;;
esac

if [[ ${#storages[@]} == 0 && -z $remove ]]; then
	name=$(pvesh get "/nodes/localhost/qemu/${templates[0]}/config" --output-format json 2>/dev/null | sed -n 's/.*"\(scsi\|virtio\)0" *: *"\([^":]*\):.*/\2/p' || true)
	[[ -n $name ]] || die "cannot determine the storage of template ${templates[0]}" "create the template first (create_template.sh), or set the storage: --storage NAME"
	storages=("$name")
fi

# Privileges, by path.
declare -A rights=(
	[AgentLabSandbox]="VM.Allocate,VM.Audit,VM.Config.CPU,VM.Config.Disk,VM.Config.Memory,VM.Config.Network,VM.Config.Options,$agent,VM.Clone,VM.PowerMgmt,VM.Snapshot"
	[AgentLabTemplate]="VM.Audit,VM.Clone"
	[AgentLabStorage]="Datastore.AllocateSpace,Datastore.Audit"
	[AgentLabNetwork]="SDN.Use"
	[AgentLabNode]="Sys.Audit"
)
grants=("/pool/$pool AgentLabSandbox")
for name in "${templates[@]}"; do grants+=("/vms/$name AgentLabTemplate"); done
for name in "${storages[@]}"; do grants+=("/storage/$name AgentLabStorage"); done
for name in "${bridges[@]}"; do grants+=("/sdn/zones/localnetwork/$name AgentLabNetwork"); done
for name in ${nodes[@]+"${nodes[@]}"}; do grants+=("/nodes/$name AgentLabNode"); done

# list WHAT... runs pveum and prints each object on a separate line, without
# blanks: no value that this script searches for contains blanks.
list() {
	local text
	text=$(pveum "$@" --output-format json) || die "command failed: pveum $*"
	tr -d ' \n\t' <<<"$text" | sed 's/},{/}\n{/g; s/^\[//; s/\]$//'
	echo
}
sorted() { tr , '\n' <<<"$1" | sort | paste -sd,; }

roles=$(list role list)
users=$(list user list)
pools=$(list pool list)
acls=$(list acl list)
role_of() { grep -F "\"roleid\":\"$1\"" <<<"$roles" | sed -n 1p; }
has_user() { grep -qF "\"userid\":\"$user\"" <<<"$users"; }
has_pool() { grep -qF "\"poolid\":\"$pool\"" <<<"$pools"; }
tokens=
if has_user; then tokens=$(list user token list "$user"); fi
has_token() { grep -qF "\"tokenid\":\"$token\"" <<<"$tokens"; }
granted() { # PATH ROLE WHOM
	grep -F "\"path\":\"$1\"" <<<"$acls" | grep -F "\"roleid\":\"$2\"" | grep -F "\"ugid\":\"$3\"" >/dev/null
}

# secret creates the token and saves its secret, which Proxmox VE prints only once.
# The file is created before the token, so that the secret can certainly be saved.
secret() {
	local answer text temp
	show pveum user token add "$user" "$token" --privsep 1 --output-format json
	printf '    the secret is written to %s (0600)\n' "$out"
	[[ -n $apply ]] || return 0
	mkdir -p "${out%/*}"
	temp=$(mktemp "${out%/*}/.agentlab.XXXXXX")
	answer=$(pveum user token add "$user" "$token" --privsep 1 --output-format json) || {
		rm -f "$temp"
		die "the token was not created"
	}
	text=$(sed -n 's/.*"value" *: *"\([0-9a-fA-F-]\{36\}\)".*/\1/p' <<<"$answer")
	if [[ -z $text ]] || ! printf '%s\n' "$text" >"$temp" || ! sync "$temp" || ! mv -f "$temp" "$out"; then
		rm -f "$temp"
		pveum user token remove "$user" "$token" >&2 || true
		die "cannot save the token's secret; the token was removed again"
	fi
	[[ -z $reveal ]] || printf '%s\n' "$text"
}

make() {
	local role grant path whom
	for role in AgentLabSandbox AgentLabTemplate AgentLabStorage AgentLabNetwork AgentLabNode; do
		[[ $role != AgentLabNode || ${#nodes[@]} -gt 0 ]] || continue
		if [[ -z $(role_of "$role") ]]; then
			run pveum role add "$role" --privs "${rights[$role]}"
		elif [[ $(sorted "$(role_of "$role" | sed -n 's/.*"privs":"\([^"]*\)".*/\1/p')") != $(sorted "${rights[$role]}") ]]; then
			run pveum role modify "$role" --privs "${rights[$role]}"
		fi
	done
	has_pool || run pveum pool add "$pool" --comment "sandboxes of AgentLab"
	has_user || run pveum user add "$user" --comment "agentlabd"
	if has_token && [[ -n $rotate ]]; then
		run pveum user token remove "$user" "$token"
		acls=$(grep -vF "\"ugid\":\"$user!$token\"" <<<"$acls" || true) # deleted with the token
		secret
	elif ! has_token; then
		secret
	elif [[ ! -s $out ]]; then
		die "the token $user!$token exists, but its secret is not in $out" "Proxmox VE prints a secret only once; to create a new one: $0 --rotate --apply"
	elif [[ $(stat -c %a "$out") != 600 ]]; then
		run chmod 600 "$out"
	fi
	for grant in "${grants[@]}"; do
		read -r path role <<<"$grant"
		for whom in users tokens; do
			name=$user
			[[ $whom == users ]] || name=$user!$token
			granted "$path" "$role" "$name" || run pveum acl modify "$path" "--$whom" "$name" --roles "$role"
		done
	done
}

# unmake removes the user with its tokens and rights, the roles, and the pool
# if the pool is empty.
unmake() {
	local role
	if has_user; then
		if has_token; then run pveum user token remove "$user" "$token"; fi
		if [[ $(grep -c '"tokenid"' <<<"$tokens" || true) -gt $(has_token && echo 1 || echo 0) ]]; then
			note "$user has other tokens and is not removed"
		else
			run pveum user delete "$user"
		fi
	fi
	for role in "${!rights[@]}"; do
		if [[ -z $(role_of "$role") ]]; then
			continue
		elif grep -F "\"roleid\":\"$role\"" <<<"$acls" | grep -vF -e "\"ugid\":\"$user\"" -e "\"ugid\":\"$user!" >/dev/null; then
			note "the role $role is also granted to other users and is not removed"
		else
			run pveum role delete "$role"
		fi
	done
	if has_pool; then
		if pvesh get "/pools/$pool" --output-format json | tr -d ' \n' | grep '"members":\[\]' >/dev/null; then
			run pveum pool delete "$pool"
		else
			note "the pool $pool is not empty and is not removed"
		fi
	fi
	drop "$out"
}

if [[ -n $remove ]]; then
	unmake
	finish "token"
	exit
fi
make
finish "token"
for pem in /etc/pve/local/pveproxy-ssl.pem /etc/pve/local/pve-ssl.pem; do
	if [[ -r $pem ]] && command -v openssl >/dev/null; then
		note "the certificate: $(openssl x509 -in "$pem" -noout -fingerprint -sha256)"
		break
	fi
done
note "set in config.yaml: proxmox.token_id: $user!$token, proxmox.token_file: $out, proxmox.pool: $pool"
