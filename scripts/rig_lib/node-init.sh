#!/bin/sh
# Boots a node: runs as process 1 of new mount, pid, ipc, uts and cgroup namespaces, inside the node's network
# namespace. Arguments: the node's name, its template, its disk folder.
set -eu
name=$1 template=$2 disk=$3
hostname "$name"

# The root: the shared template below, the node's own writes above. It must be a mount point for pivot_root.
mount -t overlay overlay -o "lowerdir=$template,upperdir=$disk/upper,workdir=$disk/work" "$disk/root"
cd "$disk/root"
mount -t proc proc proc
# The memory of a machine that the node plays, as it is shown; what its processes can have is this machine's.
[ ! -f "$disk/meminfo" ] || mount --bind "$disk/meminfo" proc/meminfo
mount -t sysfs sysfs sys

# Control groups seen from the node's own group, so that an engine cannot touch what is not the node's.
while read -r folder fstype options; do
    case $folder in
        /sys/fs/cgroup) ;;
        *)  mountpoint -q sys/fs/cgroup || mount -t tmpfs -o mode=755 tmpfs sys/fs/cgroup
            mkdir -p ".$folder" ;;
    esac
    mount -t "$fstype" -o "$options" cgroup ".$folder"
done < "$disk/cgroups"
if [ -f sys/fs/cgroup/cgroup.subtree_control ]; then
    for controller in $(cat sys/fs/cgroup/cgroup.controllers); do
        echo "+$controller" > sys/fs/cgroup/cgroup.subtree_control || true
    done
fi

# Adapters that this machine does not have, for a node that plays one which does: the real classes and these.
if [ -d "$disk/infiniband" ]; then
    mount -t tmpfs -o mode=755,size=1m tmpfs mnt
    for class in sys/class/*; do
        mkdir "mnt/${class##*/}"
        mount --bind "$class" "mnt/${class##*/}"
    done
    rm -rf mnt/infiniband
    cp -a "$disk/infiniband" mnt/
    mount --move mnt sys/class
fi

# Devices: only those that any machine has; a /dev of its own keeps the host's clean.
mount -t tmpfs -o mode=755,size=64k tmpfs dev
for device in null zero full random urandom tty fuse net/tun; do
    [ -c "/dev/$device" ] || continue
    case $device in */*) mkdir -p "dev/${device%/*}" ;; esac
    : > "dev/$device"
    mount --bind "/dev/$device" "dev/$device"
done
if [ -d "$disk/infiniband" ]; then
    mkdir dev/infiniband
    : > dev/infiniband/uverbs0
    mount --bind /dev/null dev/infiniband/uverbs0
fi
mkdir dev/pts dev/shm
mount -t devpts -o newinstance,ptmxmode=0666,mode=0620,gid=5 devpts dev/pts
mount -t tmpfs -o mode=1777 tmpfs dev/shm
ln -s pts/ptmx dev/ptmx
for link in fd:fd stdin:fd/0 stdout:fd/1 stderr:fd/2; do ln -s "/proc/self/${link#*:}" "dev/${link%:*}"; done

mount -t tmpfs -o mode=755 tmpfs run
mkdir -p run/lock run/sshd
find tmp -mindepth 1 -delete # as at every boot

# An engine's overlayfs cannot lie on ours, so its data is on the disk below.
for folder in docker containerd; do
    mkdir -p "var/lib/$folder"
    mount --bind "$disk/data/$folder" "var/lib/$folder"
done
while read -r folder; do
    mkdir -p ".$folder"
    mount --bind "$folder" ".$folder"
    mount -o remount,bind,ro ".$folder"
done < "$disk/binds"

pivot_root . .
umount -l .
cd /
if [ -x /usr/sbin/sshd ]; then
    # Without its penalties (OpenSSH 9.8 and later) a test of failing logins would lock out the next one for 20 s.
    set -- -o UsePAM=no -o PerSourcePenalties=no
    /usr/sbin/sshd -t "$@" 2>/dev/null || set -- -o UsePAM=no
    /usr/sbin/sshd "$@"
fi
if [ -x /usr/local/sbin/rig-engine ]; then /usr/local/sbin/rig-engine start; fi
: > /run/rig-booted
# Process 1 has to collect every orphan; `wait` does, whoever the child was.
exec sh -c 'sleep infinity & wait'
