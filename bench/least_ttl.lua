-- The shortest rest of the leases of many locks.
-- KEYS: none; the names are a prefix and the numbers from 0.
-- ARGV: 1 the prefix, 2 how many.
-- Returns {the shortest ttl in ms, or -1 without locks; the number of missing locks}.
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
