# shellcheck shell=bash
# Functions of the scripts of a host, which source this file.
#
# Each of them changes nothing without --apply: it prints, one per line and
# after "+ ", the commands that it would run, and only those that are needed as
# things are now. So a script that prints nothing has nothing to do, and may be
# run again at any time. --remove undoes its changes, in the same two ways.
# What people read goes to standard error.
set -euo pipefail
umask 022

if [[ $EUID == 0 ]]; then
	PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
else
	PATH=$PATH:/usr/sbin:/sbin
fi
export LC_ALL=C

me=${0##*/}
apply=   # yes: carry the commands out
remove=  # yes: take back
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

# badusage WHAT ends the script as one that was called wrongly.
badusage() {
	note "$1"
	usage >&2
	exit 2
}

# common ARGUMENT takes the arguments that all scripts have; false: none of them.
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

# value OPTION COUNT complains when an option's value is missing; COUNT is $#.
value() { (($2 >= 2)) || badusage "$1 needs a value"; }

# begin is called when the arguments are read.
begin() {
	[[ -n $apply ]] || return 0
	[[ $EUID == 0 ]] || die "--apply is for root" "run it with sudo"
	# Two at once would each see half of what the other does.
	mkdir -p /run/lock
	exec 9>/run/lock/agentlab-scripts
	flock -w 300 9 || die "another script of AgentLab has been running for five minutes" "see what it waits for: fuser -v /run/lock/agentlab-scripts"
}

# quoted COMMAND... prints it as a shell would read it.
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

# show COMMAND... prints a command that is needed.
show() {
	needed=$((needed + 1))
	printf '+ %s\n' "$(quoted "$@")"
}

# carry_out COMMAND... runs it under --apply, with its output on standard error.
# What it leaves running does not keep the lock.
carry_out() { "$@" >&2 </dev/null 9>&-; }

# run COMMAND... prints it, and runs it under --apply. When it fails the
# script ends.
run() {
	show "$@"
	[[ -n $apply ]] || return 0
	carry_out "$@" || die "this failed: $(quoted "$@")" "what was done before it stays; put it right and run $me again"
}

# put PATH MODE makes standard input the content of a file, in one step.
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

# copy SOURCE PATH MODE puts a file in place, in one step: a program that runs
# keeps the one it has.
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

# drop PATH... removes files that are there.
drop() {
	local path
	for path; do
		if [[ -e $path || -L $path ]]; then
			run rm -f -- "$path"
		fi
	done
}

# directory PATH MODE makes one that is missing, or gives it its mode.
directory() {
	if [[ ! -d $1 || -L $1 ]]; then
		run install -d -m "$2" "$1"
	elif [[ $(stat -c %a "$1") != "${2#0}" ]]; then
		run chmod "$2" "$1"
	fi
}

# program NAME prints where one of AgentLab's own programs is. here is the
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
# subnet6, gateway6 (empty: no IPv6) and tailscale; without agentlabd they are
# those of an empty file.
# shellcheck disable=SC2034
settings() {
	local daemon text key val
	bridge=vmbr1 subnet=10.77.0.0/16 gateway=10.77.0.1/16 subnet6=fd77:a91a:4d00::/64 gateway6=fd77:a91a:4d00::1/64 tailscale=tailscale0
	daemon=$(program agentlabd) || return 0
	text=$("$daemon" network settings --system) || die "config.yaml cannot be read; the reason is above" "put it right: /etc/agentlab/config.yaml"
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

# These ask the kernel by netlink: /sys may be another network namespace's.
exists() { ip link show dev "$1" >/dev/null 2>&1; }
is_bridge() { [[ -n $(ip -o link show dev "$1" type bridge 2>/dev/null) ]]; }
# ports_of BRIDGE prints what is plugged into it, a name per line.
ports_of() { { ip -o link show master "$1" 2>/dev/null || true; } | sed 's/^[0-9]*: \([^:@]*\).*/\1/'; }

# finish WHAT prints the result.
finish() {
	if ((needed == 0)); then
		note "${1}: nothing to do"
	elif [[ -n $apply ]]; then
		note "${1}: done"
	else
		note "${1}: nothing was changed; this runs with: $0 ${remove:+--remove }--apply"
	fi
}
