#!/usr/bin/env bash
# Checks and measures tilewise on a Linux machine with a GPU, from a program built elsewhere: no network, no Rust, within five minutes.
#
#   scripts/gpu-check.sh [--adapter NAME] [--out DIR] [--minutes N] [PROGRAM]
#
#   PROGRAM           the built program [default: target/release/tilewise]
#   --adapter NAME    as in `tilewise --adapter`. The default, hardware, never takes the CPU in disguise; llvmpipe tries this script
#                     on a machine without a GPU, with small benches
#   --out DIR         where results go [default: gpu-check/ and the device's name]
#   --minutes N       how long all of it may take [default: 5]
#
# Writes info.txt, verify.txt (every kernel variant and option against the CPU reference), tune.txt and
# tuning.txt (the fastest variant for each kind of call), bench.csv and bench.txt, and log.txt with what
# was run, how long it took, and all that went to stderr. What fails or runs out of time doesn't keep the rest from running.
# Exit status: 0 if all passed; 1 if something failed or ran out of time; 2 for usage; 3 if there is nothing to run on.
# Needs bash, coreutils, sed, the Vulkan loader (libvulkan.so.1) and the GPU's Vulkan driver. Environment: VK_DRIVER_FILES as ever.
set -euo pipefail

root=$(CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

say() { printf 'gpu-check: %s\n' "$*" >&2; }
die() {
    local status=$1 line
    shift
    for line in "$@"; do say "$line"; done
    exit "$status"
}
usage() { sed -n '2,/^set /{/^set /d; s/^# \{0,1\}//; p}' "${BASH_SOURCE[0]}" >&2; }

program=${CARGO_TARGET_DIR:-$root/target}/release/tilewise
adapter=hardware
out=
minutes=5
while [[ $# != 0 ]]; do
    case $1 in
        --adapter | --out | --minutes)
            [[ $# -ge 2 ]] || die 2 "$1 needs a value"
            case $1 in
                --adapter) adapter=$2 ;;
                --out) out=$2 ;;
                --minutes) minutes=$2 ;;
            esac
            shift 2
            ;;
        -*)
            usage
            exit 2
            ;;
        *)
            program=$1
            shift
            ;;
    esac
done
[[ $minutes =~ ^[1-9][0-9]*$ ]] || die 2 "--minutes $minutes; accepted: a whole number from 1"
# A few seconds are for starting and stopping.
deadline=$((SECONDS + minutes * 60 - 5))

# Without a desktop session Mesa's device-select layer prints errors that are none.
if [[ -z ${XDG_RUNTIME_DIR:-} ]]; then export NODEVICE_SELECT=1; fi

command -v timeout >/dev/null || die 3 "'timeout' of coreutils isn't installed: nothing is run without a limit"

if [[ ! -x $program ]]; then
    die 2 "no program at $program: 'cargo build --release -p tilewise-cli' makes target/release/tilewise, which can be carried here"
fi
if ! version=$(timeout 10 "$program" --version 2>&1); then
    die 3 "$program doesn't run here, built for another system or an older libc than it needs:" "$version"
fi

# The loader: where the dynamic linker looks. (No `| grep -q` with pipefail: it ends the other side with SIGPIPE.)
find_library() {
    local found dir dirs
    found=$( (PATH=$PATH:/sbin:/usr/sbin ldconfig -p 2>/dev/null || true) | sed -n "s|.*[[:space:]]$1 .*=> \(/.*\)|\1|p")
    if [[ -n $found ]]; then
        printf '%s\n' "${found%%$'\n'*}"
        return
    fi
    # The list is empty on a bare container until ldconfig has run, and there is none on musl.
    IFS=: read -ra dirs <<<"${LD_LIBRARY_PATH:-}:/lib:/usr/lib:/lib64:/usr/lib64:/usr/local/lib:/usr/lib/$(uname -m)-linux-gnu"
    for dir in "${dirs[@]}"; do
        if [[ -n $dir && -e $dir/$1 ]]; then
            printf '%s\n' "$dir/$1"
            return
        fi
    done
}
if [[ -z $(find_library libvulkan.so.1) ]]; then
    die 3 "missing: libvulkan.so.1, the Vulkan loader, which the GPU's driver doesn't bring" \
        "  Debian and Ubuntu: package libvulkan1; Fedora: vulkan-loader; Arch: vulkan-icd-loader" \
        "  without a network: unpack that package of any machine with this architecture, and set LD_LIBRARY_PATH to the folder of its library"
fi

