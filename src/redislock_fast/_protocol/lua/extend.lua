-- Extend: add to the ttl of a lock that is held with this token, or replace it.
-- KEYS[1]  the lock's name
-- ARGV[1]  token
-- ARGV[2]  milliseconds to add
-- ARGV[3]  "0" to add them to the remaining ttl, "1" to replace it
-- ARGV[4]  optional: the longest ttl in milliseconds that may result. A client that does not know whether its first
--          request was executed sends the ttl that one execution would have left, so that a second one adds nothing.
-- returns  1 if the ttl was set, 0 if the lock is not held with this token or has no ttl

-- The value of a contended lock; only tokens that the library made get the contended flag.
local marked = #ARGV[1] == 36 and string.sub(ARGV[1], 1, 4) == 'rlf:' and ARGV[1] .. '+' or nil
local value = redis.call('get', KEYS[1])
if value ~= ARGV[1] and value ~= marked then
    return 0
end
local ttl = redis.call('pttl', KEYS[1])
if ttl < 0 then
    return 0
end
local new_ttl = tonumber(ARGV[2])
if ARGV[3] == '0' then
    new_ttl = new_ttl + ttl
end
if ARGV[4] then
    new_ttl = math.min(new_ttl, tonumber(ARGV[4]))
end
redis.call('pexpire', KEYS[1], string.format('%.0f', new_ttl))
return 1
