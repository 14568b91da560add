#!/usr/bin/env bash
# Makes the template VM that sandboxes are cloned from: a cloud image with
# AgentLab's guest and the coding agents in it. Run it as root on a node of
# Proxmox VE. The image is changed on the host, without being started; clones
# download nothing.
#
#   create_template.sh            print what is missing, and change nothing
#   create_template.sh --apply    do it
#   create_template.sh --remove   remove the template (with --apply: really)
#
#   --image NAME      what is in it: agents (default), base without coding
#                     agents, or the name of the image of --recipe
#   --recipe FILE     a recipe of your own; see docs/images.md
#   --vmid VMID       of the template (default: 9001 for agents, 9000 for base;
#                     needed for others)
#   --distro NAME     ubuntu (24.04, default) or debian (12)
#   --storage NAME    of its disk, and of the linked clones (default: local-zfs,
#                     local-lvm or local, the first that is there)
#   --bridge NAME     (default: that of config.yaml)
#   --size GIB        of its disk, which clones may have larger (default: 10)
#   --from FILE       an existing cloud image, instead of a download
#   --sha256 SUM      SHA-256 of the cloud image; required with --from. The
#                     default for a download is its publisher's sum, over HTTPS
#   --cache DIR       where downloads are kept (default: /var/cache/agentlab)
#   --disk-only FILE  only make the disk, as a raw file, on any machine
#
# A template is never changed, because its clones use its disk. To update it,
# create one with another --vmid, set that in config.yaml (proxmox.templates), and
# remove the old one after its last sandbox was deleted.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=scripts/lib.sh
. "$here/lib.sh"

image=agents recipe='' vmid='' distro=ubuntu storage='' bridges='' size=10 from='' sum='' cache=/var/cache/agentlab only=''
while (($#)); do
	case $1 in
	--image | --recipe | --vmid | --distro | --storage | --bridge | --size | --from | --sha256 | --cache | --disk-only)
		value "$1" $#
		case $1 in
		--image) image=$2 ;;
		--recipe) recipe=$2 ;;
		--vmid) vmid=$2 ;;
		--distro) distro=$2 ;;
		--storage) storage=$2 ;;
		--bridge) bridges=$2 ;;
		--size) size=$2 ;;
		--from) from=$2 ;;
		--sha256) sum=${2,,} ;;
		--cache) cache=$2 ;;
		--disk-only) only=$2 ;;
		esac
		shift
		;;
	*) common "$1" || badusage "unknown argument $1" ;;
	esac
	shift
