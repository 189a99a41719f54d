#!/usr/bin/env bash
# drill.sh OUTDIR: each promise of the payment service, tried with curl against a private Redis.
#
#   OUTDIR/double.out      without keys the same request twice charges twice
#   OUTDIR/dedup.out       with a key it charges once
#   OUTDIR/concurrent.out  two at once: one is processed
#   OUTDIR/mismatch.out    the same key with another amount
#   OUTDIR/ttl.txt         for how long the key is kept
#
# The service is the program in target/release, built when it is not there; PAY names another one. What is started here is
# stopped here, by its own process id.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
[ $# -eq 1 ] || { printf 'usage: %s OUTDIR\n' "$0" >&2; exit 2; }
for tool in redis-server redis-cli curl; do
    command -v "$tool" >/dev/null 2>&1 || {
        printf '%s: needs %s: apt-get install redis-server redis-tools curl\n' "$0" "$tool" >&2
        exit 2
    }
done
mkdir -p "$1"
out=$(cd "$1" && pwd)
if [ -z "${PAY:-}" ]; then
    repository=$(cd "$here/../.." && pwd)
    PAY=${CARGO_TARGET_DIR:-$repository/target}/release/pay
    if [ ! -x "$PAY" ]; then
        printf '%s: building the service once, a few minutes\n' "$0" >&2
        (cd "$repository" && cargo build --locked --release -p pay) >&2
    fi
fi

work=$(mktemp -d)
redis_pid='' pay_pid=''
stop() {
    [ -z "$pay_pid" ] || { kill "$pay_pid" 2>/dev/null && wait "$pay_pid" 2>/dev/null || true; }
    [ -z "$redis_pid" ] || { kill "$redis_pid" 2>/dev/null && wait "$redis_pid" 2>/dev/null || true; }
    rm -rf "$work"
}
trap stop EXIT

fail() {
    printf '%s: %s\n' "$0" "$*" >&2
    tail -n 5 "$work"/*.log >&2 2>/dev/null || true
    exit 1
}

# wait_for WHAT COMMAND…: up to 30 seconds.
wait_for() {
    local what=$1 i
    shift
    for ((i = 0; i < 300; i++)); do
        "$@" >/dev/null 2>&1 && return 0
        sleep 0.1
    done
    fail "$what did not come up"
}

redis() { redis-cli -p "$redis_port" "$@"; }

# A port that somebody else has ends the server at once; then the next one is tried.
start_redis() {
    local try
    for ((try = 0; try < 20; try++)); do
        redis_port=$((20000 + RANDOM % 40000))
        redis-server --bind 127.0.0.1 --port "$redis_port" --dir "$work" --save '' --appendonly yes --appendfsync always \
            >"$work/redis.log" 2>&1 &
        redis_pid=$!
        wait_for redis-server bash -c "grep -q 'Ready to accept' '$work/redis.log' || ! kill -0 $redis_pid"
        kill -0 "$redis_pid" 2>/dev/null && return 0
    done
    fail 'redis-server does not start'
}

# start_pay OPTION…: a fresh service, and with it a balance of 10000.
start_pay() {
    if [ -n "$pay_pid" ]; then
        kill "$pay_pid"
        wait "$pay_pid" || true
    fi
    # The records of the last service would answer for this one.
    redis flushall >/dev/null
    : >"$work/pay.log"
    "$PAY" --listen 127.0.0.1:0 --redis "redis://127.0.0.1:$redis_port" "$@" >"$work/pay.log" 2>&1 &
    pay_pid=$!
    wait_for 'the payment service' bash -c "grep -q 'listening on http://' '$work/pay.log' || ! kill -0 $pay_pid"
    url=$(sed -n 's/.*listening on \(http:.*\)/\1/p' "$work/pay.log")
    [ -n "$url" ] || fail 'the payment service does not start'
}

# pay BODY [KEY [FILE]]: prints the status; the answer goes to FILE, its headers to FILE.headers.
pay() {
    local file=${3:-$work/answer} key=()
    [ -z "${2:-}" ] || key=(-H "Idempotency-Key: $2")
    curl -sS --max-time 20 -o "$file" -D "$file.headers" -w '%{http_code}' -X POST "$url/pay" \
        -H 'Content-Type: application/json' "${key[@]}" -d "$1"
}

balance() { redis get balance; }

# expect WHAT WANTED GOT
expect() {
    [ "$2" = "$3" ] || fail "$1: expected $2, got $3"
    printf '  %-52s %s\n' "$1" "$3"
}

start_redis

printf 'without idempotency\n'
start_pay --unprotected
before=$(balance)
pay '{"amount":100}' order-1 >/dev/null
pay '{"amount":100}' order-1 >/dev/null
printf 'balance_before=%s balance_after=%s\n' "$before" "$(balance)" >"$out/double.out"
expect 'the same request twice' 'balance_before=10000 balance_after=9800' "$(cat "$out/double.out")"

printf 'with idempotency\n'
start_pay
expect 'no key' 400 "$(pay '{"amount":100}')"
calls=0
for copy in first second; do
    expect "$copy" 200 "$(pay '{"amount":100}' order-1 "$work/$copy")"
    calls=$((calls + 1))
done
cmp "$work/first" "$work/second" || fail 'the second answer is not the first one'
expect 'the answer' '{"charged":100,"balance":9900}' "$(cat "$work/first")"
printf 'balance_after=%s calls=%s\n' "$(balance)" "$calls" >"$out/dedup.out"
expect 'the same request twice' 'balance_after=9900 calls=2' "$(cat "$out/dedup.out")"

printf 'ttl=%s\n' "$(redis ttl idem:order-1)" >"$out/ttl.txt"
ttl=$(sed 's/ttl=//' "$out/ttl.txt")
[ "$ttl" -gt 0 ] && [ "$ttl" -le 86400 ] || fail "the key is kept for $ttl s"
printf '  %-52s %s\n' 'the key is kept for' "ttl=$ttl"

printf 'status=%s\n' "$(pay '{"amount":200}' order-1)" >"$out/mismatch.out"
expect 'the same key, another amount' 'status=422' "$(cat "$out/mismatch.out")"
expect 'and nothing was charged' 9900 "$(balance)"

before=$(balance)
pids=()
for copy in a b; do
    pay '{"amount":100}' order-2 "$work/$copy" >"$work/$copy.status" &
    pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid" || fail 'a concurrent request failed'; done
# Whoever was not processed is told so: a replay says that it is one.
processed=0
for copy in a b; do
    if [ "$(cat "$work/$copy.status")" = 200 ] && ! grep -qi '^idempotency-replayed: true' "$work/$copy.headers"; then
        processed=$((processed + 1))
    fi
done
printf 'processed=%s balance_delta=%s\n' "$processed" "$((before - $(balance)))" >"$out/concurrent.out"
expect 'two at once' 'processed=1 balance_delta=100' "$(cat "$out/concurrent.out")"
cmp "$work/a" "$work/b" || fail 'the two got different answers'

printf 'failures\n'
expect 'more than there is' 402 "$(pay '{"amount":1000000}' order-3 "$work/poor")"
redis set balance 5000000 >/dev/null
expect 'asked again when there is enough' 402 "$(pay '{"amount":1000000}' order-3 "$work/poor-again")"
cmp "$work/poor" "$work/poor-again" || fail 'a stored failure changed'
start_pay --fail-next timeout
expect 'a charge that times out' 503 "$(pay '{"amount":100}' order-4)"
expect 'nothing was charged' 10000 "$(balance)"
expect 'the same request again really runs' 200 "$(pay '{"amount":100}' order-4)"
expect 'and charges' 9900 "$(balance)"
for bad in '{"amount":0}' '{"amount":-100}' '{"amount":0.5}' '{"amount":"100"}' '{"amount":1e30}' '{}' '{"amount":1,"amount":2}'; do
    expect "$bad" 400 "$(pay "$bad" order-5)"
done
expect 'and nothing was charged' 9900 "$(balance)"

printf 'written to %s: double.out dedup.out concurrent.out mismatch.out ttl.txt\n' "$out"
