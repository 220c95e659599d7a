-- Policy of a semaphore: what the scripts of the key queue ask about its permits. It stands between permits.lua and
-- hand_over.lua, as lock_policy.lua does for a lock. To define its functions takes as long as four calls, so the
-- scripts that mostly need none of them begin before it.

-- The operator's limit, or else the caller's. Below 0: its key has no number, and nobody is admitted.
local function limit_for(own)
    local set = redis.call('get', limit)
    return tonumber(set and (string.match(set, '^%d+$') or -1) or own)
end

-- Whether a waiter that is not in the queue has a permit.
local holds_beside = held

-- Whether a waiter with these terms can have a permit if nobody waits before it.
local function is_free(terms)
    room = count_room(limit_for(string.match(terms, '/(%d+)$')))
    return room > 0
end

-- Of a key of another kind there is nothing to be had, and the caller only wants to leave.
local function has_ended()
    size = redis.pcall('zcard', permits)
    return type(size) == 'number' and is_free(ARGV[3])
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

