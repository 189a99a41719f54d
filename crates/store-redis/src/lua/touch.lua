#!lua flags=allow-oom
-- Writes nothing new, but a write: what was written before it has arrived where it has.
local ends = redis.call('PEXPIRETIME', KEYS[1])
if ends > 0 then redis.call('PEXPIREAT', KEYS[1], ends) end
return ends
