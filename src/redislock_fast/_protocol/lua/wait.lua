-- Wait: take the lock, or join its queue. May be repeated: a waiter keeps its place.
-- KEYS[1]  the lock's name
-- KEYS[2]  queue
-- KEYS[3]  waiters
-- ARGV[1]  the waiter's token
-- ARGV[2]  ttl in milliseconds, 0 for none
-- ARGV[3]  "publish" or "spublish"
-- ARGV[4]  the channel on which the waiter listens
-- ARGV[5]  for how many milliseconds the waiter's process counts as awake
-- ARGV[6]  for how many milliseconds the queue is kept
-- ARGV[7]  empty, or the token of another waiter: the script then says whether that is in the queue, and removes
--          waiters at the head whose process sleeps
-- returns  {1, value}: the lock is the waiter's
--          {0, value, ttl in milliseconds or -1, the time of arrival if the waiter is new in the queue, else 0, and 1
--          if the waiter of ARGV[7] is in the queue}: the lock is another's, and has the contended flag
--          A holder whose token says that it listens gets the message "wanted <name>" on its channel
--          {2, value, ttl, ...}: as {0, ...}, but without the flag, since its holder would not hand the lock over
--          {3}: the lock is free, but too many waiters at the head are gone: the script is to be sent again
local lock, queue, waiters = KEYS[1], KEYS[2], KEYS[3]
local token = ARGV[1]

-- Remove waiters at the head whose process sleeps: a lock that is handed to them would stay with them for its ttl.
-- Where there are too many for one script, the next health check goes on.
local function pass_over_sleepers(now_ms)
    while passes_left > 0 do
        local first = redis.call('zrange', queue, 0, 0)[1]
        if not first or first == token then
            return
        end
        local entry = redis.call('hget', waiters, 't' .. first)
        local channel = entry and string.match(entry, '^%d+ %a+ (.*)$')
        local awake_until = channel and redis.call('hget', waiters, 'c' .. channel)
        if awake_until and tonumber(awake_until) >= now_ms then
            return
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

local value = redis.call('get', lock)
if value and is_held_with(value, token) then
    return {1, value}
end
local time = redis.call('time')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local is_there = 1
if ARGV[7] == '' then
    redis.call('zrem', queue, '') -- fails for a user that could not leave the queue, and so must not join it
else
    is_there = redis.call('zscore', queue, ARGV[7]) and 1 or 0
end
local arrival = time[1] * 1000000 + time[2]
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
if ARGV[7] ~= '' then
    pass_over_sleepers(now_ms)
end
if not value then
    value = hand_over(lock, queue, waiters, token)
    if value == nil then
        return {3}
    end
    if not value then -- the head cannot be notified: take it out of order
        redis.call('zrem', queue, token)
        redis.call('hdel', waiters, 't' .. token)
        value = give(lock, token, ARGV[2])
    end
    if is_held_with(value, token) then
        return {1, value}
    end
    if ARGV[7] ~= '' then
        pass_over_sleepers(now_ms)
    end
end
local holder = value
if string.sub(value, -1) == '+' then
    holder = string.sub(value, 1, -2)
end
local verdict = 0
if #holder ~= 36 or string.sub(holder, 1, 4) ~= 'rlf:' then
    verdict = 2
else
    if holder == value then
        value = value .. '+'
        redis.call('append', lock, '+')
    end
    -- A holder that listens is told of the first waiter after it, and again by each health check, since messages get
    -- lost. Its token begins with the identifier of its connection, which names its channel as the waiter's own does.
    local listens = string.sub(holder, 16, 16) == '1'
    if listens and (ARGV[7] ~= '' or (arrival ~= 0 and redis.call('zcard', queue) == 1)) then
        local channel = string.sub(ARGV[4], 1, -12) .. string.sub(holder, 5, 15)
        redis.pcall(ARGV[3], channel, 'wanted ' .. lock)
    end
end
return {verdict, value, redis.call('pttl', lock), arrival, is_there}
