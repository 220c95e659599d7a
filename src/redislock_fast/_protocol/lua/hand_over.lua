-- What the scripts of the queue share: it stands in front of each of them.
--
-- lock     the lock's name. Its value is the holder's token, with a "+" behind it when the queue is to be looked at on
--          release; only tokens that the library made itself are marked, others are never changed
-- queue    sorted set: the waiters' tokens, which the library made, by the time of their arrival in the server's
--          microseconds
-- waiters  hash: "t<token>" is "<ttl_ms> <publish> <channel>", what a waiter wants and how he is told (ttl_ms 0: for
--          ever); "c<channel>" is until when, in milliseconds, the channel's process counts as awake. What is of no more
--          use is dropped by wait.lua, or with the last waiter
--
-- Each redis.call costs about a microsecond, and while a release runs, everybody waits: hence no more than these.
local function is_held_with(value, token)
    return value == token or (value == token .. '+' and #token == 36 and string.sub(token, 1, 4) == 'rlf:')
end

-- Give the lock to who has left the queue. Returns its value.
local function give(lock, token, ttl_ms)
    local word = token .. '+'
    if ttl_ms == '0' then
        redis.call('set', lock, word)
    else
        redis.call('set', lock, word, 'px', ttl_ms)
    end
    return word
end

-- Hand the lock over to the first waiter whose connection is there, in order of arrival; with nobody waiting, free it.
-- The waiter is told by "<new value><time of arrival>"; who asks for himself needs no telling.
-- Returns the lock's new value, or false.
local function hand_over(lock, queue, waiters, asking)
    while true do
        local first = redis.call('zpopmin', queue)
        local token = first[1]
        if not token then
            redis.call('del', lock, waiters)
            return false
        end
        local entry = redis.call('hget', waiters, 't' .. token)
        if entry then
            local ttl_ms, publish, channel = string.match(entry, '^(%d+) (%a+) (.*)$')
            if token == asking then
                return give(lock, token, ttl_ms)
            end
            -- Asked first: a server that was the primary delivers what its replication brings, and whoever still listens
            -- there must not hear what was passed on here.
            local ask = publish == 'spublish' and 'shardnumsub' or 'numsub'
            local listeners = redis.pcall('pubsub', ask, channel)
            local is_there = listeners[2] and listeners[2] > 0
            local told = is_there and redis.pcall(publish, channel, token .. '+' .. first[2])
            if listeners.err or type(told) == 'table' then -- this client may not: whoever looks next hands over
                redis.call('zadd', queue, first[2], token)
                redis.call('expire', queue, 3600)
                redis.call('del', lock)
                return false
            end
            if is_there then
                return give(lock, token, ttl_ms)
            end
        end
    end
end

