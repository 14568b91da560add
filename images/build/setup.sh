#!/bin/sh
# Sets up users, links and services in an image. Runs inside its tree as root,
# without a network; /run/build has what finish.sh brought.
#
#   setup.sh direct|cloud
set -eu
kind=$1

if [ "$kind" = direct ]; then # nothing of the host's configuration stays
    rm -rf /etc/apt/apt.conf.d/99mmdebstrap /etc/dpkg/dpkg.cfg.d/99mmdebstrap /etc/apt/sources.list /etc/apt/sources.list.d
fi
# A file that is a symlink in the tree (resolv.conf) is replaced, not followed.
cp -R --preserve=mode --no-preserve=ownership --remove-destination /run/build/files/. /
chmod 0755 /
if [ -d /run/build/npm ]; then
    cp -R --preserve=mode,links --no-preserve=ownership /run/build/npm/. /usr/local/
    chmod -R u+rwX,go+rX /usr/local # npm made them with the user's umask
fi
# npm leaves a link to the package of Node.js. The program must be a file in
# bin: npm installs global packages next to the program that it runs on.
for node in /usr/local/lib/node_modules/node-linux-*; do
    [ -d "$node" ] || continue
    mkdir -p /usr/local/share/doc/nodejs
    [ ! -f "$node/LICENSE" ] || mv "$node/LICENSE" /usr/local/share/doc/nodejs/
    mv -f "$node/bin/node" /usr/local/bin/node
    rm -rf "$node"
done
if [ -d /run/build/go ]; then
    cp -R --preserve=mode --no-preserve=ownership /run/build/go /usr/local/go
    ln -s ../go/bin/go ../go/bin/gofmt /usr/local/bin/
