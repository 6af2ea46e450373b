#!/usr/bin/env bash
# Boots a systemd of its own in the namespaces that the caller has made for it (machine.py). The root is this
# machine's, through an overlay whose upper layer lies in memory: what runs here changes nothing outside.
#
#   boot.sh FOLDER LIBRARY NAME=SOURCE...    each SOURCE is seen, read-only, as LIBRARY/NAME
set -euo pipefail
folder=$1 library=$2
shift 2
root=$folder/root

mount --make-rprivate /
mount -t tmpfs -o mode=0755 layers "$folder"
mkdir "$folder"/{upper,work,root}
mount -t overlay overlay -o "lowerdir=/,upperdir=$folder/upper,workdir=$folder/work" "$root"
for share in "$@"; do
    target=$root$library/${share%%=*}
    mkdir -p "$target"
    mount --bind "${share#*=}" "$target"
    mount -o remount,bind,ro "$target"
done

mount -t proc proc "$root/proc"
mount -t sysfs sysfs "$root/sys" -o ro
mount -t cgroup2 none "$root/sys/fs/cgroup"
mount -t devtmpfs dev "$root/dev"
mkdir -p "$root/dev/shm"
mount -t tmpfs -o mode=1777 shm "$root/dev/shm"
mount -t tmpfs -o mode=0755 run "$root/run"
mount -t tmpfs -o mode=1777 tmp "$root/tmp"

# Nothing of this machine's own services starts: the test looks at ours.
ln -sf /lib/systemd/system/multi-user.target "$root/etc/systemd/system/default.target"
for unit in getty.target systemd-udevd.service systemd-udev-trigger.service systemd-networkd.service \
    systemd-timesyncd.service systemd-logind.service cron.service ssh.service dbus.service; do
    ln -sf /dev/null "$root/etc/systemd/system/$unit"
done
exec chroot "$root" /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin container=namespace \
    /lib/systemd/systemd --system --show-status=no
