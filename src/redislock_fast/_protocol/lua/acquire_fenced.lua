-- Acquire fenced: take the lock if it is free, and number its holder. Repeated, it gives the same number.
-- KEYS[1]  the lock's name
-- KEYS[2]  fence, a hash that never expires: "number" is the highest number given, "token" the token that has it
-- ARGV[1]  token
-- ARGV[2]  ttl in milliseconds, 0 for none; empty: do not take the lock, only number its holder
-- ARGV[3]  optional: how many numbers the holder gets, in a row; else one. Each request for a token has the same
-- returns  {1, false, number}: the lock was free, and is taken
--          {2, value, number}: it was held with this token
--          of several numbers, the first
--          {0, value or false}: it is another's, or it is free and not to be taken
-- Counts first, then notes the token, then takes the lock: wherever it fails in between, no number is given twice.
local lock, fence = KEYS[1], KEYS[2]
local token, ttl_ms, count = ARGV[1], ARGV[2], tonumber(ARGV[3] or 1)

local function next_number()
    local number = redis.call('hincrby', fence, 'number', count)
    redis.call('hset', fence, 'token', token)
    return number - count + 1
end

-- The value of a contended lock; only tokens that the library made get the contended flag.
local marked = #token == 36 and string.sub(token, 1, 4) == 'rlf:' and token .. '+' or nil
local value = redis.call('get', lock)
if value == token or value == marked then
    local noted = redis.call('hmget', fence, 'token', 'number')
    return {2, value, noted[1] == token and noted[2] - count + 1 or next_number()}
end
if value or ttl_ms == '' then
    return {0, value}
end
local number = next_number()
if ttl_ms == '0' then
    redis.call('set', lock, token)
else
    redis.call('set', lock, token, 'px', ttl_ms)
end
return {1, false, number}
