#!/bin/busybox sh
# First process of the guest, in the initial RAM file system: loads the modules, puts the host's
# root file system (9p, read-only) under an overlay in RAM, and goes on there with main.sh.
B=/bin/busybox
die() { echo "init: $*"; $B sync; $B poweroff -f; }

$B mkdir -p /proc /sys /dev /low /over /new
$B mount -t proc proc /proc
$B mount -t sysfs sysfs /sys
$B mount -t devtmpfs dev /dev
for module in /mods/*.ko; do $B insmod $module || echo "init: $module not loaded"; done

$B mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000,cache=loose,ro hostroot /low ||
    die "no 9p root"
$B mount -t tmpfs -o mode=755,size=75% tmpfs /over || die "no tmpfs"
$B mkdir /over/upper /over/work
$B mount -t overlay -o lowerdir=/low,upperdir=/over/upper,workdir=/over/work overlay /new ||
    die "no overlay"
for directory in proc sys dev; do
    $B mkdir -p /new/$directory
    $B mount --move /$directory /new/$directory || die "cannot move /$directory"
done
$B mount -t tmpfs -o mode=755 tmpfs /new/run || die "no /run"
$B mkdir -p /new/dev/pts /new/dev/shm /new/run/vm /new/run/lock
$B mount -t devpts -o mode=620,ptmxmode=666 devpts /new/dev/pts
$B mount -t tmpfs -o mode=1777 tmpfs /new/dev/shm
$B cp $B /main.sh /settings /command.sh /new/run/vm/
exec $B switch_root /new /bin/sh /run/vm/main.sh