# Drivers' manifests, where the loader looks.
manifests() {
    local dir file dirs all
    if [[ -n ${VK_DRIVER_FILES:-${VK_ICD_FILENAMES:-}} ]]; then
        tr : '\n' <<<"${VK_DRIVER_FILES:-$VK_ICD_FILENAMES}"
        return
    fi
    dirs=${XDG_CONFIG_HOME:-${HOME:-}/.config}:${XDG_CONFIG_DIRS:-/etc/xdg}:/etc:/usr/local/etc
    dirs=$dirs:${XDG_DATA_HOME:-${HOME:-}/.local/share}:${XDG_DATA_DIRS:-/usr/local/share:/usr/share}
    IFS=: read -ra all <<<"$dirs"
    for dir in "${all[@]}"; do
        for file in "$dir"/vulkan/icd.d/*.json; do
            if [[ -e $file ]]; then printf '%s\n' "$file"; fi
        done
    done
}
# Containers on managed clusters get NVIDIA's driver in a folder that the loader doesn't know.
mounted=/usr/local/nvidia/share/vulkan/icd.d/nvidia_icd.json
if [[ $adapter == hardware && -z ${VK_DRIVER_FILES:-${VK_ICD_FILENAMES:-}} && -e $mounted && $(manifests) != *nvidia* ]]; then
    export VK_DRIVER_FILES=$mounted
fi

# All that could be why there is no adapter.
explain_adapters() {
    local manifest library nodes=()
    say "Vulkan loader: $(find_library libvulkan.so.1)"
    if [[ -z $(manifests) ]]; then
        say "missing: a Vulkan driver's manifest (vulkan/icd.d/*.json in /etc, /usr/share and /usr/local/share)"
    fi
    while read -r manifest; do
        library=$(sed -n 's/.*"library_path"[[:space:]]*:[[:space:]]*"\([^"]*\)".*/\1/p' "$manifest" 2>/dev/null || true)
        if [[ -z $library ]]; then
            say "driver $manifest: missing, or it names no library"
        elif [[ $library != */* && -z $(find_library "$library") ]]; then
            say "driver $manifest: missing: $library"
        else
            say "driver $manifest: $library"
        fi
    done < <(manifests | sed '/^$/d')
    shopt -s nullglob
    nodes=(/dev/nvidia[0-9]* /dev/dri/renderD* /dev/dx[g])
    shopt -u nullglob
    say "GPU device nodes in /dev: ${nodes[*]:-none: the system shows no GPU to this user}"
    if [[ ${nodes[*]} == */dev/nvidia* ]]; then
        say "an NVIDIA container needs NVIDIA_DRIVER_CAPABILITIES=all (or graphics) for the Vulkan part of its driver"
    fi
}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

say "$version, adapter $adapter, $minutes minutes at most"
if ! timeout -k 5 30 "$program" --adapter "$adapter" info --json >"$work/info.json" 2>"$work/info.err"; then
    say "NO ADAPTER '$adapter' (or it failed, or took over 30 s):"
    sed 's/^/  /' "$work/info.err" >&2
    explain_adapters
    exit 3
fi
device=$(sed -n 's/^  "adapter": "\(.*\)",\{0,1\}$/\1/p' "$work/info.json")
slug=$(tr '[:upper:]' '[:lower:]' <<<"$device" | sed 's/[^a-z0-9]\{1,\}/-/g; s/^-//; s/-$//')
out=${out:-gpu-check/${slug:-unnamed}}
mkdir -p "$out"
rm -f "$out"/{info.txt,verify.txt,tune.txt,tuning.txt,bench.csv,bench.txt,log.txt}
say "device: $device; results go to $out"

log() { printf '%s\n' "$*" | tee -a "$out/log.txt" >&2; }
log "$version on $device, $(uname -srm), $(date -u +%Y-%m-%d)"
failed=()

# step NAME SECONDS FILE COMMAND...: runs the program under that limit, and under what is left of the whole; stdout is added to FILE.
step() {
    local name=$1 limit=$2 file=$3 start=$SECONDS status=0 left=$((deadline - SECONDS))
    shift 3
    if [[ $left -lt 5 ]]; then
        log "SKIPPED $name: no time left of $minutes minutes"
        failed+=("$name (no time left)")
        return
    fi
    if [[ $limit -gt $left ]]; then limit=$left; fi
    log "== $name: tilewise ${*/#"$work"\//}"
    timeout -k 5 "$limit" "$program" --adapter "$adapter" "$@" >>"$out/$file" 2>"$work/err" || status=$?
    cat "$work/err" >>"$out/log.txt"
    case $status in
        0) log "== $name: passed, $((SECONDS - start)) s" ;;
        124 | 137)
            log "OUT OF TIME: $name after $limit s"
            failed+=("$name (out of time)")
            ;;
        *)
            log "FAILED: $name, exit status $status, $((SECONDS - start)) s:"
            tail -n 5 "$work/err" >&2
            failed+=("$name (exit status $status)")
            ;;
    esac
}

# bench NAME ARGUMENTS...: its rows go to bench.csv under one header.
bench() {
    local name=$1
    shift
    rm -f "$work/rows.csv"
    printf '\n%s: tilewise bench %s\n' "$name" "$*" >>"$out/bench.txt"
    step "bench-$name" 90 bench.txt bench --csv "$work/rows.csv" "$@"
    if [[ -e $work/rows.csv ]]; then
        if [[ -e $out/bench.csv ]]; then
            tail -n +2 "$work/rows.csv" >>"$out/bench.csv"
        else
            cp "$work/rows.csv" "$out/bench.csv"
        fi
    fi
}

step info 20 info.txt info
# The rest of the time, more than a third, is for the benches.
step verify $((minutes * 36)) verify.txt verify
tail -n 1 "$out/verify.txt" >&2

if [[ $adapter == hardware ]]; then
    step tune 60 tune.txt tune --save "$out/tuning.txt"
    bench one-head
    bench heads --heads 16 --head-dim 64,128 --q-len 1024,4096,8192
    bench causal --heads 16 --head-dim 64,128 --q-len 4096,16384 --causal --path auto
    bench f16 --heads 16 --head-dim 64,128 --q-len 4096,16384 --dtype f16 --path auto
    bench decode --heads 32 --kv-heads 8 --head-dim 128 --q-len 1 --kv-len 4096,32768
    bench long --q-len 131072 --causal --path auto
    bench matmul --kind matmul --q-len 1024,2048,4096
else
    step tune 60 tune.txt tune --q-len 128 --heads 2 --head-dim 64 --save "$out/tuning.txt"
    bench heads --heads 2 --q-len 128,256 --reps 3
    bench matmul --kind matmul --q-len 256 --reps 3
fi

if [[ ${#failed[@]} != 0 ]]; then
    log "gpu-check: FAILED on $device after $SECONDS s: ${failed[*]}"
    exit 1
fi
log "gpu-check: all passed on $device in $SECONDS s; see $out"
