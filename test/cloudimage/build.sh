#!/bin/sh
# Turns a tree that mmdebstrap made into that of a cloud image as its publisher
# has it. Runs as root in namespaces of its own.
#
#   build.sh TREE
#
# Leaves the boot loader's parts in TREE/boot/grub: boot.img for the first
# sector, core.img for what lies behind.
set -eu
tree=$1

printf 'LABEL=agentlab-root / ext4 defaults,noatime 0 0\n' >"$tree/etc/fstab"
printf '127.0.0.1 localhost\n' >"$tree/etc/hosts"
rm -f "$tree/etc/resolv.conf"
ln -s ../run/systemd/resolve/resolv.conf "$tree/etc/resolv.conf"

mount --bind "$tree" "$tree"
mount -t proc proc "$tree/proc"
mount -t tmpfs -o mode=0755 tmpfs "$tree/run"
mount -t devtmpfs dev "$tree/dev" 2>/dev/null || mount --bind /dev "$tree/dev"

inside() { env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C.UTF-8 SYSTEMD_OFFLINE=1 DEBIAN_FRONTEND=noninteractive chroot "$tree" "$@"; }

# A small initramfs: firmware reads it byte by byte through an emulated CPU.
printf 'MODULES=list\nCOMPRESS=zstd\n' >"$tree/etc/initramfs-tools/conf.d/agentlab"
printf '%s\n' virtio_pci virtio_scsi virtio_blk sd_mod >"$tree/etc/initramfs-tools/modules"
inside update-initramfs -u -k all
rm -f "$tree"/*.old
mkdir -p "$tree/boot/grub"
cat >"$tree/boot/grub/grub.cfg" <<'END'
set timeout=0
serial --unit=0 --speed=115200
terminal_output console serial
linux /vmlinuz root=LABEL=agentlab-root ro console=tty0 console=ttyS0,115200 net.ifnames=0 quiet no_timer_check mitigations=off norandmaps audit=0
initrd /initrd.img
boot
END
inside grub-mkimage -O i386-pc -o /boot/grub/core.img -p '(,msdos1)/boot/grub' \
    biosdisk part_msdos ext2 linux normal configfile serial terminal echo
cp "$tree/usr/lib/grub/i386-pc/boot.img" "$tree/boot/grub/boot.img"
inside systemctl enable systemd-networkd.service systemd-resolved.service