done
case $image in
agents) : "${vmid:=9001}" ;;
base) : "${vmid:=9000}" ;;
*) [[ -n $vmid ]] || badusage "the template of $image needs a number: --vmid VMID" ;;
esac
[[ $vmid =~ ^[1-9][0-9]{2,8}$ ]] || badusage "'$vmid' is no VMID"
[[ $size =~ ^[1-9][0-9]{0,3}$ ]] || badusage "'$size' is no size in GiB"
[[ -z $storage || $storage =~ ^[A-Za-z][A-Za-z0-9._-]*$ ]] || badusage "'$storage' is no name of a storage"
[[ -z $bridges || $bridges =~ ^[A-Za-z][A-Za-z0-9._-]*$ ]] || badusage "'$bridges' is no name of a bridge"
[[ -z $sum || $sum =~ ^[0-9a-f]{64}$ ]] || badusage "'$sum' is no SHA-256 sum"
[[ -z $from || $from == /* ]] || badusage "--from needs an absolute path"
[[ $cache == /* ]] || badusage "--cache needs an absolute path"
[[ -z $only || $only == /* ]] || badusage "--disk-only needs an absolute path"
[[ -z $only || -z $remove ]] || badusage "--disk-only makes a file; remove it as one"
[[ -z $from || -n $sum || -n $remove ]] || badusage "--from needs --sha256, which its publisher tells"
[[ $(uname -m) == x86_64 ]] || die "templates are made on x86_64 only"

# Where the cloud images are, and the list of their sums.
case $distro in
ubuntu) suite=noble url=https://cloud-images.ubuntu.com/noble/current file=noble-server-cloudimg-amd64.img sums=SHA256SUMS tool=sha256sum ;;
debian) suite=bookworm url=https://cloud.debian.org/images/cloud/bookworm/latest file=debian-12-generic-amd64.qcow2 sums=SHA512SUMS tool=sha512sum ;;
*) badusage "there is no distribution '$distro' here" ;;
esac
begin
settings
bridge=${bridges:-$bridge}

runner=$(program agent-runner) || die "agent-runner is not here" "install AgentLab first (install_host.sh), or name its directory: AGENTLAB_BIN=DIR"
daemon=$(program agentlabd) || die "agentlabd is not here" "install AgentLab first (install_host.sh), or name its directory: AGENTLAB_BIN=DIR"

# stage [DIR] prints the key of what the template gets, and writes it to DIR.
stage() { "$daemon" image stage ${recipe:+--recipe "$recipe"} --suite "$suite" --runner "$runner" "$image" "$@"; }

# The mark of a template of these parts: one word that no tool writes
# differently, in its description.
parts=$(stage) || die "the recipe of $image cannot be used; the reason is above"
key=$({
	printf '%s\n' 2 "$distro" "$image" "$size" "$sum" "$parts"
	cat "$runner"
} | sha256sum)
key=${key:0:16}
mark=agentlab-template-$image-$distro-$key

config='' # of the VM that has the VMID
ours() { grep -q '^description: agentlab-template-[a-z0-9-]*$' <<<"$config"; }
is_template() { grep -q '^template: 1$' <<<"$config"; }
look() {
	config=$(qm config "$vmid" 2>/dev/null) || {
		# Unknown is not absent.
		config=
		local list
		list=$(qm list) || die "the virtual machines cannot be listed" "see: systemctl status pve-cluster"
		! awk -v id="$vmid" '$1 == id { found = 1 } END { exit !found }' <<<"$list" || die "VM $vmid is there, but its configuration cannot be read"
	}
}

if [[ -z $only ]]; then
	command -v qm >/dev/null || die "qm is not here: this is no node of Proxmox VE" "run it as root on a node, or make the disk alone: --disk-only FILE"
	[[ $EUID == 0 ]] || die "the virtual machines of Proxmox VE are root's to read" "run it with sudo; without --apply it changes nothing"
	look
	if [[ -n $config ]] && ! ours; then
		die "VM $vmid is not a template of AgentLab, so it is left alone" "take another number: --vmid VMID"
	fi
fi

if [[ -n $remove ]]; then
	if [[ -n $config ]]; then
		run qm destroy "$vmid" --purge 1
		if [[ -n $apply ]]; then
			look
			[[ -z $config ]] || die "the template $vmid is still there" "sandboxes that are cloned from it need it; see: qm list"
		fi
	fi
	finish "template $vmid"
	exit
fi
if is_template; then
	if ! grep -q "^description: $mark\$" <<<"$config"; then
		note "template $vmid is made of other parts than those here; for a new one take another --vmid (see --help)"
	fi
	finish "template $vmid"
	exit
fi
if [[ -n $config ]] && { ! grep -q '^scsi0: ' <<<"$config" || grep -q '^lock: ' <<<"$config"; }; then
	die "VM $vmid is a template that was not finished" "remove it, then try again: $0 --vmid $vmid --remove --apply"
fi

if [[ -z $only && -z $config && -z $storage ]]; then
	status=$(pvesm status --content images) || die "the storages cannot be listed"
	for name in local-zfs local-lvm local; do
		if awk -v s="$name" '$1 == s && $3 == "active" { found = 1 } END { exit !found }' <<<"$status"; then
			storage=$name
			break
		fi
	done
	[[ -n $storage ]] || die "none of the usual storages can hold disks" "name one: --storage NAME"
fi

# verified FILE: it has the sum that it must have.
verified() {
	local want=$sum with=sha256sum
	[[ -f $1 ]] || return 1
	if [[ -z $want ]]; then
		with=$tool
		[[ -f $cache/$sums ]] || return 1
		want=$(sed -n "s/^\([0-9a-f]*\) [ *]$file\$/\1/p" "$cache/$sums" | head -n 1)
		[[ -n $want ]] || return 1
	fi
	[[ $("$with" <"$1" | cut -d ' ' -f 1) == "$want" ]]
}

# fetch makes $source a cloud image whose sum was checked.
fetch() {
	if [[ -n $from ]]; then
		source=$from
		[[ -f $from ]] || die "$from is not there"
		verified "$from" || die "$from does not have the SHA-256 sum $sum" "it is another image, or was damaged; nothing was made of it"
		return
	fi
	source=$cache/$file
	[[ -d $cache ]] || directory "$cache" 0700 # of one that is there the mode is its maker's
	if [[ -z $sum ]]; then
		run curl -fsSL --proto =https --proto-redir =https --retry 3 -o "$cache/$sums" "$url/$sums"
	fi
	if [[ -z $apply ]] || ! verified "$source"; then
		run curl -fsSL --proto =https --proto-redir =https --retry 3 -o "$source.part" "$url/$file"
		if [[ -n $apply ]] && ! verified "$source.part"; then
			rm -f "$source.part"
			die "what was downloaded does not have its publisher's sum" "the image may just have been replaced there; try again in some minutes"
		fi
		run mv -f "$source.part" "$source"
	fi
}

# must COMMAND... runs a part of a step that was shown.
must() { "$@" >&2 </dev/null || die "this failed: $(quoted "$@")"; }

# disk makes the raw file $1. The root file system is worked on in a file of
# its own, so that nothing has to be attached that a crash would leave.
disk() {
	local raw=$1 root=$work/root.img part start count
	run qemu-img convert -O raw "$source" "$raw"
	run qemu-img resize -q -f raw "$raw" "${size}G"
	show take "$root" "the root file system, as large as the disk has room"
	if [[ -n $apply ]]; then
		# The root is the largest partition, and the last on the disk.
		read -r part <<<"$(partx --show --bytes --noheadings --output SIZE,NR "$raw" | sort -n | awk 'END { print $2 }')"
		[[ -n $part ]] || die "$source has no partition"
		sfdisk --quiet --no-reread --no-tell-kernel -N "$part" "$raw" <<<', +' >&2 || die "the partition table of $source cannot be changed"
		read -r start count <<<"$(partx --show --noheadings --output START,SECTORS --nr "$part" "$raw")"
		must dd if="$raw" of="$root" bs=1M iflag=skip_bytes,count_bytes skip=$((start * 512)) count=$((count * 512)) conv=sparse status=none
		must truncate -s $((count * 512)) "$root"
		e2fsck -fp "$root" >&2 || (($? == 1)) || die "the root file system of $source is damaged" # 1: mended
		must resize2fs "$root"
	fi
	# This also runs code that is not trusted. It ends with this script, and
	# only text of it reaches the terminal.
	run setpriv --pdeathsig KILL unshare --mount --propagation private --pid --fork --kill-child -- sh "$work/cloud.sh" "$root" "$work" 2> >(tr -cd '\11\12\40-\176' >&2 9>&-)
	wait $!
	run e2fsck -fn "$root"
	show give "$root" back
	if [[ -n $apply ]]; then
		must fallocate --punch-hole --offset $((start * 512)) --length $((count * 512)) "$raw"
		must dd if="$root" of="$raw" bs=1M oflag=seek_bytes seek=$((start * 512)) conv=sparse,notrunc status=none
		rm -f "$root"
	fi
}

work=$cache/template-$vmid
if [[ -z $config ]]; then
	for name in curl qemu-img sfdisk partx unshare setpriv e2fsck resize2fs fallocate fstrim; do
		command -v "$name" >/dev/null || die "$name is not on this machine" "apt-get install curl qemu-utils fdisk util-linux e2fsprogs"
	done
	fetch
	show stage "$work"
	if [[ -n $apply ]]; then
		trap 'rm -rf "$work"' EXIT
		rm -rf "$work"
		[[ -d $cache ]] || install -d -m 0700 "$cache"
		mkdir -m 0700 "$work"
		stage "$work" >/dev/null || die "the files of the template cannot be prepared; the reason is above"
	fi
	disk "$work/disk.raw"
fi
if [[ -n $only ]]; then
	run mv -f "$work/disk.raw" "$only"
	finish "disk $only"
	exit
fi
if [[ -z $config ]]; then
	run qm create "$vmid" --name "agentlab-template-$image" --description "$mark" --tags agentlab-template --ostype l26 \
		--cpu host --cores 2 --memory 2048 --scsihw virtio-scsi-single --net0 "virtio,bridge=$bridge" \
		--scsi0 "$storage:0,import-from=$work/disk.raw,discard=on" --ide2 "$storage:cloudinit" --boot order=scsi0 --agent enabled=1
fi
run qm template "$vmid"
if [[ -n $apply ]]; then
	# Proxmox: qm template exits 0 when its task has failed.
	look
	is_template || die "VM $vmid did not become a template; the reason is above"
fi
finish "template $vmid"
[[ -z $apply ]] || note "for config.yaml: proxmox.templates: $image: $vmid"
