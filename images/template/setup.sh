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
    fwupd-refresh.timer e2scrub_all.timer e2scrub_reap.service dpkg-db-backup.timer apport.service ua-timer.timer man-db.timer ubuntu-advantage.service \
    systemd-networkd-wait-online.service multipathd.service multipathd.socket ModemManager.service udisks2.service
# The controller's network has no time server: the clock comes with the identity.
mask systemd-timesyncd.service chrony.service chronyd.service

systemctl enable agentlab-guest.path >/dev/null 2>&1
# sshd starts when somebody wants it, after agent-runner has made the host key.
systemctl disable ssh.service ssh.socket >/dev/null 2>&1 || true
