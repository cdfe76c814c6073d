#!/usr/bin/env bash
# Fetches a software Vulkan driver into target/drivers/NAME, next to the system's own and without installing it, to run tests on it.
#
#   scripts/drivers.sh NAME COMMAND...       runs the command on that driver
#   scripts/drivers.sh NAME                  prints the `export` lines that choose it:
#                                              exports=$(scripts/drivers.sh NAME) && eval "$exports"
#
#   swiftshader   subgroups of 4, no f16, slow: the weak, strange device that a test suite wants (from Debian's chromium-common)
#   mesa-25.0     lavapipe of Mesa 25.0: from the backports of Debian 12, or Debian 13's own
#   mesa-22.3     lavapipe of Mesa 22.3: Debian 12's own
#
# Debian only: packages come from the mirror in the machine's apt sources, through package lists of our own, so neither those sources nor
# what is installed changes, and root isn't needed. Once fetched, no network is needed; delete target/drivers to fetch anew.
# Exit status: that of the command; 3 where these drivers can't be had; 2 for usage; 1 when fetching failed.
# Environment: CARGO_TARGET_DIR, if target/ is elsewhere.
set -euo pipefail

root=$(CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
drivers=${CARGO_TARGET_DIR:-$root/target}/drivers

say() { printf 'drivers: %s\n' "$*" >&2; }

# Prints the `export` lines for the manifest $1, whose driver finds its libraries in the folders $2 (and the system's).
print_exports() {
    printf 'export VK_DRIVER_FILES=%q\n' "$1"
    if [[ -n $2 ]]; then
        printf 'export LD_LIBRARY_PATH=%q\n' "$2${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
    fi
}

# The mirror of its own suite in the machine's apt sources, as apt understands them: either format, package lists fetched or not.
mirror() {
    local uri release found=
    # shellcheck disable=SC2016 # the placeholders are apt's
    while read -r uri release; do
        case $release in
            "$codename" | stable | oldstable) found=${found:-$uri} ;;
        esac
    done < <(apt-get indextargets --no-release-info --format '$(REPO_URI) $(RELEASE)' 'Created-By: Packages' 'Component: main')
    if [[ -z $found ]]; then
        say "no apt source of this machine serves '$codename main'"
        return 1
    fi
    printf '%s\n' "$found"
}

