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
-- ARGV[7]  empty, or the token of a waiter to look for; then also whether those in front are awake
-- returns  {1, value}: the lock is the waiter's
--          {0, value, ttl in milliseconds or -1, the time of his arrival if he is new in the queue, else 0, and 1 if
--          who was looked for is in the queue}: it is not, and is marked
--          {2, value, ttl, ...}: likewise, but it is not marked, since its holder would not hand it over
local lock, queue, waiters = KEYS[1], KEYS[2], KEYS[3]
local token = ARGV[1]

-- Put those out of the queue who stand in front and sleep: a lock that is handed to them stays with them for its ttl.
local function pass_over_sleepers(now_ms)
    while true do
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
    end
end

-- Drop what was left of waiters who are served and of processes that are gone, once it is much.
local function clean(now_ms)
    if redis.call('hlen', waiters) <= 3 * redis.call('zcard', queue) + 100 then
        return
    end
    local is_of_use = {}
    for _, waiting in ipairs(redis.call('zrange', queue, 0, -1)) do
        is_of_use['t' .. waiting] = true
    end
    local fields = redis.call('hgetall', waiters)
    local useless = {}
    for i = 1, #fields, 2 do
        local is_awake = string.sub(fields[i], 1, 1) == 'c' and tonumber(fields[i + 1]) >= now_ms
        if not is_awake and not is_of_use[fields[i]] then
            useless[#useless + 1] = fields[i]
        end
        if #useless == 1000 or (useless[1] and i + 2 > #fields) then -- in pieces: a call takes only so many
            redis.call('hdel', waiters, unpack(useless))
            useless = {}
        end
    end
end

local value = redis.call('get', lock)
if value and is_held_with(value, token) then
    return {1, value}
end
local time = redis.call('time')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local is_there = 1
if ARGV[7] ~= '' then
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
if fields == 2 or ARGV[7] ~= '' or time[2] % 64 == 0 then -- the first of his process, or now and then
    clean(now_ms)
    redis.call('pexpire', waiters, ARGV[6])
end
if ARGV[7] ~= '' then
    pass_over_sleepers(now_ms)
end
if not value then
    value = hand_over(lock, queue, waiters, token)
    if not value then -- the head cannot be told: better out of order than not at all
        redis.call('zrem', queue, token)
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
elseif holder == value then
    value = value .. '+'
    redis.call('append', lock, '+')
end
return {verdict, value, redis.call('pttl', lock), arrival, is_there}
