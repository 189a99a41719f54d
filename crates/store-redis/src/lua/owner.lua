-- What the scripts of an owner share: whether the record is there, and is its own. The places are those of `row.rs`.
-- ARGV 1: lengths of scope and key, and both; ARGV 2: the token.
local now = redis.call('TIME')
local at = now[1] * 1000 + math.floor(now[2] / 1000)
local value = redis.call('GET', KEYS[1])
local left = redis.call('PTTL', KEYS[1])
local state = value and string.sub(value, 1, 3) == 'oo\1' and string.sub(value, 4, 4)
-- Redis drops it a millisecond after its end.
local gone = not value or (state == 'C' and left == 0)
local own = (state == 'P' or state == 'U') and string.sub(value, 10, 25) == ARGV[2]
    and string.sub(value, 109, 110) == string.sub(ARGV[1], 1, 2)
    and string.sub(value, 112, 109 + #ARGV[1]) == string.sub(ARGV[1], 3)
local ttl, lease, claimed, created
if own then
    ttl, lease, claimed, created = struct.unpack('>i8i8i8i8', value, 67)
    local past = left < 0 and 0 or math.max(ttl - left, 0)
    lease, claimed, created = lease - past, claimed + past, created + past
end
