#!/bin/sh
# Makes a system with systemd and cloud-init a template of AgentLab sandboxes.
# Runs inside it (in a chroot), as root, without need of a network; running it
# again does no harm. The packages cloud-init, qemu-guest-agent, growpart,
# openssh-server, sudo and git are there already, and so are the files that go
# beside this script and /usr/local/bin/agent-runner.
set -eu

# The agent: no password ("*" matches none, and unlike "!" does not lock the
# account for sshd), sudo for all.
if ! id agent >/dev/null 2>&1; then
    if id 1000 >/dev/null 2>&1; then
        useradd --create-home --user-group --shell /bin/bash agent
    else
        useradd --create-home --uid 1000 --user-group --shell /bin/bash agent
    fi
fi
usermod --password '*' agent
usermod --password '*' root
mkdir -p /work /etc/agentlab
chown agent:agent /work
chmod 0440 /etc/sudoers.d/agentlab
ln -sfn agent-runner /usr/local/bin/agentlab-agent
ln -sfn /run/agentlab/bootstrap.json /etc/agentlab/bootstrap.json

mask() {
    for unit in "$@"; do
        ln -sfn /dev/null "/etc/systemd/system/$unit"
    done
}
# Nothing may change a sandbox behind its agent's back, or fetch anything
# before the agent does.
mask apt-daily.service apt-daily.timer apt-daily-upgrade.service apt-daily-upgrade.timer \
    unattended-upgrades.service motd-news.service motd-news.timer snapd.service snapd.socket snapd.seeded.service \
    fwupd-refresh.timer e2scrub_all.timer e2scrub_reap.service dpkg-db-backup.timer ua-timer.timer ua-reboot-cmds.service man-db.timer \
    ubuntu-advantage.service apport.service apport-autoreport.path apport-autoreport.timer pollinate.service \
    update-notifier-download.timer update-notifier-motd.timer systemd-tmpfiles-clean.timer
# The controller's network has no time server: the clock comes with the identity.
mask systemd-timesyncd.service chrony.service chronyd.service
# Boots are short. Nothing waits for a network: the seed's addresses are static
# or come when they come. Nobody has a password to log in with at a console.
# The disk is a fresh copy, or has a journal. Modules are loaded when they are
# used.
mask systemd-networkd-wait-online.service systemd-fsck-root.service systemd-random-seed.service systemd-pstore.service \
    getty@.service serial-getty@.service console-getty.service systemd-ask-password-console.path systemd-ask-password-wall.path \
    modprobe@.service sys-fs-fuse-connections.mount sys-kernel-config.mount sys-kernel-debug.mount sys-kernel-tracing.mount \
    systemd-binfmt.service systemd-journal-flush.service systemd-journal-catalog-update.service systemd-hwdb-update.service \
    systemd-update-utmp.service systemd-update-utmp-runlevel.service systemd-initctl.socket \
    console-setup.service keyboard-setup.service setvtrgb.service plymouth-start.service plymouth-read-write.service \
    plymouth-quit.service plymouth-quit-wait.service \
    multipathd.service multipathd.socket iscsid.socket open-iscsi.service lvm2-monitor.service ModemManager.service udisks2.service \
    cloud-init-hotplugd.socket
# Of cloud-init's stages the two last have nothing to do (99_agentlab.cfg); the
# very last tells that it is done. Where one process runs them all, each must
# come.
if [ ! -e /usr/lib/systemd/system/cloud-init-main.service ] && [ ! -e /lib/systemd/system/cloud-init-main.service ]; then
    mask cloud-config.service
fi
# The boot loader has nothing to ask.
if [ -f /boot/grub/grub.cfg ]; then
    sed -i 's/^\( *set timeout=\)[1-9][0-9]*$/\10/' /boot/grub/grub.cfg
fi
if [ -d /etc/default/grub.d ]; then
    printf 'GRUB_TIMEOUT=0\nGRUB_RECORDFAIL_TIMEOUT=0\n' >/etc/default/grub.d/99-agentlab.cfg
fi

systemctl enable agentlab-guest.path >/dev/null 2>&1
# sshd starts when somebody wants it, after agent-runner has made the host key.
systemctl disable ssh.service ssh.socket >/dev/null 2>&1 || true
