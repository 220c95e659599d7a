-- Hand-over: the code that the scripts of the key queue share; it precedes each of them.
--
-- lock     the lock's name. Its value is the holder's token, with a "+" (the contended flag) behind it when a release
--          must use the queue. Only tokens that the library made get the flag; other values are never changed
-- queue    sorted set: the waiters' tokens, made by the library, scored by their arrival in the server's microseconds
-- waiters  hash: "t<token>" is "<ttl_ms> <publish> <channel>": the ttl that a waiter wants (0: forever) and how it is
--          notified; "c<channel>" is until when, in milliseconds, the channel's process counts as awake. wait.lua drops
--          those of processes that are gone; the last waiter drops the hash
--
-- Each redis.call costs about a microsecond, during which all clients of the server wait, so the calls are few. For the
-- same reason one script passes over a limited number of waiters: with more, the client sends the script again.
local passes_left = 50

local function is_held_with(value, token)
    return value == token or (value == token .. '+' and #token == 36 and string.sub(token, 1, 4) == 'rlf:')
end

-- Give the lock to a waiter that has left the queue. Returns its value.
local function give(lock, token, ttl_ms)
    local word = token .. '+'
    if ttl_ms == '0' then
        redis.call('set', lock, word)
    else
        redis.call('set', lock, word, 'px', ttl_ms)
    end
    return word
end

-- Delete what is left of a queue without waiters. UNLINK, because many old fields would hold up the server; where it
-- is forbidden, the hash ends with its ttl.
local function drop(waiters)
    redis.pcall('unlink', waiters)
end

-- Free the lock, and put its first waiter back, which cannot be told. Returns false.
local function leave_to_health_check(lock, queue, first)
    redis.call('zadd', queue, first[2], first[1])
    redis.call('pexpire', queue, 3600000)
    redis.call('del', lock)
    return false
end

-- Hand the lock over to the first waiter, in order of arrival, whose connection is there; without waiters, free it.
-- The message to the waiter is "<new value><time of arrival>"; the waiter that asks itself gets none.
-- Returns the lock's new value; false: the lock is free; nil: too many waiters were gone, and the lock is as it was.
local function hand_over(lock, queue, waiters, asking)
    while passes_left > 0 do
        local first = redis.call('zpopmin', queue)
        local token = first[1]
        if not token then
            redis.call('del', lock)
            drop(waiters)
            return false
        end
        local entry = redis.call('hget', waiters, 't' .. token)
        if entry then
            local ttl_ms, publish, channel = string.match(entry, '^(%d+) (%a+) (.*)$')
            local is_there = token == asking
            if not is_there then
                -- The server asks for listeners first: a former primary delivers the messages that its replication
                -- brings, and a listener that is still there must not receive what was passed on here.
                local ask = publish == 'spublish' and 'shardnumsub' or 'numsub'
                local listeners = redis.pcall('pubsub', ask, channel)
                if listeners.err then -- forbidden here: a health check hands over
                    return leave_to_health_check(lock, queue, first)
                end
                is_there = listeners[2] and listeners[2] > 0
            end
            local given = is_there and give(lock, token, ttl_ms)
            -- The message follows the key: where the user may not set that, the script ends before anybody is told.
            if given and token ~= asking and type(redis.pcall(publish, channel, given .. first[2])) == 'table' then
                return leave_to_health_check(lock, queue, first)
            end
            redis.pcall('hdel', waiters, 't' .. token) -- where it is forbidden, the field ends with the hash
            if given then
                return given
            end
        end
        passes_left = passes_left - 1
    end
    return nil
end

