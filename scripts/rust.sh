# shellcheck shell=sh
# Sourced by the other scripts, with `root` set: puts cargo on PATH, or says how to get it. Installs nothing.

# rustup writes this file; a shell that wasn't restarted since hasn't read it.
if ! command -v cargo >/dev/null 2>&1 && [ -r "${CARGO_HOME:-${HOME:-}/.cargo}/env" ]; then
    # shellcheck disable=SC1091
    . "${CARGO_HOME:-${HOME:-}/.cargo}/env"
fi

# An older cargo stops at the edition in Cargo.toml with a message that doesn't say what to do.
# shellcheck disable=SC2154 # root: see above
rust_needed=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' "$root/Cargo.toml" | head -n 1)
if ! command -v cargo >/dev/null 2>&1; then
    echo "rust: cargo isn't installed; get Rust $rust_needed or newer from https://www.rust-lang.org/tools/install" >&2
    exit 1
fi
# Asked in the repository: rustup can have another toolchain for it than for where the user is.
rust_minor=$(cd "$root" && cargo --version | sed -n 's/^cargo 1\.\([0-9]*\).*/\1/p')
rust_needed_minor=$(echo "$rust_needed" | sed -n 's/^1\.\([0-9]*\).*/\1/p')
if [ -n "$rust_minor" ] && [ -n "$rust_needed_minor" ] && [ "$rust_minor" -lt "$rust_needed_minor" ]; then
    echo "rust: this is Rust 1.$rust_minor, and $rust_needed or newer is needed: 'rustup update', or https://www.rust-lang.org/tools/install" >&2
    exit 1
fi
