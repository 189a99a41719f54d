
end
-- KEYS 1: the record; the caller's after it.
-- ARGV 1: the value that is to be replaced (empty: none); 2: the most that may be left of its time to live, or empty;
-- 3: policy to fingerprint; 4: lengths of scope, key and origin, and the three; 5: length of the reply's head, and head;
-- 6: retention in ms; 7: the time to live of an unknown outcome in ms; 8: ms since the record was made; the caller's after it.
-- {1, time, status, body}: it happened. {2, why}: nothing happened. {3, why, time}: it may have happened in part.
-- Else {0, value, time to live, time}.
local OURS = 8
local BODY_BYTES_MAX = 1048576
-- Below what Lua can pass to a call.
local PARTS_MAX = 4096
local READS = {}
for name in string.gmatch([[
    BITCOUNT BITPOS DBSIZE EXISTS EXPIRETIME GEODIST GEOPOS GEOSEARCH GET GETBIT GETRANGE HEXISTS HGET HGETALL HKEYS
    HLEN HMGET HSTRLEN HVALS LINDEX LLEN LPOS LRANGE MGET PEXPIRETIME PTTL SCARD SDIFF SINTER SINTERCARD SISMEMBER
    SMEMBERS SMISMEMBER STRLEN SUNION TIME TTL TYPE XLEN XRANGE XREVRANGE ZCARD ZCOUNT ZLEXCOUNT ZMSCORE ZRANGE ZRANK
    ZREVRANK ZSCORE
]], '%S+') do READS[name] = true end

local now = redis.call('TIME')
local at = now[1] * 1000 + math.floor(now[2] / 1000)
local value = redis.call('GET', KEYS[1])
local left = redis.call('PTTL', KEYS[1])
if (value or '') ~= ARGV[1] or (ARGV[2] ~= '' and left > tonumber(ARGV[2])) then return {0, value, left, at} end

local keys, args, is_key = {}, {}, {}
for i = 2, #KEYS do
    keys[i - 1] = KEYS[i]
    is_key[KEYS[i]] = true
end
for i = OURS + 1, #ARGV do args[i - OURS] = ARGV[i] end

-- The plan: it reads and decides, and changes nothing. Whatever goes wrong here, nothing happened.
local function read(how)
    return function(name, ...)
        if type(name) ~= 'string' or not READS[string.upper(name)] then
            error('a plan only reads, it does not call ' .. tostring(name))
        end
        return redis[how](name, ...)
    end
end
local reads = {
    call = read('call'), pcall = read('pcall'), sha1hex = redis.sha1hex, log = redis.log,
    LOG_WARNING = redis.LOG_WARNING, error_reply = redis.error_reply, status_reply = redis.status_reply,
}
local fine, made = pcall(plan, keys, args, reads)
if not fine then return {2, type(made) == 'table' and made.err or tostring(made)} end
if type(made) ~= 'table' then return {2, 'the plan returns no table'} end
if made.transient then return {2, tostring(made.transient)} end
local status, body, writes = made.status, made.body or '', made.writes or {}
if type(status) ~= 'number' or status ~= math.floor(status) or status < 100 or status > 999 then
    return {2, 'the plan returns no status in 100..999'}
end
if type(body) ~= 'string' or #body > BODY_BYTES_MAX then
    return {2, 'the plan returns a body that is no text, or over 1 MiB'}
end
if type(writes) ~= 'table' then return {2, 'the plan returns writes that are no list'} end
for i = 1, #writes do
    local write = writes[i]
    if type(write) ~= 'table' or type(write[1]) ~= 'string' then return {2, 'write ' .. i .. ' is no command'} end
    if not is_key[write[2]] then return {2, 'write ' .. i .. ' is not to one of the keys'} end
    if #write > PARTS_MAX then return {2, 'write ' .. i .. ' has over ' .. PARTS_MAX .. ' parts: make several of it'} end
    for j = 1, #write do
        local kind = type(write[j])
        if kind ~= 'string' and kind ~= 'number' then return {2, 'write ' .. i .. ' has a part that is no text'} end
        -- As it is written in the plan: without an exponent, and whole up to 2^53.
        if kind == 'number' then write[j] = string.format('%.17g', write[j]) end
    end
    local known, may = pcall(redis.acl_check_cmd, unpack(write))
    if not known or not may then
        return {2, 'write ' .. i .. ' (' .. write[1] .. ') is no command that this user of Redis may call'}
    end
end

-- From here on it is on record that it may have happened. Redis takes nothing back, so this is written first: a write that
-- fails leaves an outcome that is unknown, and what the server refuses as a whole (no memory, no replicas) it refuses here.
local function record(state, ttl, done_at, rest)
    return redis.pcall('SET', KEYS[1], 'oo\1' .. state .. ARGV[3]
        .. struct.pack('>i8i8i8i8i8', ttl, 0, 0, ARGV[8], done_at) .. rest, 'PX', ttl)
end
local marked = record('U', ARGV[7], 0, '\0\0' .. ARGV[4])
if marked.err then return marked end
for i = 1, #writes do
    local done = redis.pcall(unpack(writes[i]))
    if type(done) == 'table' and done.err then
        return {3, 'write ' .. i .. ' (' .. writes[i][1] .. '): ' .. done.err, at}
    end
end
local stored = record('C', ARGV[6], at, struct.pack('>I2', status) .. ARGV[4] .. ARGV[5] .. body)
if stored.err then return {3, 'its record: ' .. stored.err, at} end
return {1, at, status, body}
