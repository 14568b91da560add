#!/usr/bin/env bash
# Installs AgentLab for the whole machine: group, directories, programs, units,
# profiles and the skill for coding agents. If newer programs are beside the script,
# it upgrades: VMs continue to run, and if the new daemon does not answer, the old
# programs are restored.
#
#   install_host.sh                print the missing steps, change nothing
#   install_host.sh --apply        run these steps and start the daemon
#   install_host.sh --remove       print the steps that remove programs and units;
#                                  with --apply, run them. Configuration and state stay
#   install_host.sh --remove --purge     also remove both: jobs, artifacts and secrets
#                                        are lost
#
#   --bin DIR          directory with agentlab, agentlabd and agent-runner (default:
#                      bin beside this directory)
#   --skill-for USER   also install the skill for Claude Code of this user
#   --no-start         do not enable or start services
#   --force            remove although sandboxes exist, which are then no longer
#                      managed
#
# To let a user use the daemon without root: usermod -aG agentlab USER
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=scripts/lib.sh
. "$here/lib.sh"

programs=(agentlab agentlabd agent-runner)
bin=/usr/local/bin
share=/usr/local/share/agentlab
units=/etc/systemd/system
previous=/usr/local/lib/agentlab/previous
socket=/run/agentlab/agentlabd.sock

from=${AGENTLAB_BIN:-$here/../bin} people=() start=yes purge='' force=''
while (($#)); do
	case $1 in
	--bin | --skill-for)
		value "$1" $#
		if [[ $1 == --bin ]]; then from=$2; else people+=("$2"); fi
		shift
		;;
	--no-start) start= ;;
	--purge) purge=yes ;;
	--force) force=yes ;;
	*) common "$1" || badusage "unknown argument $1" ;;
	esac
	shift
done
[[ -z $purge$force || -n $remove ]] || badusage "--purge and --force require --remove"
begin
[[ -d /run/systemd/system ]] || start=

# A node of Proxmox VE.
proxmox() { [[ -d /etc/pve && -x /usr/bin/pvesh ]]; }
bridged() { proxmox || grep -Eqs '^backend: *proxmox *$' /etc/agentlab/config.yaml; }
answers() { "$bin/agentlab" --socket "$socket" daemon status >/dev/null 2>&1; }
home() { getent passwd "$1" | cut -d: -f6; }

# conf SOURCE PATH installs a file that users may change: it is replaced only
# if it is unchanged since its installation.
conf() {
	local pristine=$share/pristine${2}
	if [[ ! -e $2 ]] || cmp -s "$pristine" "$2"; then
		copy "$1" "$2" 0644
	elif ! cmp -s "$1" "$2" && ! cmp -s "$1" "$pristine"; then
		note "$2 has local changes and is not replaced; the new version is $pristine"
	fi
	copy "$1" "$pristine" 0644
}

# mode_of FILE prints the mode of an installed file: scripts are executable.
mode_of() { [[ $1 == *.sh ]] && echo 0755 || echo 0644; }

unit() { # NAME
	put "$units/$1" 0644 <"$here/systemd/$1"
}

skill_of() { # USER: as that user, so that a link in the home leads nowhere else
	local dir
	dir=$(home "$1")/.claude/skills/agentlab
	if ! runuser -u "$1" -- cmp -s "$share/skills/agentlab/SKILL.md" "$dir/SKILL.md"; then
		run runuser -u "$1" -- install -D -m 0644 "$share/skills/agentlab/SKILL.md" "$dir/SKILL.md"
	fi
}

files() {
	local file name
	getent group agentlab >/dev/null || run groupadd --system agentlab
	directory /etc/agentlab 0755
	directory /etc/agentlab/profiles 0755
	directory /etc/agentlab/secrets 0700
	for file in /var/lib/agentlab /var/cache/agentlab /var/log/agentlab; do
		directory "$file" 0700
	done
	if proxmox; then
		# Snippets contain the cloud-init data of sandboxes. The daemon can
		# write there only if the directory existed before the daemon started.
		[[ ! -d /var/lib/vz ]] || directory /var/lib/vz/snippets 0755
		if [[ ! -e /etc/agentlab/config.yaml ]]; then
			put /etc/agentlab/config.yaml 0644 <<-TEXT
				# docs/config.md documents all keys.
				backend: proxmox
			TEXT
		fi
	fi
	for file in "$here"/*.sh "$here"/net/* "$here"/systemd/*; do
		name=${file#"$here"/}
		case $name in deps.sh | demo.sh | fuzz.sh | mutation.sh | embed.go) continue ;; esac
		copy "$file" "$share/scripts/$name" "$(mode_of "$file")"
	done
	while IFS= read -r file; do
		copy "$file" "$share/${file#"$here/../"}" "$(mode_of "$file")"
	done < <(find "$here/../images" "$here/../skills" -type f ! -name '*.go' | sort)
	for file in "$here"/../profiles/*.yaml; do
		conf "$file" "/etc/agentlab/profiles/${file##*/}"
	done
	for name in ${people[@]+"${people[@]}"}; do
		[[ -n $(home "$name") ]] || die "user $name does not exist"
		skill_of "$name"
	done
}