# Downloads `package` of `suite`, in the newest version that begins with `version`, with those of its dependencies that this machine lacks or
# has too old, and unpacks them all into the folder $1.
fetch() {
    local into=$1 uri keyring options=() found closure name new
    local apt=$into.apt
    mkdir -p "$into" "$apt"/{lists,cache}/partial "$apt/cache/archives/partial" "$apt/empty"
    uri=$(mirror)
    for keyring in /usr/share/keyrings/debian-archive-keyring.{gpg,pgp}; do
        [[ -r $keyring ]] && break
    done
    # Dependencies may come from the machine's own suite; `suite` may be that one.
    for name in $(printf '%s\n' "$suite" "$codename" | sort -u); do
        printf 'deb [signed-by=%s] %s %s main\n' "$keyring" "$uri" "$name"
    done >"$apt/sources.list"
    # NoLocking: the only lock that matters here is the system's, and we change nothing of the system's.
    options=(-q -o Dir::Etc::SourceList="$apt/sources.list" -o Dir::Etc::SourceParts="$apt/empty"
        -o Dir::Etc::Preferences=/dev/null -o Dir::Etc::PreferencesParts="$apt/empty"
        -o Dir::State::Lists="$apt/lists" -o Dir::Cache="$apt/cache" -o Acquire::Languages=none -o Acquire::Retries=3
        -o Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false -o APT::Sandbox::User="$(id -un)" -o Debug::NoLocking=1
        -o APT::Default-Release="$suite" -o APT::Install-Recommends=false)
    # A failed download of a list is only a warning to apt-get update, unless told otherwise.
    apt-get "${options[@]}" -o APT::Update::Error-Mode=any update >&2

    found=$(apt-cache "${options[@]}" madison "$package" | awk -v want="$version" 'index($3, want) == 1 && !n++ { print $3 }')
    if [[ -z $found ]]; then
        say "$suite has no $package $version*; it has: $(apt-cache "${options[@]}" madison "$package" | awk '{ print $3 }' | xargs)"
        return 1
    fi
    # apt's own resolver says what an installation would change; of that, only what the driver itself depends on matters here
    # (an upgrade of Mesa drags every other package of Mesa with it).
    closure=$(apt-cache "${options[@]}" depends --recurse --no-recommends --no-suggests --no-conflicts --no-breaks --no-replaces \
        --no-enhances "$package=$found" | grep '^[a-z0-9]')
    new=()
    if [[ $with_dependencies == yes ]]; then
        while read -r name; do
            new+=("$name")
        done < <(apt-get "${options[@]}" --allow-downgrades --simulate install "$package=$found" |
            sed -n 's/^Inst \([^ ]*\) \(\[[^]]*\] \)\?(\([^ ]*\) .*/\1 \3/p' |
            while read -r name found_version; do
                # Libraries only: Mesa's packages of Debian 12 drag in Python, for a tool of theirs.
                case $name in
                    "$package" | *python*) ;;
                    *lib*) if grep -qxF "${name%%:*}" <<<"$closure"; then echo "$name=$found_version"; fi ;;
                esac
            done)
    fi
    say "fetching $package $found${new[*]:+ with ${new[*]}}"
    (cd "$apt" && apt-get "${options[@]}" download "$package=$found" "${new[@]}" >&2)
    for name in "$apt"/*.deb; do
        dpkg -x "$name" "$into"
    done
    rm -rf "$apt"
    printf '%s\n' "$found" >"$into/version"
}

if [[ $# == 0 || $1 == -* ]]; then
    sed -n '2,/^set /{/^set /d; s/^# \{0,1\}//; p}' "${BASH_SOURCE[0]}" >&2
    exit 2
fi
name=$1
shift

codename=
if [[ -r /etc/os-release ]]; then
    # shellcheck disable=SC1091
    codename=$(. /etc/os-release && [[ $ID == debian ]] && echo "${VERSION_CODENAME:-}") || codename=
fi

package=mesa-vulkan-drivers
with_dependencies=yes
suite=
library=libvulkan_lvp.so icd='lvp_icd*.json'
case $name in
    swiftshader)
        # The suite without its security updates: a browser is updated there every week, and CI wants the same driver tomorrow.
        # Its library needs libc alone, so the rest that a browser depends on isn't fetched.
        package=chromium-common suite=$codename version='' with_dependencies=no
        library=libvk_swiftshader.so icd=vk_swiftshader_icd.json
        ;;
    mesa-25.0)
        version=25.0.
        case $codename in
            bookworm) suite=bookworm-backports ;;
            *) suite=trixie ;;
        esac
        ;;
    mesa-22.3) version=22.3. suite=bookworm ;;
    *)
        say "no driver '$name'; there are swiftshader, mesa-25.0 and mesa-22.3"
        exit 2
        ;;
esac
if [[ -z $codename ]] || ! command -v apt-get >/dev/null; then
    say "$name comes from Debian's packages, and this system isn't Debian (12 or newer); a container of Debian 12 has what it takes"
    exit 3
fi
# (No `| grep -q`, `| head` or early exit in this file: they end the other side with SIGPIPE, which pipefail takes for a failure.)
if [[ $(PATH=$PATH:/sbin:/usr/sbin ldconfig -p) != *'libvulkan.so.1 '* ]]; then
    say "the Vulkan loader (libvulkan1) isn't installed: run scripts/vulkan.sh first"
    exit 1
fi

mkdir -p "$drivers"
drivers=$(CDPATH='' cd "$drivers" && pwd) # CARGO_TARGET_DIR may be relative
dir=$drivers/$name
if [[ $package == mesa-vulkan-drivers && $(dpkg-query -W -f '${Version}' "$package" 2>/dev/null || true) == "$version"* ]]; then
    say "$name is the driver that this system has installed"
    exports=$(print_exports "$(dpkg -L "$package" | awk '/\/lvp_icd[^\/]*\.json$/ && !n++')" '')
else
    if [[ ! -e $dir/version ]]; then
        # Unpacked elsewhere first, and moved when complete: a broken-off run leaves nothing that looks finished.
        part=$(mktemp -d "$drivers/$name.part.XXXXXX")
        trap 'rm -rf "$part" "$part.apt"' EXIT
        fetch "$part"
        rm -rf "$dir"
        mv "$part" "$dir"
    fi
    library=$(find "$dir/usr" -name "$library" -print -quit)
    if [[ -z $library ]]; then
        say "$package $(cat "$dir/version") holds no driver library; delete $dir to fetch it anew"
        exit 1
    fi
    # The package's manifest with the library's path as it is now. The rest is kept: the loader treats a driver by the version it states.
    manifest=$dir/icd.json
    sed 's|\("library_path": *\)"[^"]*"|\1"'"$library"'"|' "$(find "$dir/usr" -name "$icd" -print -quit)" >"$manifest"
    # Debian 12's packages use /lib as well as /usr/lib.
    libraries=
    if [[ $with_dependencies == yes ]]; then
        libraries=$(dirname "$library"):$dir/lib/$(basename "$(dirname "$library")")
    fi
    exports=$(print_exports "$manifest" "$libraries")
    missing=$(eval "$exports"; ldd -r "$library" 2>&1 | grep -E 'not found|undefined symbol' || true)
    if [[ -n $missing ]]; then
        say "the driver doesn't load here:"
        printf '%s\n' "$missing" >&2
        exit 1
    fi
    say "$name: $package $(cat "$dir/version")"
fi

if [[ $# == 0 ]]; then
    printf '%s\n' "$exports"
else
    eval "$exports"
    exec "$@"
fi
