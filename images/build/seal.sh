#!/bin/sh
# Adds agent-runner, and removes caches and what each sandbox must have of its
# own: the last step of an image. Runs inside its tree as root.
#
#   seal.sh direct|cloud
set -eu
rm -rf /usr/local/bin/agent-runner /usr/local/bin/agentlab-agent
if [ "$1" = cloud ]; then
    [ ! -f /run/build/agent-runner ] || install -m 0755 /run/build/agent-runner /usr/local/bin/agent-runner
    ln -s agent-runner /usr/local/bin/agentlab-agent
else
    # It comes with the initrd of each boot, so that an upgrade of the host
    # needs no new image.
    ln -s /run/agentlab/bin/agent-runner /usr/local/bin/agent-runner
    ln -s /run/agentlab/bin/agentlab-agent /usr/local/bin/agentlab-agent
fi

rm -f /etc/ssh/ssh_host_*_key /etc/ssh/ssh_host_*_key.pub
: >/etc/machine-id
rm -f /var/lib/dbus/machine-id /var/lib/systemd/random-seed /var/lib/systemd/credential.secret
rm -f /etc/agentlab/control.json /var/lib/agentlab/uid /var/lib/agentlab/control.key
# As 'cloud-init clean --logs --seed' does, which does not run in every chroot.
rm -rf /var/lib/cloud/instance /var/lib/cloud/instances /var/lib/cloud/data /var/lib/cloud/sem /var/lib/cloud/seed \
    /var/log/cloud-init.log /var/log/cloud-init-output.log
rm -f /etc/netplan/50-cloud-init.yaml /etc/systemd/network/10-cloud-init-*.network /etc/network/interfaces.d/50-cloud-init
rm -rf /var/cache/apt/* /var/lib/apt/lists/* /var/cache/debconf/*-old /var/lib/dpkg/*-old \
    /var/log/journal/* /var/log/*.log /var/log/apt /var/tmp/* \
    /root/.npm /root/.cache /root/.bash_history /home/agent/.cache /home/agent/.npm
printf 'agentlab\n' >/etc/hostname
# What systemd does at the first boot after /usr has changed is done already.
touch -r /usr /etc/.updated /var/.updated