# upgraded is yes if existing programs were replaced.
upgraded=
binaries() {
	local name
	[[ ! -d $from ]] || from=$(cd "$from" && pwd)
	for name in "${programs[@]}"; do
		[[ -f $from/$name && -x $from/$name ]] || die "$from/$name does not exist" "build it (make build), or set its directory: --bin DIR"
		[[ $(cd "$from" && pwd -P) != "$(cd "$bin" && pwd -P)" ]] || return 0
	done
	for name in "${programs[@]}"; do
		if [[ -f $bin/$name ]] && ! cmp -s "$from/$name" "$bin/$name"; then
			upgraded=yes
		fi
	done
	for name in "${programs[@]}"; do
		if [[ -n $upgraded && -f $bin/$name ]]; then
			copy "$bin/$name" "$previous/$name" 0755
		fi
		copy "$from/$name" "$bin/$name" 0755
	done
	[[ $(readlink "$bin/git-remote-agentlab") == agentlab ]] || run ln -sfn agentlab "$bin/git-remote-agentlab"
}

# back restores the previous programs.
back() {
	local name
	for name in "${programs[@]}"; do
		if [[ -f $previous/$name ]]; then copy "$previous/$name" "$bin/$name" 0755; fi
	done
	carry_out systemctl restart agentlabd.service || true
}

services() {
	local before=$needed
	unit agentlabd.service
	if bridged; then unit agentlab-network.service; fi
	[[ -n $start ]] || return 0
	((needed == before)) || run systemctl daemon-reload
	if bridged; then
		systemctl is-enabled -q agentlab-network.service 2>/dev/null || run systemctl enable agentlab-network.service
	fi
	systemctl is-enabled -q agentlabd.service 2>/dev/null || run systemctl enable agentlabd.service
	if [[ -n $upgraded ]] || ((needed > before)) || ! systemctl is-active -q agentlabd.service; then
		show systemctl restart agentlabd.service
		[[ -n $apply ]] || return 0
		# systemctl start returns when the daemon answers.
		if carry_out systemctl restart agentlabd.service && answers; then
			return
		fi
		systemctl status --no-pager --lines=20 agentlabd.service >&2 || true
		[[ -n $upgraded ]] || die "the daemon does not start; its last messages are above" "fix the reported error, then run: systemctl restart agentlabd"
		back
		die "the new daemon does not start, so the old programs were restored; its last messages are above" "running VMs were not affected"
	fi
}

uninstall() {
	local name file
	if [[ -z $force && -x $bin/agentlab ]] && answers && [[ -n $("$bin/agentlab" --socket "$socket" sandbox list 2>/dev/null | sed 1d) ]]; then
		die "sandboxes exist, which would no longer be managed" "run agentlab sandbox list and agentlab sandbox destroy NAME, or use --force"
	fi
	for name in agentlabd.service agentlab-network.service; do
		if [[ -f $units/$name && -d /run/systemd/system ]]; then
			run systemctl disable --now "$name"
		fi
		drop "$units/$name"
	done
	[[ ! -d /run/systemd/system || $needed == 0 ]] || run systemctl daemon-reload
	if [[ -z $purge ]]; then
		note "kept: /etc/agentlab, /var/lib/agentlab, /var/cache/agentlab, /var/log/agentlab, the group agentlab; --purge removes them"
	fi
	if command -v nft >/dev/null && nft list table inet agentlab >/dev/null 2>&1; then
		note "the firewall of the bridge remains active until the next boot; to remove it, run this before removing agentlabd: net/apply.sh --remove --apply"
	fi
	for name in "${programs[@]}" git-remote-agentlab; do drop "$bin/$name"; done
	for file in "$share" "${previous%/*}"; do
		[[ ! -e $file ]] || run rm -rf --one-file-system -- "$file"
	done
	for name in ${people[@]+"${people[@]}"}; do
		if runuser -u "$name" -- test -e "$(home "$name")/.claude/skills/agentlab"; then
			run runuser -u "$name" -- rm -rf -- "$(home "$name")/.claude/skills/agentlab"
		fi
	done
	[[ -n $purge ]] || return 0
	for file in /etc/agentlab /var/lib/agentlab /var/cache/agentlab /var/log/agentlab /run/agentlab; do
		[[ ! -e $file ]] || run rm -rf --one-file-system -- "$file"
	done
	! getent group agentlab >/dev/null || run groupdel agentlab
}

if [[ -n $remove ]]; then
	uninstall
	finish "AgentLab of this machine"
	exit
fi
binaries
files
services
finish "AgentLab of this machine"
if proxmox && [[ -n $apply ]]; then
	note "next: agentlab init"
fi
