#!/bin/sh
# Installs the system packages that tests need: where it may; else it names them. Argument: the Python to look with.
set -eu
python=$1
missing=""

need_library() { # file, package
    "$python" -c "import ctypes; ctypes.CDLL('$1')" 2>/dev/null || missing="$missing $2"
}

need_command() { # command, package
    command -v "$1" >/dev/null || missing="$missing $2"
}

need_command c++ g++
need_command redis-server redis-server
need_command openssl openssl
need_command chromium chromium
need_command chromedriver chromium-driver
need_library libgomp.so.1 libgomp1
need_library libstdc++.so.6 libstdc++6

test -n "$missing" || exit 0
if ! command -v apt-get >/dev/null; then
    echo "error: tests need these packages (Debian's names):$missing" >&2
    exit 1
fi
if test "$(id -u)" = 0; then
    as_root=""
elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
    as_root="sudo -n"
else
    echo "error: tests need packages that only root may install: apt-get install$missing" >&2
    exit 1
fi
echo "installing$missing …"
# shellcheck disable=SC2086  # both are lists of words
$as_root apt-get update -qq && $as_root env DEBIAN_FRONTEND=noninteractive apt-get install -qq -y $missing >/dev/null
