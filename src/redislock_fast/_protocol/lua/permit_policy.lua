-- Policy of a semaphore: what the scripts of the key queue ask about its permits. It precedes hand_over.lua, as
-- lock_policy.lua does for a lock.
--
-- permits  the semaphore's name: a sorted set of the holders' tokens, scored by the end of each permit in the server's
--          milliseconds. Its size is the count: there is no counter beside it. It expires at the latest end
-- limit    how many may hold, where an operator has set that; else each caller says it. No permit is taken back
--
-- A permit whose end has passed is nobody's. It is purged when its place is needed.
local permits, limit = KEYS[1], KEYS[4]
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
        local ended = redis.call('zrangebyscore', permits, '-inf', now_ms(), 'limit', 0, 50)
        if ended[1] then
            redis.call('zrem', permits, unpack(ended))
            size = size - #ended
        end
    end
    return most - size
end

-- The operator's limit, or else the caller's.
local function limit_for(own)
    return tonumber(redis.call('get', limit) or own)
end

-- Set the end of a permit. The set's ttl is never shortened.
local function set_end(token, ttl_ms)
    local ends_at = now_ms() + ttl_ms
    redis.call('zadd', permits, ends_at, token)
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
    return ends_at and tonumber(ends_at) > now_ms() and token .. '+'
end

-- Whether a waiter that is not in the queue has a permit.
local holds_beside = held

-- Whether the caller of wait.lua or leave.lua can have a permit if nobody waits before it.
local function has_room_for(terms)
    room = count_room(limit_for(string.match(terms, '/(%d+)$')))
    return room > 0
end

local function is_free()
    return has_room_for(ARGV[2])
end

local function has_ended()
    return has_room_for(ARGV[3])
end

-- Give a permit to a waiter that has left the queue. Its terms are "<ttl_ms>/<limit>". Returns false where its limit is
-- reached.
local function admit(token, terms)
    local ttl_ms, own = string.match(terms, '^(%d+)/(%d+)$')
    if count_room(limit_for(own)) <= 0 then
        room = 0
        return false
    end
    set_end(token, ttl_ms)
    size = size + 1
    room = room - 1
    return token .. '+'
end

-- Take a permit back. Returns how many there were with this token.
local function remove(token)
    local removed = redis.call('zrem', permits, token)
    size, room = nil, room + removed
    return removed
end

-- Begin a release: its place is free from now on.
local begin_release = remove

local function set_free() end

-- In how many milliseconds the next permit ends; below 0: none does.
local function next_end()
    local first = redis.call('zrange', permits, 0, 0, 'withscores')
    return first[2] and math.max(first[2] - now_ms(), 0) or -1
end

-- The verdict of wait.lua, and a value of no meaning: holders are not told of waiters.
local function refuse()
    return 0, ''
end

