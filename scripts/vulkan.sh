#!/bin/sh
# Makes sure that this machine has a Vulkan device, installing Mesa's software one (lavapipe) where it has none.
#
#   scripts/vulkan.sh
#
# Exit status 0: there is a device (stderr says which driver). 1: there is none, and stderr says what to type.
# A device that is there already is never touched. Installing needs root, or sudo that asks for no password; neither is asked for.
# VK_DRIVER_FILES and VK_ICD_FILENAMES are obeyed, as the Vulkan loader does: only the drivers that they name count.
#
# POSIX sh on purpose: Alpine and macOS have no recent bash.
set -eu

say() { printf 'vulkan: %s\n' "$*" >&2; }

# Whether a shared library of this bare name is where the dynamic linker looks.
# musl has no linker cache, and a user's PATH often lacks /sbin, where ldconfig is: hence the list of folders.
find_library() {
    found=$( (PATH=$PATH:/sbin:/usr/sbin ldconfig -p 2>/dev/null || true) | sed -n "s|.*[[:space:]]$1 .*=> \(/.*\)|\1|p" | head -n 1)
    if [ -n "$found" ]; then
        echo "$found"
        return
    fi
    for dir in $(echo "${LD_LIBRARY_PATH:-}" | tr : ' ') /lib /usr/lib /lib64 /usr/lib64 /usr/local/lib "/usr/lib/$(uname -m)-linux-gnu"; do
        if [ -e "$dir/$1" ]; then
            echo "$dir/$1"
            return
        fi
    done
}

# The manifests of drivers ("ICD" files) that the loader would read, one a line.
icd_files() {
    named=${VK_DRIVER_FILES:-${VK_ICD_FILENAMES:-}}
    if [ -n "$named" ]; then
        echo "$named" | tr : '\n'
        return
    fi
    dirs="${XDG_CONFIG_HOME:-${HOME:-}/.config}:${XDG_CONFIG_DIRS:-/etc/xdg}:/etc:/usr/local/etc"
    dirs="$dirs:${XDG_DATA_HOME:-${HOME:-}/.local/share}:${XDG_DATA_DIRS:-/usr/local/share:/usr/share}"
    echo "$dirs" | tr : '\n' | while IFS= read -r dir; do
        for file in "$dir"/vulkan/icd.d/*.json; do
            if [ -e "$file" ]; then echo "$file"; fi
        done
    done
}

# Prints the driver library of the manifest $1 if the dynamic linker can load it with all it needs.
loadable() {
    lib=$(sed -n 's/.*"library_path"[[:space:]]*:[[:space:]]*"\([^"]*\)".*/\1/p' "$1" 2>/dev/null | head -n 1)
    case $lib in
        '') return ;;
        /*) ;;
        */*) lib=$(dirname "$1")/$lib ;; # relative to the manifest
        *) lib=$(find_library "$lib") ;;
    esac
    [ -n "$lib" ] && [ -e "$lib" ] || return 0
    if ! command -v ldd >/dev/null 2>&1; then
        echo "$lib"
        return
    fi
    # ldd fails on a library of another architecture; glibc says "not found" and musl "Error loading" where a dependency is missing.
    needs=$(ldd "$lib" 2>&1) || return 0
    case $needs in
        *'not found'* | *'Error loading'*) return 0 ;;
    esac
    echo "$lib"
}

any_exists() {
    for path in "$@"; do
        if [ -e "$path" ]; then return 0; fi
    done
    return 1
}

