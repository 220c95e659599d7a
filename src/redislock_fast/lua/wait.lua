-- Wait: take the lock, or stand in the queue for it. May be repeated: a waiter keeps his place.
-- KEYS[1]  the lock's name
-- KEYS[2]  queue
-- KEYS[3]  waiters
-- ARGV[1]  the waiter's token
-- ARGV[2]  ttl in milliseconds, 0 for none
-- ARGV[3]  "publish" or "spublish"
-- ARGV[4]  the channel on which the waiter listens
-- ARGV[5]  for how many milliseconds his process counts as awake
-- ARGV[6]  for how many milliseconds the queue is kept
-- returns  {1, value}: the lock is the waiter's
--          {0, value, ttl in milliseconds or -1, 1 if he stood in the queue already}: it is not, and is marked
--          {2, value, ttl, ...}: likewise, but it is not marked, since its holder would not hand it over

-- Drop the channels of processes that are gone, once they are many.
local function forget_sleepers(queue, waiters, now_ms)
    if redis.call('hlen', waiters) > 2 * redis.call('zcard', queue) + 64 then
        local fields = redis.call('hgetall', waiters)
        for i = 1, #fields, 2 do
            if string.sub(fields[i], 1, 1) == 'c' and tonumber(fields[i + 1]) < now_ms then
                redis.call('hdel', waiters, fields[i])
            end
        end
    end
end

local lock, queue, waiters = KEYS[1], KEYS[2], KEYS[3]
local token = ARGV[1]
local value = redis.call('get', lock)
if value and is_held_with(value, token) then
    return {1, value}
end
local now = now_us()
local is_new = redis.call('zadd', queue, 'nx', now, token)
redis.call(
    'hset', waiters,
    't' .. token, ARGV[2] .. ' ' .. ARGV[3] .. ' ' .. ARGV[4],
    'c' .. ARGV[4], string.format('%.0f', now / 1000 + tonumber(ARGV[5]))
)
if now % 64 == 0 then
    forget_sleepers(queue, waiters, now / 1000)
end
redis.call('pexpire', queue, ARGV[6])
redis.call('pexpire', waiters, ARGV[6])
if not value then
    value = hand_over(lock, queue, waiters, token)
    if not value then -- the head cannot be told: better out of order than not at all
        redis.call('zrem', queue, token)
        redis.call('hdel', waiters, 't' .. token)
        value = give(lock, waiters, word_for(token, queue), ARGV[2])
    end
    if is_held_with(value, token) then
        return {1, value}
    end
end
local holder = value
if string.sub(value, -1) == '+' then
    holder = string.sub(value, 1, -2)
end
local verdict = 0
if #holder ~= 36 or string.sub(holder, 1, 4) ~= 'rlf:' then
    verdict = 2
elseif holder == value then
    redis.call('append', lock, '+')
end
return {verdict, value, redis.call('pttl', lock), 1 - is_new}
