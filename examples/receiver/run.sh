#!/usr/bin/env bash
# run.sh OUTDIR: a week of messages through the receiver, one process a message, then once more in bulk.
#
#   OUTDIR/idem.db     every file of messages/ through apply.sh, in the order in which they came
#   OUTDIR/dup.txt     the msg_ids that were ignored as duplicates, each once, ascending
#   OUTDIR/race.txt    one message applied by ten processes at once
#   OUTDIR/replay.txt  one message sent again: the answer is the first one, byte for byte
#   OUTDIR/paths.txt   each duplicate, by which path it came, and whether it said the same
#   OUTDIR/keys.txt    how many messages another choice of key would have kept
#   OUTDIR/warnings.txt  what the receiver warned of: the conflicts
#   OUTDIR/bulk.db     the same folder by `onlyonce inbox load`; it must agree with idem.db
set -euo pipefail
export LC_ALL=C
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
[ $# -eq 1 ] || { printf 'usage: %s OUTDIR\n' "$0" >&2; exit 2; }
mkdir -p "$1"
out=$(cd "$1" && pwd)
for file in idem.db bulk.db race.db; do
    if [ -e "$out/$file" ]; then
        printf '%s: %s is there from an earlier run; give an empty folder\n' "$0" "$out/$file" >&2
        exit 2
    fi
done
command -v sqlite3 >/dev/null 2>&1 || { printf '%s: needs the sqlite3 shell: apt-get install sqlite3\n' "$0" >&2; exit 2; }
. "$here/program.sh"
export ONLYONCE

fail() {
    printf '%s: %s\n' "$0" "$*" >&2
    exit 1
}

# NNN.PATH.MSGID.json: the number in which it came and the path by which it came, as the transport wrote them down.
applied=0 duplicates=0
printf 'one process a message\n'
for message in "$here"/messages/*.json; do
    name=${message##*/}
    via=${name#*.}
    via=${via%%.*}
    answer=$("$here/apply.sh" "$out/idem.db" "$message" --via "$via" 2>>"$out/warnings.txt") || fail "$name: exit $?"
    case ${answer%%$'\n'*} in
        applied) applied=$((applied + 1)) ;;
        duplicate)
            duplicates=$((duplicates + 1))
            id=${name#*.*.}
            printf '%s\n' "${id%.json}" >>"$out/ignored.txt"
            ;;
        *) fail "$name: neither applied nor duplicate: $answer" ;;
    esac
done
sort -u "$out/ignored.txt" >"$out/dup.txt"
rm "$out/ignored.txt"
printf '  applied=%d duplicates=%d distinct=%d\n' "$applied" "$duplicates" "$(wc -l <"$out/dup.txt")"

printf 'the same folder in bulk\n'
"$ONLYONCE" inbox load "$out/bulk.db" "$here/messages" --duplicates "$out/dup-bulk.txt" 2>>"$out/warnings.txt" | sed 's/^/  /'
cmp "$out/dup.txt" "$out/dup-bulk.txt" || fail 'the two ways ignored other messages'
rm "$out/dup-bulk.txt"
# created_at is the time of each run; everything else must be equal, and so must the verdicts in the delivery log.
rows() {
    sqlite3 "$out/$1.db" "SELECT msg_id, biz_key, status, response FROM inbox_log ORDER BY msg_id;
        SELECT msg_id, verdict, hex(digest) FROM inbox_deliveries ORDER BY msg_id, id;"
}
cmp <(rows idem) <(rows bulk) || fail 'idem.db and bulk.db differ'
printf '  idem.db and bulk.db agree: %d rows, %d deliveries\n' \
    "$(sqlite3 "$out/idem.db" 'SELECT count(*) FROM inbox_log')" \
    "$(sqlite3 "$out/idem.db" 'SELECT count(*) FROM inbox_deliveries')"

printf 'by which path the duplicates came\n'
"$ONLYONCE" inbox duplicates "$out/idem.db" >"$out/paths.txt"
"$ONLYONCE" inbox duplicates "$out/idem.db" --by-path | sed 's/^/  /'

printf 'ten processes, one message\n'
messages=("$here"/messages/*.json)
"$here/race.sh" "$out/race.db" "${messages[0]}" >"$out/race.txt" || fail 'the race was lost'
sed 's/^/  /' "$out/race.txt"

printf 'sent again, answered the same\n'
message=${messages[1]}
{
    printf 'message=%s\n' "${message##*/}"
    for send in second third; do
        printf '%s: ' "$send"
        "$here/apply.sh" "$out/idem.db" "$message" --via manual | paste -sd ' ' -
    done
    "$ONLYONCE" inbox verify "$out/idem.db" "$message"
} >"$out/replay.txt" || fail 'the replay was another answer'
sed 's/^/  /' "$out/replay.txt"

printf 'what another key would have done (key.md)\n'
for key in msg_id '{sender}/{sent_date}/{msg_no}' order_no msg_no; do
    "$ONLYONCE" inbox load "$out/key.db" "$here/messages" --key "$key" 2>/dev/null | tail -n 1 |
        sed "s|^|  $key: |"
    rm -f "$out/key.db" "$out/key.db-wal" "$out/key.db-shm"
done | tee "$out/keys.txt"

printf 'written to %s: idem.db bulk.db dup.txt race.txt replay.txt paths.txt keys.txt warnings.txt\n' "$out"
