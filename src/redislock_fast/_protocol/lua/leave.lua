-- Leave: give up waiting.
-- KEYS     the key, queue, waiters, and for a semaphore its limit
-- ARGV[1]  token
-- ARGV[2]  what to do with what was granted meanwhile: "keep" or "pass on"; with "keep", what is free is given to the
--          first in the queue, or to the waiter; it stays free where too many waiters at the head are gone
-- ARGV[3]  with "keep": the waiter's terms, as in wait.lua
-- returns  what was granted and kept, else nil
local token = ARGV[1]
if ARGV[2] == 'keep' and has_ended() and hand_over(token) == false and room > 0 then
    admit(token, ARGV[3])
end
redis.call('zrem', queue, token)
redis.pcall('hdel', waiters, 't' .. token) -- where it is forbidden, the field ends with the hash
if redis.call('zcard', queue) == 0 then
    drop()
end
local given = held(token)
if given then
    if ARGV[2] == 'keep' then
        return given
    end
    begin_release(token)
    if hand_over() == nil then -- no client goes on: a health check of a waiter hands over
        remove(token)
    end
end
return false