# Prints the name of a device or of its driver, or nothing.
find_device() {
    [ -n "$(find_library libvulkan.so.1)" ] || return 0
    # vulkaninfo knows best, where it is installed: it creates the devices.
    if command -v vulkaninfo >/dev/null 2>&1; then
        (vulkaninfo --summary 2>/dev/null || true) | sed -n 's/^[[:space:]]*deviceName[[:space:]]*= //p' | head -n 1
        return
    fi
    # Otherwise a software driver that loads has a device, and a hardware driver has one if the kernel shows a device node.
    icd_files | while IFS= read -r icd; do
        lib=$(loadable "$icd")
        case $lib in
            '') continue ;;
            *lvp* | *swiftshader*) ;;
            *nvidia*) any_exists /dev/nvidia[0-9]* || continue ;;
            *dzn*) any_exists /dev/dxg || continue ;;
            *) any_exists /dev/dri/renderD* || continue ;;
        esac
        echo "$lib"
        break
    done
}

case $(uname -s) in
    Linux) ;;
    Darwin)
        say "macOS: nothing to install, wgpu uses Metal"
        exit 0
        ;;
    MINGW* | MSYS* | CYGWIN*)
        say "Windows: nothing to install, wgpu uses Direct3D 12"
        exit 0
        ;;
    *)
        if [ -n "$(find_device)" ]; then
            say "device: $(find_device)"
            exit 0
        fi
        say "no Vulkan device: install your system's Vulkan loader and Mesa's Vulkan drivers (lavapipe is its software one)"
        exit 1
        ;;
esac

device=$(find_device)
if [ -n "$device" ]; then
    say "device: $device"
    exit 0
fi
if [ -n "${VK_DRIVER_FILES:-${VK_ICD_FILENAMES:-}}" ]; then
    say "no driver named by VK_DRIVER_FILES or VK_ICD_FILENAMES loads: ${VK_DRIVER_FILES:-${VK_ICD_FILENAMES:-}}"
    say "correct it, or unset it to use the system's drivers"
    exit 1
fi
if any_exists /dev/nvidia[0-9]*; then
    say "this machine has an NVIDIA GPU, but not its Vulkan driver (a container needs NVIDIA_DRIVER_CAPABILITIES=all)"
    say "the software driver that follows works, but leaves that GPU idle"
fi

refresh=
if command -v apt-get >/dev/null 2>&1; then
    refresh="apt-get -q update"
    install="apt-get -q -o DPkg::Lock::Timeout=300 install -y --no-install-recommends libvulkan1 mesa-vulkan-drivers"
elif command -v dnf >/dev/null 2>&1; then
    install="dnf -y install vulkan-loader mesa-vulkan-drivers"
elif command -v pacman >/dev/null 2>&1; then
    install="pacman -Sy --noconfirm --needed vulkan-icd-loader vulkan-swrast"
elif command -v apk >/dev/null 2>&1; then
    install="apk add vulkan-loader mesa-vulkan-swrast"
elif command -v zypper >/dev/null 2>&1; then
    install="zypper --non-interactive install libvulkan1 libvulkan_lvp"
else
    say "no Vulkan device, and no package manager that this script knows"
    say "install the Vulkan loader and Mesa's Vulkan drivers (lavapipe is its software one)"
    exit 1
fi

if [ "$(id -u)" = 0 ]; then
    sudo=
elif command -v sudo >/dev/null 2>&1 && sudo -n true 2>/dev/null; then
    sudo="sudo -n"
else
    say "no Vulkan device, and installing one needs root. Type:"
    if [ -n "$refresh" ]; then say "    sudo $refresh"; fi
    say "    sudo $install"
    exit 1
fi

say "no Vulkan device: installing the software driver ($install)"
# A source that has nothing to do with Vulkan may be unreachable; if it matters, the installation fails and says so.
if [ -n "$refresh" ]; then
    # shellcheck disable=SC2086 # words on purpose
    $sudo $refresh </dev/null >&2 || say "'$refresh' failed; trying with the package lists that are there"
fi
# shellcheck disable=SC2086 # words on purpose
if ! $sudo env DEBIAN_FRONTEND=noninteractive $install </dev/null >&2; then
    say "the installation failed; see above"
    exit 1
fi

device=$(find_device)
if [ -z "$device" ]; then
    say "installed, and still no driver loads"
    exit 1
fi
say "device: $device"
