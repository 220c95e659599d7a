-- Hand-over: the code that the scripts of the key queue share. It precedes each of them, and a policy precedes it: of
-- a lock, or of a semaphore, which more than one may hold.
--
-- queue    sorted set: the waiters' tokens, made by the library, scored by their arrival in the server's microseconds
-- waiters  hash: "t<token>" is "<terms> <publish> <channel>": what a waiter wants, as its policy says, and how it is
--          notified; "c<channel>" is until when, in milliseconds, the channel's process counts as awake. wait.lua drops
--          those of processes that are gone; the last waiter drops the hash
--
-- Each redis.call costs about a microsecond, during which all clients of the server wait, so the calls are few. For the
-- same reason one script passes over a limited number of waiters: with more, the client sends the script again.
local passes_left = 50

-- Delete what is left of a queue without waiters. UNLINK, because many old fields would hold up the server; where it
-- is forbidden, the hash ends with its ttl.
local function drop()
    redis.pcall('unlink', waiters)
end

-- Put the first waiter back. The queue may have ended with it: it is kept for as long as its hash, at least an hour.
local function put_back(first)
    redis.call('zadd', queue, first[2], first[1])
    redis.call('pexpire', queue, math.max(3600000, redis.call('pttl', waiters)))
end

-- Free what could be handed over to the first waiter, and put that back, since it cannot be told.
local function leave_to_health_check(first)
    put_back(first)
    remove(first[1])
end

-- Hand over to the first waiters, in order of arrival, whose connection is there; without waiters, free the lock.
-- The message to a waiter is "<new value><time of arrival>"; the waiter that asks itself gets none.
-- Returns what the last one was given (false: nobody was given anything) and what the asking one was given, if it was.
-- nil: too many waiters were gone, and what is still free has not been handed over.
local function hand_over(asking)
    local last, own = false, nil
    while room > 0 do
        if passes_left == 0 then
            return nil, own
        end
        local first = redis.call('zpopmin', queue)
        local token = first[1]
        if not token then
            set_free()
            drop()
            return last, own
        end
        local entry = redis.call('hget', waiters, 't' .. token)
        if entry then
            local terms, publish, channel = string.match(entry, '^(%S+) (%a+) (.*)$')
            local is_there = token == asking
            if not is_there then
                -- The server asks for listeners first: a former primary delivers the messages that its replication
                -- brings, and a listener that is still there must not receive what was passed on here.
                local ask = publish == 'spublish' and 'shardnumsub' or 'numsub'
                local listeners = redis.pcall('pubsub', ask, channel)
                if listeners.err then -- forbidden here: a health check hands over
                    leave_to_health_check(first)
                    return last, own
                end
                is_there = listeners[2] and listeners[2] > 0
            end
            local given = is_there and admit(token, terms)
            if is_there and not given then -- it may not have what another may
                put_back(first)
                return last, own
            end
            -- The message follows the key: where the user may not set that, the script ends before anybody is told.
            if given and token ~= asking and type(redis.pcall(publish, channel, given .. first[2])) == 'table' then
                leave_to_health_check(first)
                return last, own
            end
            redis.pcall('hdel', waiters, 't' .. token) -- where it is forbidden, the field ends with the hash
            last = given or last
            own = token == asking and given or own
        end
        passes_left = passes_left - 1
    end
    return last, own
end

