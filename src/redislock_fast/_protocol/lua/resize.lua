-- Resize: set or remove the operator's limit of a semaphore, and hand over what is free by it.
-- KEYS     permits, queue, waiters, limit
-- ARGV[1]  how many may hold; empty: as many as each caller says
-- returns  2 if waiters got permits, 1 if none did, 3: the script is to be sent again, since many waiters are to be asked
local kind = redis.call('type', permits).ok
if kind ~= 'zset' and kind ~= 'none' then
    return redis.error_reply('WRONGTYPE Operation against a key holding the wrong kind of value')
end
if ARGV[1] == '' then
    redis.call('del', limit)
else
    redis.call('set', limit, ARGV[1])
end
room = math.huge -- each waiter's own limit, or the operator's, says when it ends
local last = hand_over()
if last == nil then
    return 3
end
return last and 2 or 1
