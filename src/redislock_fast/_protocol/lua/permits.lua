-- Permits: the code that all scripts of a semaphore share; it precedes each of them.
--
-- permits  the semaphore's name: a sorted set of the holders' tokens, scored by the end of each permit in the server's
--          milliseconds. Its size is the count: there is no counter beside it. It expires at the latest end
-- limit    how many may hold, where an operator has set that; else each caller says it. No permit is taken back
--
-- A permit lasts through the millisecond of its end, as a key does: else one that was granted late in a millisecond
-- would not last for its whole ttl. One whose end has passed is nobody's. It is purged when its place is needed.
local permits, queue, waiters, limit = unpack(KEYS)
local time -- of the server, once it was read
local room = 0 -- how many holders this script may admit
local size -- of the set, once it is known

local function now_ms()
    time = time or redis.call('time')
    return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- Count how many more may hold where so many may.
local function count_room(most)
    size = size or redis.call('zcard', permits)
    if size >= most then
        local ended = redis.call('zrangebyscore', permits, '-inf', now_ms() - 1, 'limit', 0, 50)
        if ended[1] then
            redis.call('zrem', permits, unpack(ended))
            size = size - #ended
        end
        if #ended == 50 then -- more may have ended, beyond a limit that was lowered: they take no place either
            return most - redis.call('zcount', permits, now_ms(), '+inf')
        end
    end
    return most - size
end

-- Set the end of a permit, unless that is later: an earlier request may be executed after a renewal. The set's ttl is
-- never shortened.
local function set_end(token, ttl_ms)
    local ends_at = now_ms() + ttl_ms
    redis.call('zadd', permits, 'gt', ends_at, token)
    if size == 0 then
        redis.call('pexpireat', permits, ends_at)
    elseif redis.REDIS_VERSION_NUM then -- 7.0
        redis.call('pexpireat', permits, ends_at, 'gt')
    elseif redis.call('pttl', permits) < tonumber(ttl_ms) then
        redis.call('pexpireat', permits, ends_at)
    end
end

-- What a holder's permit is called if this token has one, else false.
local function held(token)
    local ends_at = redis.call('zscore', permits, token)
    return ends_at and tonumber(ends_at) >= now_ms() and token .. '+'
end

-- Take a permit back. Returns how many there were with this token.
local function remove(token)
    local removed = redis.call('zrem', permits, token)
    size, room = nil, room + removed
    return removed
end

