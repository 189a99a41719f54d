#!/usr/bin/env bash
# run.sh: the shop on a private PostgreSQL, tried with curl: an order twice, a declined one, a crash between charge and commit.
#
# The shop is the program in target/release, built when it is not there; ORDERS names another one. What is started here is
# stopped here, by its own process id.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
PATH="$PATH:$(printf '%s:' /usr/lib/postgresql/*/bin)"
for tool in initdb postgres psql curl; do
    command -v "$tool" >/dev/null 2>&1 || {
        printf '%s: needs %s: apt-get install postgresql postgresql-client curl\n' "$0" "$tool" >&2
        exit 2
    }
done
if [ -z "${ORDERS:-}" ]; then
    repository=$(cd "$here/../.." && pwd)
    ORDERS=${CARGO_TARGET_DIR:-$repository/target}/release/orders
    if [ ! -x "$ORDERS" ]; then
        printf '%s: building the shop once, a few minutes\n' "$0" >&2
        (cd "$repository" && cargo build --locked --release -p orders) >&2
    fi
fi

work=$(mktemp -d)
pids=()
stop() {
    local pid
    for pid in "${pids[@]}"; do
        kill -INT "$pid" 2>/dev/null && wait "$pid" 2>/dev/null || true
    done
    rm -rf "$work"
}
trap stop EXIT

fail() {
    printf '%s: %s\n' "$0" "$*" >&2
    tail -n 5 "$work"/*.log >&2 2>/dev/null || true
    exit 1
}

# wait_for WHAT COMMAND…: up to 60 seconds.
wait_for() {
    local what=$1 i
    shift
    for ((i = 0; i < 600; i++)); do
        "$@" >/dev/null 2>&1 && return 0
        sleep 0.1
    done
    fail "$what did not come up"
}

# The server does not run as root.
as=()
if [ "$(id -u)" -eq 0 ]; then
    chown postgres "$work"
    as=(setpriv --reuid postgres --regid postgres --clear-groups)
fi
cd "$work"
"${as[@]}" initdb --auth=trust --encoding=UTF8 --username=postgres -D "$work/data" >"$work/initdb.log" 2>&1 ||
    fail 'initdb failed'
# A port that somebody else has ends the server at once; then the next one is tried.
for ((try = 0; try < 20; try++)); do
    port=$((20000 + RANDOM % 40000))
    "${as[@]}" postgres -D "$work/data" -c listen_addresses=127.0.0.1 -c port=$port -c unix_socket_directories= \
        >"$work/postgres.log" 2>&1 &
    server=$!
    wait_for postgres bash -c "grep -q 'ready to accept' '$work/postgres.log' || ! kill -0 $server"
    kill -0 "$server" 2>/dev/null && break
done
pids+=("$server")
url="postgres://postgres@127.0.0.1:$port/postgres"

# start NAME ARGUMENT…: sets `address` and `pid`.
start() {
    local name=$1
    shift
    "$ORDERS" "$@" --listen 127.0.0.1:0 >"$work/$name.log" 2>&1 &
    pid=$!
    pids+=("$pid")
    wait_for "$name" grep -q 'listening on' "$work/$name.log"
    address=$(sed -n 's|.*listening on http://||p' "$work/$name.log")
}

# order KEY AMOUNT: the status and the body.
order() {
    curl -s -m 30 -X POST "http://$shop/orders" -H "Idempotency-Key: \"$1\"" -d "{\"item\":\"tea\",\"amount\":$2}" \
        -o "$work/body" -w '%{http_code} ' && cat "$work/body"
}

count() { psql -qAt "$url" -c "select count(*) from $1"; }
charges() { curl -s "http://$provider/charges" | sed -n 's/.*"charges":\([0-9]*\).*/\1/p'; }

start provider provider
provider=$address
start shop serve --database "$url" --provider "$provider"
shop=$address
printf 'first: %s\n' "$(order order-1 3)"
printf 'again: %s\n' "$(order order-1 3)"
printf 'another order: %.3s\n' "$(order order-1 4)"
printf 'declined: %.3s\n' "$(order order-2 5000)"

start crashing serve --database "$url" --provider "$provider" --stop-before-commit
crashing=$pid
curl -s -m 60 -X POST "http://$address/orders" -H 'Idempotency-Key: "order-3"' -d '{"item":"tea","amount":3}' >/dev/null &
asked=$!
wait_for 'the charge' grep -q 'not committed' "$work/crashing.log"
kill -9 "$crashing"
wait "$crashing" 2>/dev/null || true
wait "$asked" || true
printf 'killed between charge and commit: orders=%s charges=%s\n' "$(count orders)" "$(charges)"
printf 'retried: %s\n' "$(order order-3 3)"
printf 'at the end: orders=%s payments=%s charges=%s\n' "$(count orders)" "$(count payments)" "$(charges)"
