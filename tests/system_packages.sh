#!/bin/sh
# Install what tests need beyond Python packages (a Redis server, a browser, nginx, curl, the runtime
# of the address sanitizer), where we may: as root on a machine with apt. Elsewhere their tests skip,
# and pytest's summary says so in one line.
set -eu
missing=""
command -v redis-server >/dev/null || missing="$missing redis-server"
command -v chromium >/dev/null || missing="$missing chromium"
command -v nginx >/dev/null || missing="$missing nginx-light"
command -v curl >/dev/null || missing="$missing curl"
PATH="$PATH:/sbin" ldconfig -p | grep -q libasan || missing="$missing libasan8"
[ -n "$missing" ] || exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "installing$missing ..."
    log=$(mktemp)
    # shellcheck disable=SC2086  # a list of packages
    if apt-get update -qq >"$log" 2>&1 &&
        DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $missing >>"$log" 2>&1
    then
        rm -f "$log"
        exit 0
    fi
    echo "could not install$missing (see $log)"
fi
