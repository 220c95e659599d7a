-- Leave: give up waiting.
-- KEYS[1]  the lock's name
-- KEYS[2]  queue
-- KEYS[3]  waiters
-- ARGV[1]  token
-- ARGV[2]  what to do with a lock that was granted meanwhile: "keep" or "pass on"; with "keep", a free lock is given to
--          the first in the queue, or to the waiter; it stays free where too many waiters at the head are gone
-- ARGV[3]  with "keep": ttl in milliseconds, 0 for none
-- returns  the lock's value if it was granted and kept, else nil
local value
if ARGV[2] == 'keep' and redis.call('pttl', KEYS[1]) == -2 then -- there is no such key
    value = hand_over(KEYS[1], KEYS[2], KEYS[3], ARGV[1])
    if value == false then
        value = give(KEYS[1], ARGV[1], ARGV[3])
    end
end
redis.call('zrem', KEYS[2], ARGV[1])
redis.pcall('hdel', KEYS[3], 't' .. ARGV[1]) -- where it is forbidden, the field ends with the hash
if redis.call('zcard', KEYS[2]) == 0 then
    drop(KEYS[3])
end
value = value or redis.call('get', KEYS[1])
if value and is_held_with(value, ARGV[1]) then
    if ARGV[2] == 'keep' then
        return value
    end
    if hand_over(KEYS[1], KEYS[2], KEYS[3]) == nil then -- no client goes on: a health check of a waiter hands over
        redis.call('del', KEYS[1])
    end
end
return false
