#!lua flags=allow-oom
-- The value, what is left of its time to live in ms (-2: no record), and the time in Unix ms. Not read-only by its
-- flags, so that a replica refuses it: what it would say is old.
local now = redis.call('TIME')
return {redis.call('GET', KEYS[1]), redis.call('PTTL', KEYS[1]), now[1] * 1000 + math.floor(now[2] / 1000)}
