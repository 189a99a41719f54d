# Runs a cluster of six until it is told to end: three masters, and a replica of each.
#
# cluster.sh FOLDER SERVER CLI PORT…   (six ports; each node has a folder FOLDER/PORT with redis.conf and its bus port)
folder=$1 server=$2 cli=$3
shift 3
pids=
trap 'kill -KILL $pids 2>/dev/null; exit 0' TERM INT
for port in "$@"; do
    "$server" "$folder/$port/redis.conf" &
    pids="$pids $!"
done

ask() {
    local port=$1
    shift
    "$cli" -p "$port" "$@"
}

# A node that ended (its port was taken) never answers; its log says why.
until_ok() {
    until "$@" | grep -q '^OK\|^PONG'; do
        for pid in $pids; do
            kill -0 "$pid" 2>/dev/null || { kill -KILL $pids 2>/dev/null; exit 1; }
        done
        sleep 0.02
    done
}

epoch=0
for port in "$@"; do
    until_ok ask "$port" ping
    epoch=$((epoch + 1))
    until_ok ask "$port" cluster set-config-epoch "$epoch"
    for other in "$@"; do
        [ "$other" = "$port" ] && break
        until_ok ask "$port" cluster meet 127.0.0.1 "$other" "$(cat "$folder/$other/bus-port")"
    done
done
until_ok ask "$1" cluster addslotsrange 0 5460
until_ok ask "$2" cluster addslotsrange 5461 10921
until_ok ask "$3" cluster addslotsrange 10922 16383
until_ok ask "$4" cluster replicate "$(ask "$1" cluster myid)"
until_ok ask "$5" cluster replicate "$(ask "$2" cluster myid)"
until_ok ask "$6" cluster replicate "$(ask "$3" cluster myid)"
for port in "$1" "$2" "$3"; do
    until ask "$port" wait 1 100 | grep -q '^1'; do :; done
done
for port in "$@"; do
    until ask "$port" cluster info | grep -q 'cluster_state:ok'; do sleep 0.02; done
done
echo ready >"$folder/formed"
wait
