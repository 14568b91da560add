#!/bin/sh
# Installs packages in a tree, or removes those that only the build needs. Runs
# as root in mount and process namespaces of its own.
#
#   apt.sh WORK TREE install|purge
#
# install: those of WORK/packages. With WORK/tree.list, from the repositories
# listed there; otherwise from the cloud image's and the recipe's, and npm if the
# image gets npm packages.
# purge: npm again, unless it is one of WORK/packages.
set -eu
work=$1 tree=$2 what=$3
# shellcheck source=images/build/enter.sh
. "$work/enter.sh"
share packages apt.conf npm.specs files tree.list keyrings
online
printf '#!/bin/sh\nexit 101\n' >run/build/policy-rc.d
printf '#!/bin/sh\nexit 0\n' >run/build/update-initramfs
chmod 0755 run/build run/build/policy-rc.d run/build/update-initramfs # apt reads the keys as _apt
enter

# The services of packages do not start in here.
: >>/usr/sbin/policy-rc.d
mount --bind /run/build/policy-rc.d /usr/sbin/policy-rc.d
# The initramfs stays the publisher's: /boot may be on a partition of its own.
if [ -f /usr/sbin/update-initramfs ]; then
    mount --bind /run/build/update-initramfs /usr/sbin/update-initramfs
fi

apt_get() {
    # An interrupted build leaves nothing that is used.
    # shellcheck disable=SC2086,SC2154 # they are words
    $clean "PATH=$PATH" HOME=/root DEBIAN_FRONTEND=noninteractive APT_CONFIG=/run/build/apt.conf $online apt-get -q -o Dpkg::Options::=--force-unsafe-io "$@" </dev/null
}
if [ "$what" = purge ]; then
    grep -qx npm /run/build/packages || apt_get -y purge --auto-remove npm
elif [ -f /run/build/tree.list ]; then
    sources='-o Dir::Etc::SourceList=/run/build/tree.list -o Dir::Etc::SourceParts=/dev/null'
    # shellcheck disable=SC2086 # they are words
    apt_get $sources update
    # shellcheck disable=SC2046,SC2086 # one word per package is meant
    apt_get $sources -y --no-install-recommends install $(cat /run/build/packages)
    rm -rf /var/lib/apt/lists/* /var/cache/apt/archives/*.deb
else
    npm=
    if [ -d /run/build/files/etc/apt ]; then
        cp -R --preserve=mode --no-preserve=ownership /run/build/files/etc/apt/. /etc/apt/
    fi
    [ ! -s /run/build/npm.specs ] || npm=npm
    echo "I: installing packages"
    apt_get update
    # shellcheck disable=SC2046,SC2086 # one word per package is meant
    apt_get -y --no-install-recommends --no-upgrade install $(cat /run/build/packages) $npm
fi
umount /usr/sbin/policy-rc.d
rm -f /usr/sbin/policy-rc.d
