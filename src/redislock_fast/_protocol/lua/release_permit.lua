-- Release permit: give a permit back, and hand it over to the first in the queue.
-- KEYS     permits, queue, waiters, limit
-- ARGV[1]  token
-- returns  1 if it was released, 2 if it was handed over, too, 0 if this token had none
local removed = remove(ARGV[1])
if redis.call('exists', queue, waiters) == 0 then -- mostly
    return removed
end

