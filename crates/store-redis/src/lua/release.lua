-- {1}: gone. Else {0, value, time to live, time}.
if own then
    redis.call('DEL', KEYS[1])
    return {1}
end
return {0, value, left, at}
