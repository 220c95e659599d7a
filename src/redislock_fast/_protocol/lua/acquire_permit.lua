-- Acquire permit: take a permit if one is free and nobody waits for it. Repeated, it sets the permit's end anew.
-- KEYS     permits, queue, waiters, limit
-- ARGV[1]  token
-- ARGV[2]  ttl in milliseconds
-- ARGV[3]  the caller's limit
-- returns  1 if this token has a permit, else 0; {1 or 0, limit} where an operator has set another limit
local token, own = ARGV[1], tonumber(ARGV[3])
local most = own
local beside = redis.call('exists', queue, limit) -- mostly 0
if beside > 0 then
    most = limit_for(own)
end
room = count_room(most)
if beside > 0 then
    hand_over()
    if redis.call('exists', queue) == 1 then -- nobody is overtaken
        room = 0
    end
end
local answer = 1
if room > 0 then
    set_end(token, ARGV[2])
elseif not held(token) then
    answer = 0
end
return most == own and answer or {answer, most}