fi
if [ -d /run/build/gobin ]; then
    install -m 0755 -t /usr/local/bin /run/build/gobin/*
fi

# The agent: no password ("*" matches none, and unlike "!" does not lock the
# account for sshd), sudo for all.
if ! id agent >/dev/null 2>&1; then
    uid='--uid 1000'
    ! id 1000 >/dev/null 2>&1 || uid=
    # shellcheck disable=SC2086 # an option and its value
    useradd --create-home $uid --user-group agent
fi
shell=$(cat /run/build/shell)
if [ ! -x "$shell" ]; then
    echo "E: the shell $shell of the recipe is not in the image" >&2
    exit 1
fi
usermod --shell "$shell" agent
usermod --password '*' agent
# /dev/kvm, in sandboxes whose CPUs have virtualization.
getent group kvm >/dev/null || groupadd --system kvm
usermod --append --groups kvm agent
usermod --password '*' root
mkdir -p /work /etc/agentlab
chown agent:agent /work
ln -sfn /run/agentlab/bootstrap.json /etc/agentlab/bootstrap.json

# The recipe's own files. Directories of agent's files are agent's.
while read -r name mode owner path; do
    [ "$owner" = root ] || setpriv --reuid="$owner" --regid="$owner" --clear-groups mkdir -p "${path%/*}"
    install -D -T -m "$mode" -o "$owner" -g "$owner" "/run/build/extra/$name" "$path"
done </run/build/extra.list

mask() {
    for unit in "$@"; do
        ln -sfn /dev/null "/etc/systemd/system/$unit"
    done
}
# No unit may change the sandbox or download anything on its own. Units that
# boots do not need cost time: the disk is a new copy or has a journal, modules
# are loaded when they are used, and no account has a password for a login at a
# console. The clock comes with the identity.
mask apt-daily.service apt-daily.timer apt-daily-upgrade.service apt-daily-upgrade.timer \
    dpkg-db-backup.timer e2scrub_all.timer e2scrub_reap.service motd-news.timer \
    getty@.service serial-getty@.service console-getty.service \
    systemd-ask-password-console.path systemd-ask-password-wall.path \
    systemd-binfmt.service systemd-fsck-root.service systemd-random-seed.service systemd-pstore.service \
    systemd-journal-flush.service systemd-journal-catalog-update.service systemd-hwdb-update.service \
    systemd-update-utmp.service systemd-update-utmp-runlevel.service systemd-initctl.socket \
    systemd-timesyncd.service systemd-tmpfiles-clean.timer \
    sys-kernel-config.mount sys-kernel-debug.mount sys-kernel-tracing.mount sys-fs-fuse-connections.mount modprobe@.service

direct() {
    for release in /usr/lib/modules/*; do
        depmod "${release##*/}"
    done

    # Before systemd starts, agent-runner mounts file systems, sets the host
    # name, the clock and the entropy, and configures the network. There is no
    # device to wait for, and the disk is deleted with the sandbox.
    mask fstrim.timer container-getty@.service getty.target \
        proc-sys-fs-binfmt_misc.automount proc-sys-fs-binfmt_misc.mount \
        systemd-remount-fs.service systemd-growfs-root.service \
        systemd-firstboot.service systemd-machine-id-commit.service systemd-sysusers.service \
        systemd-update-done.service systemd-user-sessions.service systemd-modules-load.service \
        systemd-boot-system-token.service systemd-pcrphase.service systemd-pcrphase-initrd.service systemd-pcrphase-sysinit.service \
        systemd-udevd.service systemd-udevd-control.socket systemd-udevd-kernel.socket systemd-udev-trigger.service \
        systemd-networkd.service systemd-networkd.socket systemd-resolved.service networking.service \
        ldconfig.service dev-hugepages.mount dev-mqueue.mount tmp.mount \
        sshd-keygen.service ssh.socket systemd-logind.service

    # Each boot would run all generators, and none has anything to generate.
    mkdir -p /etc/systemd/system-generators
    for generator in /usr/lib/systemd/system-generators/* /lib/systemd/system-generators/*; do
        [ -e "$generator" ] || continue
        ln -sfn /dev/null "/etc/systemd/system-generators/${generator##*/}"
    done

    # systemd creates /run/nologin, and systemd-user-sessions is masked.
    ln -sfn /dev/null /etc/tmpfiles.d/systemd-nologin.conf

    systemctl disable agent-runner.service agent-secrets-cleanup.service >/dev/null 2>&1 || true
    systemctl set-default multi-user.target >/dev/null 2>&1

    # Logins run no scripts for a message of the day.
    rm -f /etc/update-motd.d/* /etc/motd
    : >/etc/motd
}

cloud() {
    mask unattended-upgrades.service motd-news.service snapd.service snapd.socket snapd.seeded.service \
        fwupd-refresh.timer ua-timer.timer ua-reboot-cmds.service man-db.timer \
        ubuntu-advantage.service apport.service apport-autoreport.path apport-autoreport.timer pollinate.service \
        update-notifier-download.timer update-notifier-motd.timer chrony.service chronyd.service
    # The boot does not wait for a network: the addresses are in the seed.
    mask systemd-networkd-wait-online.service \
        console-setup.service keyboard-setup.service setvtrgb.service plymouth-start.service plymouth-read-write.service \
        plymouth-quit.service plymouth-quit-wait.service \
        multipathd.service multipathd.socket iscsid.socket open-iscsi.service lvm2-monitor.service ModemManager.service udisks2.service \
        cloud-init-hotplugd.socket
    # The last two stages of cloud-init have nothing to do (99_agentlab.cfg),
    # but the last one reports that cloud-init is done. Where one process runs
    # all stages, all must run.
    if [ ! -e /usr/lib/systemd/system/cloud-init-main.service ] && [ ! -e /lib/systemd/system/cloud-init-main.service ]; then
        mask cloud-config.service
    fi
    # The boot loader does not wait for input.
    if [ -f /boot/grub/grub.cfg ]; then
        sed -i 's/^\( *set timeout=\)[1-9][0-9]*$/\10/' /boot/grub/grub.cfg
    fi
    if [ -d /etc/default/grub.d ]; then
        printf 'GRUB_TIMEOUT=0\nGRUB_RECORDFAIL_TIMEOUT=0\n' >/etc/default/grub.d/99-agentlab.cfg
    fi
    systemctl enable agentlab-guest.path >/dev/null 2>&1
}
"$kind"

# sshd starts when a user needs it, after agent-runner has made the host keys.
systemctl disable ssh.service ssh.socket >/dev/null 2>&1 || true

# Docker starts at the first connection to its socket, to which agent may
# connect.
if [ -e /lib/systemd/system/docker.socket ]; then
    usermod --append --groups docker agent
    systemctl disable docker.service containerd.service >/dev/null 2>&1
    systemctl enable docker.socket >/dev/null 2>&1
fi
