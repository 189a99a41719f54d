#!/usr/bin/env bash
# purge.sh DBFILE DAYS [OPTION…]: removes rows older than DAYS days, by their date alone. The last line is
# `deleted=N remain=M`. Options go on to `onlyonce inbox purge`, such as --dry-run.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
[ $# -ge 2 ] || { printf 'usage: %s DBFILE DAYS [OPTION…]\n' "$0" >&2; exit 2; }
. "$here/program.sh"
exec "$ONLYONCE" inbox purge "$@"
