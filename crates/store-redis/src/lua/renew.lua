-- ARGV 3: the lease in ms; 4: the least time to live in ms.
-- {1}: renewed. Else {0, value, time to live, time}.
if own then
    ttl = math.max(ttl, tonumber(ARGV[4]))
    local new = string.sub(value, 1, 3) .. 'P' .. string.sub(value, 5, 66)
        .. struct.pack('>i8i8i8i8', ttl, ARGV[3], claimed, created) .. string.sub(value, 99)
    redis.call('SET', KEYS[1], new, 'PX', string.format('%.0f', ttl))
    return {1}
end
return {0, value, left, at}
