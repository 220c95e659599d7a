-- Wait: take what is free, or join the queue. May be repeated: a waiter keeps its place.
-- KEYS     the key, queue, waiters, and for a semaphore its limit
-- ARGV[1]  the waiter's token
-- ARGV[2]  its terms: the ttl in milliseconds, 0 for none; for a semaphore "<ttl_ms>/<limit>"
-- ARGV[3]  "publish" or "spublish"
-- ARGV[4]  the channel on which the waiter listens
-- ARGV[5]  for how many milliseconds the waiter's process counts as awake
-- ARGV[6]  for how many milliseconds the queue is kept
-- ARGV[7]  empty, or the token of another waiter: the script then says whether that is in the queue, and removes
--          waiters at the head whose process sleeps
-- returns  {1, value}: it is the waiter's
--          {0, value, milliseconds until it ends or -1, the time of arrival if the waiter is new in the queue, else 0,
--          and 1 if the waiter of ARGV[7] is in the queue, 2 if it has a permit, else 0}: it is another's. A lock has
--          the contended flag then. A holder whose token says that it listens gets the message "wanted <name>" on its
--          channel
--          {2, value, ttl, ...}: as {0, ...}, but without the flag, since its holder would not hand the lock over
--          {3}: something is free, but too many waiters at the head are gone: the script is to be sent again
local token = ARGV[1]

-- Remove waiters at the head whose process sleeps: what is handed to them would stay with them for its ttl.
-- Where there are too many for one script, the next health check goes on. Returns the terms of the first waiter where
-- that is another one: what it may have decides.
local function pass_over_sleepers(now_ms)
    while passes_left > 0 do
        local first = redis.call('zrange', queue, 0, 0)[1]
        if not first or first == token then
            return
        end
        local entry = redis.call('hget', waiters, 't' .. first)
        local channel = entry and string.match(entry, '^%S+ %a+ (.*)$')
        local awake_until = channel and redis.call('hget', waiters, 'c' .. channel)
        if awake_until and tonumber(awake_until) >= now_ms then
            return string.match(entry, '^%S+')
        end
        redis.call('zrem', queue, first)
        redis.call('hdel', waiters, 't' .. first)
        passes_left = passes_left - 1
    end
end

-- Drop the fields of processes that are gone, once there are many: those among some 200 fields from a random place,
-- since a look at all of them would hold up the server.
local function clean(now_ms, cursor)
    if redis.call('hlen', waiters) <= 3 * redis.call('zcard', queue) + 100 then
        return
    end
    local scanned = redis.pcall('hscan', waiters, cursor, 'count', 200)
    local fields = scanned[2] or {} -- none where HSCAN is forbidden: the hash ends with its ttl
    local useless = {}
    for i = 1, #fields, 2 do
        if string.sub(fields[i], 1, 1) == 'c' and tonumber(fields[i + 1]) < now_ms then
            useless[#useless + 1] = fields[i]
        end
    end
    if useless[1] then
        redis.call('hdel', waiters, unpack(useless))
    end
end

local granted = held(token)
if granted then
    return {1, granted}
end
time = time or redis.call('time')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local is_there = 1
if ARGV[7] == '' then
    redis.call('zrem', queue, '') -- fails for a user that could not leave the queue, and so must not join it
else
    is_there = redis.call('zscore', queue, ARGV[7]) and 1 or holds_beside(ARGV[7]) and 2 or 0
end
local arrival = time[1] * 1000000 + time[2]
local last = redis.call('zrange', queue, -1, -1, 'withscores')[2]
if last and tonumber(last) >= arrival then -- the server's clock was set back, or is not that of a former primary
    arrival = last + 1
end
if redis.call('zadd', queue, 'nx', arrival, token) == 0 then
    arrival = 0
end
redis.call('pexpire', queue, ARGV[6])
local fields = redis.call(
    'hset', waiters,
    't' .. token, ARGV[2] .. ' ' .. ARGV[3] .. ' ' .. ARGV[4],
    'c' .. ARGV[4], string.format('%.0f', now_ms + ARGV[5])
)
if fields == 2 or ARGV[7] ~= '' or time[2] % 64 == 0 then -- the first waiter of its process, or now and then
    clean(now_ms, math.floor(time[2] / 64)) -- not the lowest bits, which are 0 here mostly
    redis.call('pexpire', waiters, ARGV[6])
end
local first_terms
if ARGV[7] ~= '' then
    first_terms = pass_over_sleepers(now_ms)
end
if is_free(first_terms or ARGV[2]) then
    local last, own = hand_over(token)
    if last == false and room > 0 then -- the head cannot be notified: take it out of order
        redis.call('zrem', queue, token)
        redis.call('hdel', waiters, 't' .. token)
        own = admit(token, ARGV[2])
    end
    if own then
        return {1, own}
    end
    if last == nil then
        return {3}
    end
    if ARGV[7] ~= '' then
        pass_over_sleepers(now_ms)
    end
end
local verdict, value = refuse(arrival)
return {verdict, value, next_end(), arrival, is_there}
