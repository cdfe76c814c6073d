#!/bin/sh
# Builds the program `tilewise` (release) and runs it, on a machine as it comes.
#
#   scripts/run.sh                        the short bench: tiled attention against naive
#   scripts/run.sh verify --json          any command line of the program; paths are relative to where you are
#
# A machine with no Vulkan device gets Mesa's software one: see scripts/vulkan.sh. Rust isn't installed for you.
# Environment: VK_DRIVER_FILES chooses a Vulkan driver by its manifest (scripts/drivers.sh fetches some); CARGO_TARGET_DIR as ever.
set -eu
root=$(CDPATH='' cd "$(dirname "$0")/.." && pwd)

# shellcheck source=scripts/rust.sh
. "$root/scripts/rust.sh"
# Without a desktop session Mesa's device-select layer prints errors that are none.
if [ -z "${XDG_RUNTIME_DIR:-}" ]; then export NODEVICE_SELECT=1; fi
"$root/scripts/vulkan.sh"
exec cargo run --release --manifest-path "$root/Cargo.toml" --bin tilewise -- "$@"
