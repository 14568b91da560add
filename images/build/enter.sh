# shellcheck shell=sh disable=SC2034,SC2154
# Sourced by the scripts that run programs of an image's tree, as root (of a
# user namespace where the host's user is not root). The caller sets $work,
# $tree and $uid, and has mount and process namespaces of its own: nothing that is
# mounted here outlives it. It calls share for what the programs need of $work,
# and then enter.
umask 022
rm -rf "${tree:?}/tmp"
mkdir -m 1777 "$tree/tmp"
mount --bind "$tree" "$tree"
cd "$tree" || exit
mount -t proc -o nosuid,nodev,noexec proc proc
# Only the mount is read-only, not the file system: a user namespace may then
# mount another proc, as confined does.
mount -o remount,bind,ro,nosuid,nodev,noexec proc
mount -t tmpfs -o mode=1777,nosuid,nodev tmpfs tmp
mount -t tmpfs -o mode=1777,nosuid,nodev tmpfs var/tmp
mount -t tmpfs -o mode=0755,nosuid,nodev tmpfs run
# The only devices of the host are these, which store nothing.
mount -t tmpfs -o mode=0755,nosuid,noexec tmpfs dev
for device in null zero full random urandom; do
    : >"dev/$device"
    mount --bind "/dev/$device" "dev/$device"
done
ln -s /proc/self/fd dev/fd
ln -s /proc/self/fd/0 dev/stdin
ln -s /proc/self/fd/1 dev/stdout
ln -s /proc/self/fd/2 dev/stderr
mkdir -m 1777 dev/shm
mkdir -m 0700 run/build

# share NAME... makes files and directories of $work available below
# /run/build, those that exist.
share() {
    for name in "$@"; do
        if [ -d "$work/$name" ]; then
            mkdir "run/build/$name"
        elif [ -e "$work/$name" ]; then
            : >"run/build/$name"
        else
            continue
        fi
        mount --bind "$work/$name" "run/build/$name"
    done
}

# renumber NAME gives a user and a group of the tree the number $uid, until
# /etc/passwd and /etc/group are unmounted. Programs share keys and limits with
# the host's user of the same number, so $uid is 65532 or 65533: Debian and
# systemd reserve both, and no user has them.
renumber() {
    for file in passwd group; do
        sed -e "s/^\($1:[^:]*\):[0-9]*:[0-9]*:/\1:$uid:$uid:/" -e "s/^\($1:[^:]*\):[0-9]*:/\1:$uid:/" "/etc/$file" >"/run/build/$file"
        mount --bind "/run/build/$file" "/etc/$file"
    done
}

# new_keyring runs a program with a new session keyring, because the present one
# may be that of a login. Where the system calls for keyrings are not permitted,
# the program cannot use any.
new_keyring() {
    # shellcheck disable=SC2016 # of perl, which is in every tree
    LC_ALL=C perl -MErrno -MPOSIX -e 'my %join = (x86_64 => 250, aarch64 => 219);
        syscall($join{(POSIX::uname())[4]} // die("E: the kernel has an unknown architecture\n"), 1, 0) >= 0
            || $!{ENOSYS} || $!{EPERM} or die "E: there is no new session keyring: $!\n";
        exec @ARGV or die "E: $ARGV[0]: $!\n"' "$@"
}

# online gives the tree the host's name servers, and sets $online to a command
# that runs its arguments with the variables of the host's proxies, registries
# and certificates. A registry that cannot be passed on is an error, because
# another one may have other packages under the same names.
online() {
    cat /etc/resolv.conf >run/build/resolv.conf
    : >run/build/online
    if [ -s /etc/ssl/certs/ca-certificates.crt ]; then # with those of a company's proxy
        cp /etc/ssl/certs/ca-certificates.crt run/build/ca.crt
        echo "export NODE_EXTRA_CA_CERTS=/run/build/ca.crt PIP_CERT=/run/build/ca.crt SSL_CERT_FILE=/run/build/ca.crt" >>run/build/online
    fi
    for name in http_proxy https_proxy no_proxy HTTP_PROXY HTTPS_PROXY NO_PROXY npm_config_registry GOPROXY PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_TRUSTED_HOST; do
        value=
        eval "value=\${$name-}"
        case $value in
        '') ;;
        *\'* | *[![:print:]]*)
            echo "E: the variable $name has a quote or a control character; change it, or unset it" >&2
            exit 1
            ;;
        *) echo "export $name='$value'" >>run/build/online ;;
        esac
    done
    # shellcheck disable=SC2016 # its own arguments
    echo 'exec "$@"' >>run/build/online
    online="/bin/sh /run/build/online"
}

# enter makes the tree the root of everything that runs from then on. A chroot
# could be left by root in it; here the host's root is unmounted, by the
# image's own program.
enter() {
    pivot_root . .
    /bin/umount -l .
    cd / || exit
    PATH=/usr/sbin:/usr/bin:/sbin:/bin
    clean="env -i LANG=C.UTF-8 TMPDIR=/tmp SYSTEMD_OFFLINE=1"
    if [ -f /run/build/resolv.conf ]; then
        resolv=$(readlink -m /etc/resolv.conf)
        mkdir -p "${resolv%/*}"
        : >>"$resolv"
        mount --bind /run/build/resolv.conf "$resolv"
    fi
}
