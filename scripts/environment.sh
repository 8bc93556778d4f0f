# Sourced by the other scripts: makes .venv with the project and the extras named in $1, unless it is up to date.
# Needs Python 3.11 with the venv module.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3.11 python3 python; do
        [ -n "$candidate" ] || continue
        if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "IronGrad needs Python 3.11 (torch-mlir has no wheel for others here). Install it, or name it: PYTHON=/path/to/python3.11 $0" >&2
    exit 1
}

make_environment() {
    local extras="$1" stamp python
    stamp=".venv/.installed-${extras//,/-}"
    if [ ! -e "$stamp" ] || [ pyproject.toml -nt "$stamp" ]; then
        python="$(find_python)"
        if [ ! -x .venv/bin/python ]; then
            if ! "$python" -m venv .venv; then
                echo "cannot make a virtual environment; on Debian: apt-get install python3.11-venv" >&2
                exit 1
            fi
        fi
        echo "installing irongrad[$extras] into .venv (some minutes the first time)"
        .venv/bin/python -m pip install --quiet --editable ".[$extras]"
        touch "$stamp"
    fi
    export PATH="$PWD/.venv/bin:$PATH"
}

# What tests run compiled steps on: Mesa's Vulkan device on the CPU, and an aarch64 machine, which is qemu with IREE's
# runtime for it in .venv/aarch64. And the browser in which they open reports.
install_test_devices() {
    local packages=() loader=(/usr/lib/*/libvulkan.so.1) driver=(/usr/share/vulkan/icd.d/lvp_icd*.json)
    [ -e "${loader[0]}" ] || packages+=(libvulkan1)
    [ -e "${driver[0]}" ] || packages+=(mesa-vulkan-drivers)
    command -v qemu-aarch64-static >/dev/null || packages+=(qemu-user-static)
    command -v chromium >/dev/null || packages+=(chromium)
    [ -e /usr/aarch64-linux-gnu/lib/libstdc++.so.6 ] || packages+=(libc6-arm64-cross libstdc++6-arm64-cross)
    if [ "${#packages[@]}" -gt 0 ]; then
        if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
            echo "installing ${packages[*]}"
            apt-get update -qq
            DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null
        else
            echo "the tests need: apt-get install ${packages[*]}" >&2
        fi
    fi
    if [ ! -d .venv/aarch64/iree ]; then
        .venv/bin/python -m pip install --quiet --target .venv/aarch64 --no-deps --only-binary=:all: \
            --platform manylinux_2_28_aarch64 --python-version 3.11 iree-base-runtime==3.13.0
    fi
}
