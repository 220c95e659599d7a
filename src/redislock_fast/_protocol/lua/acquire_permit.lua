-- Acquire permit: take a permit if one is free and nobody waits for it. Repeated, it prolongs the permit.
-- KEYS     permits, queue, waiters, limit
-- ARGV[1]  token
-- ARGV[2]  ttl in milliseconds
-- ARGV[3]  the caller's limit
-- returns  1 if this token has a permit, else 0; {1 or 0, limit} where an operator has set another limit
local token, own = ARGV[1], tonumber(ARGV[3])

local function take()
    if room > 0 then
        set_end(token, ARGV[2])
        return 1
    end
    return held(token) and 1 or 0
end

if redis.call('exists', queue, limit) == 0 then -- mostly
    room = count_room(own)
    return take()
end

