#!/usr/bin/env bash
# Creates the template VM that sandboxes are cloned from: a cloud image with
# AgentLab's guest and the coding agents in it. Run it as root on a node of
# Proxmox VE. The image is changed on the host without starting a VM; clones
# download nothing.
#
#   create_template.sh            print the missing steps, change nothing
#   create_template.sh --apply    run these steps
#   create_template.sh --remove   print the steps of the removal; with --apply, run them
#
#   --image NAME      contents: agents (default), base without coding
#                     agents, or the name of the image of --recipe
#   --recipe FILE     a recipe of your own; see docs/images.md
#   --vmid VMID       VMID of the template (default: 9001 for agents, 9000 for base;
#                     required for others)
#   --distro NAME     ubuntu (24.04, default) or debian (12)
#   --storage NAME    storage of its disk and of linked clones (default: local-zfs,
#                     local-lvm or local, the first that exists)
#   --bridge NAME     bridge of its network device (default: the one in config.yaml)
#   --size GIB        size of its disk; clones can have a larger one (default: 10)
#   --from FILE       an existing cloud image, instead of a download
#   --sha256 SUM      SHA-256 of the cloud image; required with --from. The
#                     default for a download is the publisher's checksum, over HTTPS
#   --cache DIR       directory for downloads (default: /var/cache/agentlab)
#   --disk-only FILE  only create the disk, as a raw file, on any machine
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
*) [[ -n $vmid ]] || badusage "the template of $image requires --vmid VMID" ;;
esac
[[ $vmid =~ ^[1-9][0-9]{2,8}$ ]] || badusage "'$vmid' is not a VMID"
[[ $size =~ ^[1-9][0-9]{0,3}$ ]] || badusage "'$size' is not a size in GiB"
[[ -z $storage || $storage =~ ^[A-Za-z][A-Za-z0-9._-]*$ ]] || badusage "'$storage' is not a storage name"
[[ -z $bridges || $bridges =~ ^[A-Za-z][A-Za-z0-9._-]*$ ]] || badusage "'$bridges' is not a bridge name"
[[ -z $sum || $sum =~ ^[0-9a-f]{64}$ ]] || badusage "'$sum' is not a SHA-256 checksum"
[[ -z $from || $from == /* ]] || badusage "--from needs an absolute path"
[[ $cache == /* ]] || badusage "--cache needs an absolute path"
[[ -z $only || $only == /* ]] || badusage "--disk-only needs an absolute path"
[[ -z $only || -z $remove ]] || badusage "--remove cannot be used with --disk-only: delete the file instead"
[[ -z $from || -n $sum || -n $remove ]] || badusage "--from requires --sha256, the checksum from the image's publisher"
[[ $(uname -m) == x86_64 ]] || die "templates can be created only on x86_64"

# Download directories of the cloud images and their checksums.
case $distro in
ubuntu) suite=noble url=https://cloud-images.ubuntu.com/noble/current file=noble-server-cloudimg-amd64.img sums=SHA256SUMS tool=sha256sum ;;
debian) suite=bookworm url=https://cloud.debian.org/images/cloud/bookworm/latest file=debian-12-generic-amd64.qcow2 sums=SHA512SUMS tool=sha512sum ;;
*) badusage "unknown distribution '$distro' (ubuntu, debian)" ;;
esac
begin
settings
bridge=${bridges:-$bridge}

runner=$(program agent-runner) || die "agent-runner not found" "install AgentLab first (install_host.sh), or set its directory: AGENTLAB_BIN=DIR"
daemon=$(program agentlabd) || die "agentlabd not found" "install AgentLab first (install_host.sh), or set its directory: AGENTLAB_BIN=DIR"

# stage [DIR] prints the key of the template's contents, and writes the contents to DIR.
stage() { "$daemon" image stage ${recipe:+--recipe "$recipe"} --suite "$suite" --runner "$runner" "$image" "$@"; }

# The mark of a template of these parts: one word that no tool writes
# differently, in its description.
parts=$(stage) || die "cannot use the recipe of $image; see the error above"
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
		list=$(qm list) || die "cannot list virtual machines" "see: systemctl status pve-cluster"
		! awk -v id="$vmid" '$1 == id { found = 1 } END { exit !found }' <<<"$list" || die "VM $vmid exists, but its configuration cannot be read"
	}
}

if [[ -z $only ]]; then
	command -v qm >/dev/null || die "qm not found: this machine is not a node of Proxmox VE" "run the script as root on a node, or create only the disk: --disk-only FILE"
	[[ $EUID == 0 ]] || die "only root can read the virtual machines of Proxmox VE" "run the script with sudo; without --apply it changes nothing"
	look
	if [[ -n $config ]] && ! ours; then
		die "VM $vmid is not a template of AgentLab and is not changed" "choose another VMID: --vmid VMID"
	fi
fi

if [[ -n $remove ]]; then
	if [[ -n $config ]]; then
		run qm destroy "$vmid" --purge 1
		if [[ -n $apply ]]; then
			look
			[[ -z $config ]] || die "the template $vmid was not removed" "sandboxes that are linked clones of it require it; see: qm list"
		fi
	fi
	finish "template $vmid"
	exit
fi
if is_template; then
	if ! grep -q "^description: $mark\$" <<<"$config"; then
		note "template $vmid was created from different inputs; to create a new template, choose another --vmid (see --help)"
	fi
	finish "template $vmid"
	exit
fi
if [[ -n $config ]] && { ! grep -q '^scsi0: ' <<<"$config" || grep -q '^lock: ' <<<"$config"; }; then
	die "VM $vmid is an incomplete template" "remove it, then try again: $0 --vmid $vmid --remove --apply"
fi

if [[ -z $only && -z $config && -z $storage ]]; then
	status=$(pvesm status --content images) || die "cannot list storages"
	for name in local-zfs local-lvm local; do
		if awk -v s="$name" '$1 == s && $3 == "active" { found = 1 } END { exit !found }' <<<"$status"; then
			storage=$name
			break
		fi
	done
	[[ -n $storage ]] || die "none of the default storages allows disks" "choose a storage: --storage NAME"
fi

# verified FILE succeeds if the file has the required checksum.
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

# fetch sets $source to a cloud image with a verified checksum.
fetch() {
	if [[ -n $from ]]; then
		source=$from
		[[ -f $from ]] || die "$from does not exist"
		verified "$from" || die "$from does not have the SHA-256 checksum $sum" "the file is a different image or is damaged; nothing was created from it"
		return
	fi
	source=$cache/$file
	[[ -d $cache ]] || directory "$cache" 0700 # an existing directory keeps its mode
	if [[ -z $sum ]]; then
		run curl -fsSL --proto =https --proto-redir =https --retry 3 -o "$cache/$sums" "$url/$sums"
	fi
	if [[ -z $apply ]] || ! verified "$source"; then
		run curl -fsSL --proto =https --proto-redir =https --retry 3 -o "$source.part" "$url/$file"
		if [[ -n $apply ]] && ! verified "$source.part"; then
			rm -f "$source.part"
			die "the downloaded image does not have the publisher's checksum" "the publisher may be replacing the image; try again in a few minutes"
		fi
		run mv -f "$source.part" "$source"
	fi
}

# must COMMAND... runs a part of a step that was printed before.
must() { "$@" >&2 </dev/null || die "command failed: $(quoted "$@")"; }

# disk creates the raw file $1. The root file system is changed in a separate
# file, so that no loop device is needed, which a crash would leave behind.
disk() {
	local raw=$1 root=$work/root.img part start count
	run qemu-img convert -O raw "$source" "$raw"
	run qemu-img resize -q -f raw "$raw" "${size}G"
	show take "$root" "the root file system, as large as the disk has room"
	if [[ -n $apply ]]; then
		# The root is the largest partition, and the last on the disk.
		read -r part <<<"$(partx --show --bytes --noheadings --output SIZE,NR "$raw" | sort -n | awk 'END { print $2 }')"
		[[ -n $part ]] || die "$source has no partition"
		sfdisk --quiet --no-reread --no-tell-kernel -N "$part" "$raw" <<<', +' >&2 || die "cannot change the partition table of $source"
		read -r start count <<<"$(partx --show --noheadings --output START,SECTORS --nr "$part" "$raw")"
		must dd if="$raw" of="$root" bs=1M iflag=skip_bytes,count_bytes skip=$((start * 512)) count=$((count * 512)) conv=sparse status=none
		must truncate -s $((count * 512)) "$root"
		e2fsck -fp "$root" >&2 || (($? == 1)) || die "the root file system of $source is damaged" # 1: repaired
		must resize2fs "$root"
	fi
	# This also runs untrusted code. It ends with this script, and
	# only its printable output reaches the terminal.
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
		command -v "$name" >/dev/null || die "$name is not installed" "apt-get install curl qemu-utils fdisk util-linux e2fsprogs"
	done
	fetch
	show stage "$work"
	if [[ -n $apply ]]; then
		trap 'rm -rf "$work"' EXIT
		rm -rf "$work"
		[[ -d $cache ]] || install -d -m 0700 "$cache"
		mkdir -m 0700 "$work"
		stage "$work" >/dev/null || die "cannot prepare the files of the template; see the error above"
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
	# qm template also exits with 0 if its task has failed.
	look
	is_template || die "VM $vmid was not converted to a template; see the error above"
fi
finish "template $vmid"
[[ -z $apply ]] || note "set in config.yaml: proxmox.templates: $image: $vmid"
