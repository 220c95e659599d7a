-- Policy of a lock: what the scripts of the key queue ask about the key that is waited for. It precedes hand_over.lua,
-- as permit_policy.lua does for a semaphore.
--
-- lock     the lock's name. Its value is the holder's token, with a "+" (the contended flag) after it when a release
--          must use the queue. Only tokens that the library made get the flag; other values are never changed
local lock, queue, waiters = KEYS[1], KEYS[2], KEYS[3]
local value -- of the lock, once it is known; false: it is free
local room = 1 -- how many holders this script may admit
local time -- of the server, once it was read

local function is_held_with(token)
    return value == token or (value == token .. '+' and #token == 36 and string.sub(token, 1, 4) == 'rlf:')
end

-- The lock's value if it is held with this token, else false.
local function held(token)
    if value == nil then
        value = redis.call('get', lock)
    end
    return value and is_held_with(token) and value
end

-- Whether a waiter that is not in the queue holds nonetheless. Its process sees that by the value.
local function holds_beside()
    return false
end

local function is_free()
    return not value
end

-- Whether there is no such key. Of any kind of key, as the caller only wants to leave.
local function has_ended()
    return redis.call('pttl', lock) == -2
end

-- Give the lock to a waiter that has left the queue. Its terms are the ttl in milliseconds, 0 for none. Returns the
-- lock's new value.
local function admit(token, ttl_ms)
    room = 0
    value = token .. '+'
    if ttl_ms == '0' then
        redis.call('set', lock, value)
    else
        redis.call('set', lock, value, 'px', ttl_ms)
    end
    return value
end

-- Begin a release: the hand-over gives the lock another value, or deletes it.
local function begin_release() end

-- End the holding without a hand-over.
local function remove()
    value, room = false, 1
    redis.call('del', lock)
end

-- Free the lock, since nobody waits.
local function set_free()
    redis.call('del', lock)
end

-- In how many milliseconds the lock is free at the latest; below 0: never.
local function next_end()
    return redis.call('pttl', lock)
end

-- Have the holder hand the lock over. Returns the verdict of wait.lua and the lock's value.
local function refuse(arrival)
    local holder = value
    if string.sub(value, -1) == '+' then
        holder = string.sub(value, 1, -2)
    end
    if #holder ~= 36 or string.sub(holder, 1, 4) ~= 'rlf:' then
        return 2, value
    end
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
    return 0, value
end

