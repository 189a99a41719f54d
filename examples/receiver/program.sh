# Sourced by the scripts beside it: sets ONLYONCE to the program, built when it is not there yet.
# Another one is taken when the caller sets ONLYONCE to its path.
if [ -z "${ONLYONCE:-}" ]; then
    repository=$(cd "$here/../.." && pwd)
    ONLYONCE=${CARGO_TARGET_DIR:-$repository/target}/release/onlyonce
    if [ ! -x "$ONLYONCE" ]; then
        if ! command -v cargo >/dev/null 2>&1; then
            printf '%s: no program yet and no cargo to build it: install Rust from https://rustup.rs, or set ONLYONCE\n' "$0" >&2
            exit 74
        fi
        printf '%s: building the program once, a few minutes\n' "$0" >&2
        # Only results belong on standard output.
        (cd "$repository" && cargo build --locked --release -p onlyonce-cli) >&2 || exit 74
    fi
fi
