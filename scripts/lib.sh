# shellcheck shell=bash
# Functions for the scripts in this directory, which source this file.
#
# Without --apply, a script changes nothing: it prints, one per line and
# after "+ ", the commands that it would run, and only those that are needed in
# the current state. A script that prints nothing has nothing to do, and can be
# run again at any time. --remove undoes its changes, in the same two ways.
# Messages are written to standard error.
set -euo pipefail
umask 022

if [[ $EUID == 0 ]]; then
	PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
else
	PATH=$PATH:/usr/sbin:/sbin
fi
export LC_ALL=C

me=${0##*/}
apply=   # yes: run the commands
remove=  # yes: undo
needed=0 # commands that were needed

note() { printf '%s: %s\n' "$me" "$*" >&2; }

# die MESSAGE [WHAT TO DO]
die() {
	note "$1"
	[[ -z ${2-} ]] || printf '  %s\n' "$2" >&2
	exit 1
}

# usage prints the comment at the head of the script.
usage() { sed -n '2,/^[^#]/s/^#\( \|$\)//p' "$0"; }

# badusage MESSAGE ends the script with a usage error.
badusage() {
	note "$1"
	usage >&2
	exit 2
}

# common ARGUMENT parses the arguments of all scripts; it fails for any other.
common() {
	case $1 in
	--dry-run) apply= ;;
	--apply) apply=yes ;;
	--remove) remove=yes ;;
	--help | -h)
		usage
		exit 0
		;;
	*) return 1 ;;
	esac
}

# value OPTION COUNT ends the script if the option's value is missing; COUNT is $#.
value() { (($2 >= 2)) || badusage "$1 needs a value"; }

# begin is called after the arguments have been parsed.
begin() {
	[[ -n $apply ]] || return 0
	[[ $EUID == 0 ]] || die "--apply requires root" "run the script with sudo"
	# Concurrent scripts would see each other's partial changes.
	mkdir -p /run/lock
	exec 9>/run/lock/agentlab-scripts
	flock -w 300 9 || die "another script of AgentLab has been running for five minutes" "find the process: fuser -v /run/lock/agentlab-scripts"
}

# quoted COMMAND... prints the command, quoted for a shell.
quoted() {
	local out='' word
	for word; do
		if [[ $word =~ ^[A-Za-z0-9_./:@%+=,!-]+$ ]]; then
			out+=" $word"
		else
			out+=" '${word//\'/\'\\\'\'}'"
		fi
	done
	printf '%s\n' "${out# }"
}

# show COMMAND... prints a required command.
show() {
	needed=$((needed + 1))
	printf '+ %s\n' "$(quoted "$@")"
}

# carry_out COMMAND... runs the command under --apply, with its output on standard error.
# Processes that it leaves behind do not inherit the lock.
carry_out() { "$@" >&2 </dev/null 9>&-; }

# run COMMAND... prints the command, and runs it under --apply. If it fails, the
# script ends.
run() {
	show "$@"
	[[ -n $apply ]] || return 0
	carry_out "$@" || die "command failed: $(quoted "$@")" "completed steps are not undone; fix the error and run $me again"
}

# put PATH MODE writes standard input to a file atomically.
put() {
	local path=$1 mode=$2 text temp
	text=$(cat && echo .)
	text=${text%.}
	if [[ -f $path && ! -L $path ]] && cmp -s "$path" - <<<"${text%$'\n'}" && [[ $(stat -c %a "$path") == "${mode#0}" ]]; then
		return 0
	fi
	show write "$path" "$mode"
	printf '    %s\n' "${text//$'\n'/$'\n'    }" | sed '$d'
	[[ -n $apply ]] || return 0
	mkdir -p "${path%/*}"
	temp=$(mktemp "${path%/*}/.agentlab.XXXXXX")
	printf '%s' "$text" >"$temp"
	chmod "$mode" "$temp"
	sync "$temp"
	mv -f "$temp" "$path"
}

# copy SOURCE PATH MODE installs a file atomically: a running program
# keeps using its old file.
copy() {
	local source=$1 path=$2 mode=$3 temp
	if [[ -f $path && ! -L $path ]] && cmp -s "$source" "$path" && [[ $(stat -c %a "$path") == "${mode#0}" ]]; then
		return 0
	fi
	show install -D -m "$mode" "$source" "$path"
	[[ -n $apply ]] || return 0
	mkdir -p "${path%/*}"
	temp=$(mktemp "${path%/*}/.agentlab.XXXXXX")
	cat "$source" >"$temp"
	chmod "$mode" "$temp"
	sync "$temp"
	mv -f "$temp" "$path"
}

# drop PATH... removes existing files.
drop() {
	local path
	for path; do
		if [[ -e $path || -L $path ]]; then
			run rm -f -- "$path"
		fi
	done
}

# directory PATH MODE creates a missing directory, or sets its mode.
directory() {
	if [[ ! -d $1 || -L $1 ]]; then
		run install -d -m "$2" "$1"
	elif [[ $(stat -c %a "$1") != "${2#0}" ]]; then
		run chmod "$2" "$1"
	fi
}

# program NAME prints the path of one of AgentLab's programs. here is the
# directory of the script that sources this.
# shellcheck disable=SC2154
program() {
	local name=$1 dir
	for dir in ${AGENTLAB_BIN:+"$AGENTLAB_BIN"} /usr/local/bin "$here/../bin" "$here/../../bin"; do
		if [[ -f $dir/$name && -x $dir/$name ]]; then
			(cd "$dir" && printf '%s/%s\n' "$PWD" "$name")
			return
		fi
	done
	command -v "$name" || return 1
}

# settings reads the bridge of config.yaml into bridge, subnet, gateway,
# subnet6, gateway6 (empty: no IPv6) and tailscale; without agentlabd it uses
# the defaults.
# shellcheck disable=SC2034
settings() {
	local daemon text key val
	bridge=vmbr1 subnet=10.77.0.0/16 gateway=10.77.0.1/16 subnet6=fd77:a91a:4d00::/64 gateway6=fd77:a91a:4d00::1/64 tailscale=tailscale0
	daemon=$(program agentlabd) || return 0
	text=$("$daemon" network settings --system) || die "cannot read config.yaml; see the error above" "fix /etc/agentlab/config.yaml"
	while IFS='=' read -r key val; do
		case $key in
		bridge) bridge=$val ;;
		subnet) subnet=$val ;;
		gateway) gateway=$val ;;
		subnet6) subnet6=$val ;;
		gateway6) gateway6=$val ;;
		tailscale) tailscale=$val ;;
		esac
	done <<<"$text"
}

# These functions use netlink: /sys may belong to another network namespace.
exists() { ip link show dev "$1" >/dev/null 2>&1; }
is_bridge() { [[ -n $(ip -o link show dev "$1" type bridge 2>/dev/null) ]]; }
# ports_of BRIDGE prints its ports, one name per line.
ports_of() { { ip -o link show master "$1" 2>/dev/null || true; } | sed 's/^[0-9]*: \([^:@]*\).*/\1/'; }

# finish WHAT prints the result.
finish() {
	if ((needed == 0)); then
		note "${1}: nothing to do"
	elif [[ -n $apply ]]; then
		note "${1}: done"
	else
		note "${1}: nothing was changed; to run these steps: $0 ${remove:+--remove }--apply"
	fi
}
