#!/bin/sh
# Runs the tests, with a GPU required: where no adapter is found they fail, rather than skip themselves.
#
#   scripts/test.sh                             everything
#   scripts/test.sh -p tilewise --test gpu      arguments go to `cargo test`, in the place of --workspace
#   scripts/drivers.sh swiftshader scripts/test.sh -p tilewise --test gpu smoke      on another driver
#
# The dev profile, which Cargo.toml optimises a little: the CPU reference is slow without, and what the GPU tests wait for is the driver.
# Environment: REQUIRE_GPU=0 lets GPU tests skip; VK_DRIVER_FILES chooses a Vulkan driver by its manifest; CARGO_TARGET_DIR as ever.
set -eu
root=$(CDPATH='' cd "$(dirname "$0")/.." && pwd)

# shellcheck source=scripts/rust.sh
. "$root/scripts/rust.sh"
# Without a desktop session Mesa's device-select layer prints errors that are none.
if [ -z "${XDG_RUNTIME_DIR:-}" ]; then export NODEVICE_SELECT=1; fi
export REQUIRE_GPU="${REQUIRE_GPU:-1}"
if [ "$REQUIRE_GPU" != 0 ]; then
    "$root/scripts/vulkan.sh"
fi
cd "$root"
if [ $# = 0 ]; then
    set -- --workspace --no-fail-fast
fi
exec cargo test "$@"
