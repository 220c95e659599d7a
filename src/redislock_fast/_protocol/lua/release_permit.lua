-- Release permit: give a permit back, and hand it over to the first in the queue.
-- KEYS     permits, queue, waiters, limit
-- ARGV[1]  token
-- returns  1 if it was released, 2 if it was handed over, too, 0 if this token had none
if begin_release(ARGV[1]) == 0 then
    return 0
end
if redis.call('exists', queue, waiters) == 0 then
    return 1
end
return hand_over() and 2 or 1 -- where too many waiters were gone, a health check of another one hands over
