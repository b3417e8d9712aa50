#!/bin/sh
# First process on the host's file tree: makes (or finds again) the persistent-memory namespace,
# runs command.sh, reports its exit status to the witness port, and switches the machine off.
#
# settings give: DEVICE (nvdimm or cxl), MODE (devdax, xfs or ext4), REGION_UUID, MODULES (where the
# modules of this kernel lie, which need not be installed here).
# command.sh gets: VM_DEVICE (the device node), VM_DIRECTORY (mode xfs, ext4: the file system),
# VM_WITNESS (the port that takes events, one JSON object per line).
B=/run/vm/busybox
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
. /run/vm/settings
VM_DIRECTORY=

say() { echo "vm: $*" > /dev/kmsg; }
finish() {
    echo "{\"event\": \"end\", \"status\": $1}" > "$VM_WITNESS"
    $B sync
    $B usleep 100000
    $B poweroff -f
    $B sleep 60
}
die() { say "$*"; echo "guest: $*" > "$OUTPUT"; finish 125; }

wait_for() {    # wait_for COMMAND...: up to 5 s
    tries=0
    until "$@"; do
        tries=$((tries+1))
        [ $tries -lt 100 ] || return 1
        $B usleep 50000
    done
}
port() {
    for p in /sys/class/virtio-ports/*; do
        [ "$(cat $p/name 2>/dev/null)" = "$1" ] && echo /dev/${p##*/}
    done
}
have_ports() {
    OUTPUT=$(port vm.output) VM_WITNESS=$(port vm.witness)
    [ -c "$OUTPUT" ] && [ -c "$VM_WITNESS" ]
}
have_memdev() { [ -e /sys/bus/cxl/devices/mem0 ]; }
have_endpoint() { [ -n "$(ls -d /sys/bus/cxl/devices/endpoint*/decoder*.0 2>/dev/null)" ]; }
have_region() { [ -n "$(ls -d /sys/bus/nd/devices/region* 2>/dev/null)" ]; }

# What `cxl create-region -t pmem -m -d decoder0.0 mem0` does, in sysfs itself: Linux does not read
# CXL region labels, so the region is built anew at every boot, and only with the same UUID, which
# the tool (76.1) takes no option for, do the namespace labels kept on the device fit it again.
cxl_region() (
    set -x
    cd /sys/bus/cxl/devices
    decoder=$(ls -d endpoint*/decoder*.0 | head -n 1) bytes=$(cat mem0/pmem/size)
    region=$(cat decoder0.0/create_pmem_region) &&
        echo $region > decoder0.0/create_pmem_region &&
        echo 256 > $region/interleave_granularity && echo 1 > $region/interleave_ways &&
        echo $REGION_UUID > $region/uuid && echo $((bytes)) > $region/size &&
        echo pmem > $decoder/mode && echo $((bytes)) > $decoder/dpa_size &&
        echo ${decoder##*/} > $region/target0 && echo 1 > $region/commit &&
        echo $region > /sys/bus/cxl/drivers/cxl_region/bind
)

namespace() {   # namespace REGION: one over all of it, unless the labels already hold one
    case $MODE in devdax) kind=devdax;; *) kind=fsdax;; esac
    if ndctl list -N -r $1 2>/dev/null | grep -q '"mode":"'$kind'"'; then
        say "$1: $kind namespace found on the media"
        return
    fi
    for mapping in /sys/bus/nd/devices/$1/mapping[0-9]*; do
        dimm=$(cut -d, -f1 $mapping)
        ndctl check-labels $dimm > /dev/null 2>&1 && continue
        # A fresh device has no label index yet.
        { ndctl disable-region $1 && ndctl init-labels -f $dimm && ndctl enable-region $1; } \
            > /run/vm/labels 2>&1 || die "ndctl init-labels: $(cat /run/vm/labels)"
    done
    # -M mem: the page map goes to RAM, so that the media keeps its whole size
    ndctl create-namespace -f -r $1 -m $kind -M mem > /run/vm/namespace 2>&1 ||
        die "ndctl create-namespace: $(cat /run/vm/namespace)"
    say "$1: $kind namespace made"
}

bind_volatile_dax() {    # no driver claims a volatile region by itself
    for dax in /sys/bus/dax/devices/*; do
        case $(readlink $dax) in
        */ndbus*) ;;
        *) echo ${dax##*/} > /sys/bus/dax/drivers/device_dax/new_id || say "$dax not bound";;
        esac
    done
}
persistent_dax() {  # a volatile region has a device node too, but does not lie under an ndbus
    for dax in /sys/bus/dax/devices/*; do
        case $(readlink $dax) in */ndbus*) echo /dev/${dax##*/}; return;; esac
    done
}

modules=/lib/modules/$(uname -r)
[ -e $modules ] || { mkdir -p /lib/modules; ln -s "$MODULES" $modules; }
$B hostname vm
$B ifconfig lo 127.0.0.1 up
wait_for have_ports || { say "no virtio ports"; $B poweroff -f; }
if [ $DEVICE = cxl ]; then
    wait_for have_memdev && wait_for have_endpoint || die "no CXL memory device came up"
    cxl_region > /run/vm/region 2>&1 || die "CXL region: $(cat /run/vm/region)"
fi
wait_for have_region || die "no persistent memory region came up"
for region in /sys/bus/nd/devices/region*; do namespace ${region##*/}; done

case $MODE in
devdax) VM_DEVICE=$(persistent_dax);;
*)      VM_DEVICE=$(ls /dev/pmem* 2>/dev/null | head -n 1);;
esac
[ -e "$VM_DEVICE" ] || die "the namespace gave no device node ($VM_DEVICE)"
if [ $MODE != devdax ]; then
    VM_DIRECTORY=/run/vm/pmem
    mkdir -p $VM_DIRECTORY
    case $MODE in
    # su, sw: extents begin at multiples of 2 MiB, so that pages of that size can map them
    xfs)  options="-q -f -m reflink=0 -d su=2m,sw=1";;
    ext4) options="-q -F -b 4096 -E lazy_itable_init=0";;
    esac
    if ! blkid $VM_DEVICE | grep -q 'TYPE="'$MODE'"'; then
        mkfs.$MODE $options $VM_DEVICE > /run/vm/mkfs 2>&1 ||
            die "mkfs.$MODE: $(cat /run/vm/mkfs)"
    fi
    mount -t $MODE -o dax=always $VM_DEVICE $VM_DIRECTORY || die "mount -t $MODE -o dax=always"
fi
bind_volatile_dax
export VM_DEVICE VM_DIRECTORY VM_WITNESS

# A port cannot be opened twice, so that the command and its children get a FIFO.
mkfifo /run/vm/out
cat /run/vm/out > "$OUTPUT" & forwarder=$!
echo '{"event": "start"}' > "$VM_WITNESS"
say "command starts"
/bin/sh /run/vm/command.sh < /dev/null > /run/vm/out 2>&1
status=$?
say "command ended: $status"
# What it left running may hold the FIFO: waited for only so long.
forwarder_ended() { ! kill -0 $forwarder 2>/dev/null; }
wait_for forwarder_ended
[ -z "$VM_DIRECTORY" ] || umount $VM_DIRECTORY 2>/dev/null || say "file system still busy"
finish $status
