-- ARGV 3: retention in ms; 4: policy to fingerprint of a record that must be written anew; 5: its lengths of scope, key
-- and origin, and the three; 6: the status, two bytes; 7: the reply; 8: whether a reply that is stored already is written
-- again, so that replicas confirm it.
-- With a retention of 0 the reply is over at once.
-- {1, time, origin}: stored. {2, time}: stored anew. Else {0, value, time to live, time}.
local function store(done)
    if ARGV[3] == '0' then
        redis.call('DEL', KEYS[1])
    else
        redis.call('SET', KEYS[1], done, 'PX', ARGV[3])
    end
end
if own then
    local names = string.byte(value, 109) + string.byte(value, 110)
    local all = names + string.byte(value, 111)
    local done = string.sub(value, 1, 3) .. 'C' .. string.sub(value, 5, 66)
        .. struct.pack('>i8i8i8i8i8', ARGV[3], lease, claimed, created, at)
        .. ARGV[6] .. string.sub(value, 109, 111 + all) .. ARGV[7]
    store(done)
    return {1, at, string.sub(value, 112 + names, 111 + all)}
end
if gone then
    local done = 'oo\1C' .. ARGV[4] .. struct.pack('>i8i8i8i8i8', ARGV[3], 0, 0, 0, at) .. ARGV[6] .. ARGV[5] .. ARGV[7]
    store(done)
    return {2, at}
end
if ARGV[8] == '1' and state == 'C' and left > 0 then
    redis.call('PEXPIREAT', KEYS[1], redis.call('PEXPIRETIME', KEYS[1]))
end
return {0, value, left, at}
