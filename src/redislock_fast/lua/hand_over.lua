-- What the scripts of the queue share: it stands in front of each of them.
--
-- lock     the lock's name. Its value is the holder's token, with a "+" behind it while somebody waits in the queue;
--          only tokens that the library made itself are marked, others are never changed
-- queue    sorted set: the waiters' tokens, which the library made, by the time of their arrival in the server's
--          microseconds
-- waiters  hash: "t<token>" is "<ttl_ms> <publish> <channel>", what a waiter wants and how he is told (ttl_ms 0: for
--          ever); "c<channel>" is until when, in milliseconds, the channel's process counts as awake
local function now_us()
    local time = redis.call('time')
    return tonumber(time[1]) * 1000000 + tonumber(time[2])
end

local function is_held_with(value, token)
    return value == token or value == token .. '+'
end

-- The lock's value for the waiter with this token, who has left the queue.
local function word_for(token, queue)
    if redis.call('exists', queue) == 1 then
        return token .. '+'
    end
    return token
end

-- Give him the lock. Returns its value.
local function give(lock, waiters, word, ttl_ms)
    if string.sub(word, -1) ~= '+' then
        redis.call('del', waiters)
    end
    if ttl_ms == '0' then
        redis.call('set', lock, word)
    else
        redis.call('set', lock, word, 'px', ttl_ms)
    end
    return word
end

-- Hand the lock over to the first waiter whose process is there and awake, in order of arrival; with nobody waiting,
-- free it. The waiter is told by "<bytes of the name>:<name><new value>"; who asks for himself needs no telling.
-- Returns the lock's new value, or false.
local function hand_over(lock, queue, waiters, asking)
    local now_ms = now_us() / 1000
    while true do
        local token = redis.call('zpopmin', queue)[1]
        if not token then
            redis.call('del', lock, waiters)
            return false
        end
        local entry = redis.call('hget', waiters, 't' .. token)
        if entry then
            local ttl_ms, publish, channel = string.match(entry, '^(%d+) (%a+) (.*)$')
            redis.call('hdel', waiters, 't' .. token)
            local word = word_for(token, queue)
            if token == asking then
                return give(lock, waiters, word, ttl_ms)
            end
            local awake_until = redis.call('hget', waiters, 'c' .. channel)
            if awake_until and tonumber(awake_until) >= now_ms then
                local heard = redis.pcall(publish, channel, #lock .. ':' .. lock .. word)
                if type(heard) == 'table' then -- this client may not publish: whoever looks next hands over
                    redis.call('zadd', queue, 0, token)
                    redis.call('hset', waiters, 't' .. token, entry)
                    redis.call('del', lock)
                    return false
                end
                if heard > 0 then
                    return give(lock, waiters, word, ttl_ms)
                end
            end
        end
    end
end

