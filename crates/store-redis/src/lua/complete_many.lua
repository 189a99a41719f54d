#!lua flags=allow-oom
-- Completes the records that are as their claims left them, by the same rule as `complete.lua`, which sees to the rest.
-- ARGV 1: retention in ms. For each key, in turn: attempt to fingerprint; lengths of scope, key and origin, and the
-- three; the status, two bytes; the reply. An error is of one key, and of no other: nothing here raises one.
-- The time: all are stored. {time, n, …}: all but these.
local call, find, sub, pack, unpack = redis.pcall, string.find, string.sub, struct.pack, struct.unpack
local now = redis.call('TIME')
local at = now[1] * 1000 + math.floor(now[2] / 1000)
local keys, args, ttl = KEYS, ARGV, ARGV[1]
local left_out
for i = 1, #keys do
    local key, a, done = keys[i], 4 * i - 2, nil
    local value, owner, names = call('GET', key), args[a], args[a + 1]
    -- The text is looked for at its place alone: a value that differs there is short, or is not ours.
    if type(value) == 'string' and sub(value, 1, 4) == 'oo\1P' and find(value, owner, 6, true) == 6
        and find(value, names, 109, true) == 109 then
        local left = call('PTTL', key)
        if type(left) == 'number' and left >= 0 then
            local given, lease, claimed, created = unpack('>i8i8i8i8', value, 67)
            local past = given - left
            if past < 0 then past = 0 end
            done = call('SET', key, 'oo\1C' .. sub(value, 5, 5) .. owner
                .. pack('>i8i8i8i8i8', ttl, lease - past, claimed + past, created + past, at)
                .. args[a + 2] .. names .. args[a + 3], 'PX', ttl).ok
        end
    end
    if not done then
        left_out = left_out or {at}
        left_out[#left_out + 1] = i
    end
end
return left_out or at
