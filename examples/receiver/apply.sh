#!/usr/bin/env bash
# apply.sh DBFILE JSONFILE [OPTION…]: applies one message if it is new. Line 1 is `applied` or `duplicate`, line 2 the
# stored response. Options go on to `onlyonce inbox apply`, such as --via retry.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
[ $# -ge 2 ] || { printf 'usage: %s DBFILE JSONFILE [OPTION…]\n' "$0" >&2; exit 2; }
. "$here/program.sh"
exec "$ONLYONCE" inbox apply "$@"
