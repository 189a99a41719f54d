#!/usr/bin/env bash
# race.sh DBFILE JSONFILE [OPTION…]: ten processes apply one message at the same moment. The last line is `rows=1`.
# Options go on to `onlyonce inbox race`, such as --attempts 40.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
[ $# -ge 2 ] || { printf 'usage: %s DBFILE JSONFILE [OPTION…]\n' "$0" >&2; exit 2; }
. "$here/program.sh"
exec "$ONLYONCE" inbox race "$@"
