#!/bin/sh
# Starts or ends the engine of this node. Doubly forked, so that process 1 collects it: a dockerd that stays a zombie
# makes the next start fail with "process with PID ... is still running".
set -eu
pid_file=/run/docker.pid
case $1 in
    start)
        setsid -f sh -c 'exec dockerd --exec-opt native.cgroupdriver=cgroupfs >> /var/log/dockerd.log 2>&1 < /dev/null'
        ;;
    stop) kill -TERM "$(cat $pid_file)" ;;
    kill) kill -KILL "$(cat $pid_file)" ;;
esac
[ "$1" = start ] || while [ -d "/proc/$(cat $pid_file 2>/dev/null || echo none)" ]; do sleep 0.05; done
