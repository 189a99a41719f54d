#!lua flags=allow-oom
-- Writes a record if it is still what was decided upon.
-- KEYS: record, and an audit list.
-- ARGV: the old value (empty: none); the most that may be left of its time to live, or empty; the new value; its time to
-- live in ms (0: it is over at once); the entry for the audit list; how many entries it keeps.
-- {1}, or {0, value, time to live, time}.
local old = redis.call('GET', KEYS[1])
local left = redis.call('PTTL', KEYS[1])
if (old or '') ~= ARGV[1] or (ARGV[2] ~= '' and left > tonumber(ARGV[2])) then
    local now = redis.call('TIME')
    return {0, old, left, now[1] * 1000 + math.floor(now[2] / 1000)}
end
-- First: a change that cannot be noted is not made.
if KEYS[2] then
    redis.call('LPUSH', KEYS[2], ARGV[5])
    redis.call('LTRIM', KEYS[2], 0, tonumber(ARGV[6]) - 1)
end
if ARGV[4] == '0' then
    redis.call('DEL', KEYS[1])
else
    redis.call('SET', KEYS[1], ARGV[3], 'PX', ARGV[4])
end
return {1}
