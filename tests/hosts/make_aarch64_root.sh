#!/usr/bin/env bash
# make_aarch64_root.sh DIRECTORY: an aarch64 root for qemu-user: Debian's Python 3.11, and tvm-ffi out of its wheel. About 60 MB, no chroot and
# no root rights; what was there is kept. Needs apt-get with Debian's archive, dpkg-deb and pip. PYTHON names the Python whose pip fetches.
set -euo pipefail
root=$(mkdir -p "$1" && cd "$1" && pwd)
python=${PYTHON:-python3}
tvm_ffi=${TVM_FFI:-apache-tvm-ffi==0.1.15.post2}
[ -e "$root/.whole" ] && exit 0
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

mkdir -p "$work/lists/partial" "$work/cache/archives/partial" "$work/debs"
apt=(apt-get -q -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o "Dir::State::Lists=$work/lists" -o "Dir::Cache=$work/cache"
     -o Dir::State::status=/dev/null -o Debug::NoLocking=1 -o APT::Sandbox::User=root)
"${apt[@]}" update
(cd "$work/debs" && "${apt[@]}" download libc6 libgcc-s1 libstdc++6 zlib1g libexpat1 libffi8 libssl3 \
  python3.11-minimal libpython3.11-minimal libpython3.11-stdlib)
for deb in "$work"/debs/*.deb; do dpkg-deb -x "$deb" "$root"; done
# Merged /usr, which the loader's path expects.
if [ ! -e "$root/lib/ld-linux-aarch64.so.1" ]; then ln -s usr/lib "$root/lib"; fi

"$python" -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.11 --implementation cp \
  --platform manylinux_2_28_aarch64 --platform manylinux_2_24_aarch64 --platform manylinux_2_17_aarch64 --dest "$work/wheels" "$tvm_ffi"
"$python" -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.11 --dest "$work/wheels" typing-extensions
for wheel in "$work"/wheels/*.whl; do "$python" -m zipfile -e "$wheel" "$root/site"; done
touch "$root/.whole"
