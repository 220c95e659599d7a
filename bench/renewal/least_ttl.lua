-- The least that is left of the leases of many locks.
-- KEYS: none; the names are a prefix and the numbers from 0.
-- ARGV: 1 the prefix, 2 how many.
-- Returns {the least ttl in ms, -1 where there is none; how many locks are not there}.
local least, missing = -1, 0
for number = 0, tonumber(ARGV[2]) - 1 do
    local left = redis.call('PTTL', ARGV[1] .. number)
    if left < 0 then
        missing = missing + 1
    elseif least < 0 or left < least then
        least = left
    end
end
return {least, missing}
