#!/bin/sh
# Runs inside a fresh image, as root and without need of a network: users,
# links, and what systemd starts.
set -eu

# The agent: no password ("*" matches none, and unlike "!" does not lock the
# account for sshd), sudo for all.
useradd --create-home --uid 1000 --user-group --shell /bin/bash agent
usermod --password '*' agent
usermod --password '*' root
mkdir /work
chown agent:agent /work

# agent-runner comes with the initrd of each boot, so that an upgrade of the
# host needs no new image.
ln -sf /run/agentlab/bin/agent-runner /usr/local/bin/agent-runner
ln -sf /run/agentlab/bin/agentlab-agent /usr/local/bin/agentlab-agent
mkdir /etc/agentlab
ln -sf /run/agentlab/bootstrap.json /etc/agentlab/bootstrap.json

# Identity is given after boot, never baked in.
rm -f /etc/ssh/ssh_host_*_key /etc/ssh/ssh_host_*_key.pub
: >/etc/machine-id
rm -f /var/lib/dbus/machine-id /var/lib/systemd/random-seed

for release in /usr/lib/modules/*; do
    depmod "${release##*/}"
done

mask() {
    for unit in "$@"; do
        ln -sf /dev/null "/etc/systemd/system/$unit"
    done
}
# agent-runner mounts, names, sets the clock and the entropy, and configures
# the network before systemd starts; there is no console to log in at, no
# device to wait for, and no disk that survives to be tended.
mask apt-daily.service apt-daily.timer apt-daily-upgrade.service apt-daily-upgrade.timer \
    dpkg-db-backup.timer e2scrub_all.timer e2scrub_reap.service fstrim.timer motd-news.timer \
    getty@.service serial-getty@.service console-getty.service container-getty@.service getty.target \
    systemd-ask-password-console.path systemd-ask-password-wall.path \
    systemd-binfmt.service proc-sys-fs-binfmt_misc.automount proc-sys-fs-binfmt_misc.mount \
    systemd-fsck-root.service systemd-remount-fs.service systemd-growfs-root.service \
    systemd-firstboot.service systemd-machine-id-commit.service systemd-sysusers.service \
    systemd-journal-flush.service systemd-journal-catalog-update.service systemd-update-done.service \
    systemd-update-utmp.service systemd-update-utmp-runlevel.service systemd-user-sessions.service \
    systemd-modules-load.service systemd-random-seed.service systemd-pstore.service \
    systemd-boot-system-token.service systemd-pcrphase.service systemd-pcrphase-initrd.service systemd-pcrphase-sysinit.service \
    systemd-udevd.service systemd-udevd-control.socket systemd-udevd-kernel.socket systemd-udev-trigger.service \
    systemd-timesyncd.service systemd-networkd.service systemd-networkd.socket systemd-resolved.service \
    systemd-tmpfiles-clean.timer systemd-initctl.socket \
    systemd-hwdb-update.service ldconfig.service \
    dev-hugepages.mount dev-mqueue.mount sys-kernel-config.mount sys-kernel-debug.mount sys-kernel-tracing.mount \
    sys-fs-fuse-connections.mount tmp.mount modprobe@.service sshd-keygen.service ssh.socket \
    systemd-logind.service networking.service

# Generators are programs that every boot would run; here none finds anything
# to generate.
mkdir -p /etc/systemd/system-generators
for generator in /usr/lib/systemd/system-generators/* /lib/systemd/system-generators/*; do
    [ -e "$generator" ] || continue
    ln -sf /dev/null "/etc/systemd/system-generators/${generator##*/}"
done

# systemd makes /run/nologin until systemd-user-sessions removes it.
ln -sf /dev/null /etc/tmpfiles.d/systemd-nologin.conf

# sshd is started when somebody wants it (agent-runner does), after the host
# keys are there.
systemctl disable ssh.service ssh.socket agent-runner.service agent-secrets-cleanup.service >/dev/null 2>&1 || true
systemctl set-default multi-user.target >/dev/null 2>&1

# A login tells nothing that had to be computed.
rm -f /etc/update-motd.d/* /etc/motd
: >/etc/motd

rm -rf /var/cache/apt/* /var/lib/apt/lists/* /var/cache/debconf/*-old /var/lib/dpkg/*-old \
    /var/log/*.log /var/log/apt /root/.npm /root/.cache /home/agent/.cache
