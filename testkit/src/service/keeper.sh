# Ends one server when nobody uses it any more, however its users ended, and removes its folder.
#
# keeper.sh FOLDER MUTEX LINGER_SECONDS STOP_SIGNAL
#
# Every user holds a shared lock on FOLDER/users; a lock goes with its process, SIGKILL included. New users come in
# under the lock on MUTEX, so that none comes while the server is taken away.
folder=$1 mutex=$2 linger=$3 signal=$4
exec 8<>"$folder/users" 9<>"$mutex" || exit 1
while :; do
    flock -x 8
    flock -u 8
    sleep "$linger"
    flock -x 9
    flock -n -x 8 && break
    flock -u 9
done
rm -f "$folder/in-use"
flock -u 9

# Whether the process that was noted down is still that process: it works in the folder.
ours() {
    case "$(readlink "/proc/$1/cwd" 2>/dev/null)" in
        "$folder" | "$folder"/*) return 0 ;;
    esac
    return 1
}

read -r pid 2>/dev/null <"$folder/pid" || pid=
if [ -n "$pid" ] && ours "$pid"; then
    kill -CONT "$pid" 2>/dev/null
    kill -"$signal" "$pid" 2>/dev/null
    left=100
    while ours "$pid" && [ "$left" -gt 0 ]; do
        sleep 0.1
        left=$((left - 1))
    done
    if ours "$pid"; then kill -KILL "$pid" 2>/dev/null; fi
fi
rm -rf "$folder"
